"""Quantized products of one tensor with several weights as one, as of queries, keys and values.

What follows each of them is by columns: a scale, a bias, and a quantizer, whose scale and zero
point are numbers. They become vectors of all columns, and each value is computed as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import rewritten
from tunerd.frontend.relax.movement import Graph, op_name, shape_of

_Array = np.ndarray[Any, Any]


def merge_products(mod: IRModule) -> IRModule:
    """Return `mod` with products of `main` that read one dequantized tensor as one product."""
    graph = Graph(mod)
    found = []
    for binding in graph.bindings:
        if op_name(binding.value) == "relax.dequantize":
            parts = _parts(graph, binding.var)
            if len(parts) > 1 and len({(p.depth, p.dtype) for p in parts}) == 1:
                found.append(parts)
    if not found:
        return mod
    merger = _Merger(mod)
    merger.graph, merger.made = graph, {}
    merger.places = {
        part.last.__chandle__(): (parts, n) for parts in found for n, part in enumerate(parts)
    }
    return rewritten(mod, merger)


@dataclass(frozen=True)
class _Part:
    """A product of a tensor with a constant, and its quantizer."""

    data: Any
    weight: _Array  # int8 [depth, columns]
    scales: _Array  # float32 [columns]
    zeros: _Array  # int8 [columns], of the weight
    bias: _Array | None  # float32 [columns]
    last: Any  # the quantizer
    scale: _Array  # of the quantizer: one number, as its zero point
    zero: _Array

    @property
    def depth(self) -> int:
        return int(self.weight.shape[0])

    @property
    def columns(self) -> int:
        return int(self.weight.shape[1])

    @property
    def dtype(self) -> tuple[str, str]:
        return str(self.weight.dtype), str(self.last.attrs.out_dtype)


def _parts(graph: Graph, data: Any) -> list[_Part]:
    found = []
    for user in graph.users.get(data, ()):
        if op_name(user) == "relax.matmul" and user.args[0].same_as(data):
            part = _part(graph, data, user)
            if part is not None:
                found.append(part)
    return found


def _part(graph: Graph, data: Any, product: Any) -> _Part | None:
    weight = graph.call(product.args[1], "relax.dequantize")
    if weight is None or len(shape_of(weight) or ()) != 2:
        return None
    values, scales, zeros = (graph.constant(a) for a in weight.args)
    if values is None or scales is None or zeros is None:
        return None
    columns = values.shape[1]
    is_by_column = int(weight.attrs.axis) in (-1, 1)
    if any(a.size != 1 and not (is_by_column and a.size == columns) for a in (scales, zeros)):
        return None
    last, bias = _only_user(graph, product), None
    if op_name(last) == "relax.add":
        bias = next((v for a in last.args if (v := _vector(graph, a, columns)) is not None), None)
        if bias is None:
            return None
        last = _only_user(graph, last)
    if op_name(last) != "relax.quantize":
        return None
    scale, zero = (graph.constant(a) for a in last.args[1:])
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return None
    scales, zeros = (np.broadcast_to(a.ravel(), columns) for a in (scales, zeros))
    return _Part(data, values, scales, zeros, bias, last, scale, zero)


def _only_user(graph: Graph, call: Any) -> Any:
    users = graph.users.get(graph.var_of(call), ())
    return users[0] if len(users) == 1 else None


def _vector(graph: Graph, expr: Any, columns: int) -> _Array | None:
    """Return a bias, which is one constant or one that is dequantized."""
    values = graph.constant(expr)
    if (whole := graph.call(expr, "relax.dequantize")) is not None:
        given, scales, zeros = (graph.constant(a) for a in whole.args)
        if given is None or scales is None or zeros is None or zeros.any():
            return None
        values = given.astype(np.float32) * scales if given.ndim == 1 else None
    if values is None or values.shape[-1:] != (columns,) or values.size != columns:
        return None
    return values.ravel()


@mutator
class _Merger(PyExprMutator):  # type: ignore[misc]
    graph: Graph  # of the module as it was
    places: dict[int, tuple[Sequence[_Part], int]]  # by address of a quantizer: in which product
    made: dict[int, relax.Var]  # by address of the first quantizer of a product

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        place = self.places.get(call.__chandle__())
        if place is None:
            return super().visit_call_(call)
        parts, number = place
        key = parts[0].last.__chandle__()
        if key not in self.made:
            self.made[key] = self._product(parts)
        begin = sum(p.columns for p in parts[:number])
        axis = len(shape_of(call) or ()) - 1
        end = begin + parts[number].columns
        return relax.op.strided_slice(self.made[key], [axis], [begin], [end])

    def _product(self, parts: Sequence[_Part]) -> relax.Var:
        emit, const = self.builder_.emit, relax.const
        weight, scales, zeros = (
            const(np.concatenate([getattr(p, name) for p in parts], axis=-1))
            for name in ("weight", "scales", "zeros")
        )
        made = emit(relax.op.dequantize(weight, scales, zeros, axis=1))
        made = emit(relax.op.matmul(self.visit_expr(parts[0].data), made))
        if any(p.bias is not None for p in parts):
            none = np.float32(0)
            bias = [none.repeat(p.columns) if p.bias is None else p.bias for p in parts]
            made = emit(relax.op.add(made, const(np.concatenate(bias))))
        by_column = [
            np.concatenate([getattr(p, name).ravel().repeat(p.columns) for p in parts])
            for name in ("scale", "zero")
        ]
        how = parts[0].last.attrs
        return emit(relax.op.quantize(made, *map(const, by_column), -1, how.out_dtype))
