"""Quantizers next to what computes their values, in the type that tensor cores multiply.

Exporters put a pair of `quantize` and `dequantize` on either side of each operator, also where it
only moves values. Both compute each value by itself, so that a reshape or a transpose may as well
be of the values of 8 bits. Then a quantizer is part of the kernel before it, and a second one with
the same scale, which gives back the numbers that the first one made, is left out.

What is joined and then quantized is quantized part by part, by the kernels that compute the parts;
what joins bytes is left out then, like any concatenation (`joins`).

A GPU multiplies values of -128 to 127. What is stored as 0 to 255 is stored less 128, with its zero
point, so that no kernel that reads it has to move it. The whole numbers that a product sums are the
same either way.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import rewritten
from tunerd.frontend.relax.movement import Graph, op_name, shape_of

_QUANTIZE, _DEQUANTIZE = "relax.quantize", "relax.dequantize"
_MOVES = frozenset(
    f"relax.{n}" for n in ("reshape", "permute_dims", "expand_dims", "squeeze", "flatten")
)
_SELECTS, _JOINS = "relax.strided_slice", "relax.concat"
_POOLS = ("relax.nn.avg_pool2d", "relax.nn.max_pool2d")  # they read what is dequantized
_SHIFT = 128  # from uint8 to int8


def gather_quantizers(mod: IRModule) -> IRModule:
    """Return `mod` with moves of `main` between dequantizers and quantizers as moves of 8 bits."""
    return rewritten(mod, _Gatherer(mod))


def store_int8(mod: IRModule) -> IRModule:
    """Return `mod` with what `main` quantizes to uint8 as int8, if only dequantizers read it."""
    graph = Graph(mod)
    narrower = _Narrower(mod)
    narrower.graph, narrower.kept = graph, set()
    for binding in graph.bindings:
        call = binding.value
        is_one = op_name(call) == _QUANTIZE and _has_fixed_zero(graph, call)
        if is_one and _is_dequantized(graph, binding.var):
            narrower.kept.add(call.__chandle__())
    return rewritten(mod, narrower) if narrower.kept else mod


def quantize_parts(mod: IRModule) -> IRModule:
    """Return `mod` with the parts of what `main` joins quantized, where nothing else reads them.

    Before a pool they are dequantized, too.
    """
    graph = Graph(mod)
    if not any(op_name(binding.value) == _QUANTIZE for binding in graph.bindings):
        return mod
    splitter = _Splitter(mod)
    splitter.graph = graph
    return rewritten(mod, splitter)


def _is_dequantized(graph: Graph, var: Any) -> bool:
    """Whether all that reads a value, moved or not, are dequantizers with fixed zero points."""
    for user in graph.users.get(var, ()):
        if op_name(user) == _DEQUANTIZE and _has_fixed_zero(graph, user):
            continue
        if op_name(user) not in (*_MOVES, _SELECTS):
            return False
        if not _is_dequantized(graph, graph.var_of(user)):
            return False
    return bool(graph.users.get(var))


def _has_fixed_zero(graph: Graph, call: Any) -> bool:
    """Whether a quantizer's or a dequantizer's zero point is a constant of uint8."""
    zero = graph.constant(call.args[2])
    return zero is not None and str(zero.dtype) == "uint8"


@mutator
class _Narrower(PyExprMutator):  # type: ignore[misc]
    graph: Graph  # of the module as it was
    kept: set[int]  # addresses of quantizers

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        if call.__chandle__() in self.kept:
            data, scale, zero = visited.args
            how = call.attrs
            return relax.op.quantize(data, scale, self._less(zero), how.axis, "int8")
        name = op_name(call)
        if name not in (_DEQUANTIZE, _SELECTS, *_MOVES):
            return visited
        source = visited.args[0]
        if str(call.args[0].ty.dtype) != "uint8" or str(source.ty.dtype) != "int8":
            return visited
        if name == _DEQUANTIZE:
            _, scale, zero = visited.args
            how = call.attrs
            return relax.op.dequantize(source, scale, self._less(zero), how.axis, how.out_dtype)
        return relax.Call(call.op, visited.args, call.attrs, ty_args=call.ty_args)

    def _less(self, zero: relax.Expr) -> relax.Expr:
        values = self.graph.constant(zero)
        assert values is not None
        return relax.const((values.astype(np.int16) - _SHIFT).astype(np.int8))


@mutator
class _Gatherer(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name = op_name(call)
        if name in _MOVES:
            return self._dequantized_after(visited)
        return self._quantized_before(visited) if name == _QUANTIZE else visited

    def _dequantized_after(self, move: relax.Call) -> relax.Expr:
        """Move what is dequantized before that."""
        before = _bound(self, move.args[0])
        if op_name(before) != _DEQUANTIZE or not _is_of_one_scale(before):
            return move
        data, scale, zero = before.args
        if not isinstance(data, relax.Var):
            return move  # a weight
        how = before.attrs
        return relax.op.dequantize(self._moved(move, data), scale, zero, -1, how.out_dtype)

    def _quantized_before(self, call: relax.Call) -> relax.Expr:
        """Quantize what is moved before that; nothing where it was dequantized so."""
        data, scale, zero = call.args
        if not _is_of_one_scale(call):
            return call
        moves = []
        while op_name(bound := _bound(self, data)) in _MOVES:
            moves.append(bound)
            data = bound.args[0]
        if op_name(bound) == _DEQUANTIZE and self._is_undone(call, bound):
            made = bound.args[0]
        elif not moves:
            return call
        else:
            made = relax.op.quantize(data, scale, zero, -1, call.attrs.out_dtype)
        for move in reversed(moves):
            made = self._moved(move, self._emit(made))
        return made

    def _is_undone(self, quantizer: relax.Call, dequantizer: relax.Call) -> bool:
        if str(dequantizer.args[0].ty.dtype) != str(quantizer.attrs.out_dtype):
            return False
        pairs = zip(quantizer.args[1:], dequantizer.args[1:], strict=True)
        return _is_of_one_scale(dequantizer) and all(map(self._is_same, *zip(*pairs, strict=True)))

    def _is_same(self, a: relax.Expr, b: relax.Expr) -> bool:
        a, b = _bound(self, a), _bound(self, b)
        if a.same_as(b):
            return True
        if not all(hasattr(e, "value") for e in (a, b)):
            return False
        return bool(np.array_equal(a.value.numpy().ravel(), b.value.numpy().ravel()))

    def _moved(self, move: relax.Call, data: relax.Expr) -> relax.Expr:
        moved = relax.Call(move.op, [data, *move.args[1:]], move.attrs, ty_args=move.ty_args)
        return self.builder_.emit(moved)

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return expr if isinstance(expr, relax.Var) else self.builder_.emit(expr)


@mutator
class _Splitter(PyExprMutator):  # type: ignore[misc]
    graph: Graph  # of the module as it was

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        if op_name(call) == _QUANTIZE and _is_of_one_scale(call) and self._is_read_here(call):
            return self._of_parts(visited)
        if op_name(call) in _POOLS and self.graph.is_used_once(call.args[0]):
            before = _bound(self, visited.args[0])
            if op_name(before) == _DEQUANTIZE and op_name(_bound(self, before.args[0])) == _JOINS:
                joined = self.builder_.emit(self._of_parts(before))
                return relax.Call(call.op, [joined, *visited.args[1:]], call.attrs)
        return visited

    def _is_read_here(self, quantizer: relax.Call) -> bool:
        """Whether it reads what is joined, and nothing else reads that or a part."""
        (data, *_) = quantizer.args
        join = self.graph.call(data, _JOINS)
        if join is None or not self.graph.is_used_once(data):
            return False
        parts = self.graph.value(join.args[0])
        return isinstance(parts, relax.Tuple) and all(map(self.graph.is_used_once, parts.fields))

    def _of_parts(self, call: relax.Call) -> relax.Expr:
        """Return a quantizer or a dequantizer of what is joined as one of each part, joined."""
        data, *how = call.args
        join = _bound(self, data)
        make = relax.op.quantize if op_name(call) == _QUANTIZE else relax.op.dequantize
        made = [
            self.builder_.emit(make(part, *how, -1, call.attrs.out_dtype))
            for part in _bound(self, join.args[0]).fields
        ]
        return relax.op.concat(made, join.attrs.axis)


def _is_of_one_scale(call: relax.Call) -> bool:
    return all(math.prod(shape_of(a) or (1,)) == 1 for a in call.args[1:])


def _bound(of: PyExprMutator, expr: relax.Expr) -> Any:
    """Return what a new variable is bound to; anything else as it is."""
    while isinstance(expr, relax.Var) and of.lookup_binding(expr) is not None:
        expr = of.lookup_binding(expr)
    return expr
