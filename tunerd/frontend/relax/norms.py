"""Layer norms as part of the products that read them.

A norm of rows followed by a product with a constant is

    (x @ W' - mean(x) * sum(W')) * rstd(x) + beta @ W,    W' = gamma * W,

where sum(W') is over the depth: one kernel, which has each row's mean and deviation from the values
that it multiplies anyway. What the norm computes is never stored, nor rounded. What is rounded is x
itself, so it is for values that are stored in 16 bits either way; with them the sums in fp32 are
nearer to the exact result than the norm's rounded values are, unless a row's mean is more than 50
times its deviation, of which 16 bits have little left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import rewritten
from tunerd.frontend.relax.movement import Graph, op_name, shape_of
from tunerd.frontend.relax.precision import FEW
from tunerd.frontend.relax.rewriting import TAKES_AN_EPILOGUE
from tunerd.system.arrays import rounded

_LEAST_ROWS = 16  # of a product by tensor cores
_LEAST_COLUMNS = 64


def fold_norms(mod: IRModule, precision: str) -> IRModule:
    """Return `mod` with each norm that only products with constants read as part of these.

    `precision` is that in which values between kernels are stored, of 16 bits.
    """
    graph = Graph(mod)
    found = {p.last.__chandle__(): p for b in graph.bindings for p in _products(graph, b)}
    if not found:
        return mod
    folder = _Folder(mod)
    folder.found, folder.precision = found, precision
    return rewritten(mod, folder)


@dataclass(frozen=True)
class _Product:
    """A product of a norm with a constant."""

    last: Any  # the call that adds a bias, or that multiplies
    data: Any  # what the norm is of
    gamma: np.ndarray[Any, Any]  # shape [depth]
    beta: np.ndarray[Any, Any]  # shape [depth]
    epsilon: float
    weight: np.ndarray[Any, Any]  # shape [depth, columns]
    bias: np.ndarray[Any, Any]  # shape [columns]


def _products(graph: Graph, binding: Any) -> list[_Product]:
    """Return the products that read a norm; none where anything else reads it."""
    norm = graph.call(binding.var, "relax.nn.layer_norm")
    shape = shape_of(binding.var)
    if norm is None or shape is None or str(binding.var.ty.dtype) != "float32":
        return []
    rows, depth = math.prod(shape[:-1]), shape[-1]
    is_last = [int(a) for a in norm.attrs.axes] in ([-1], [len(shape) - 1])
    if not is_last or rows < _LEAST_ROWS or not _is_narrow(graph, norm.args[0]):
        return []
    gamma = graph.constant(norm.args[1]) if norm.attrs.scale else np.ones(depth, np.float32)
    beta = graph.constant(norm.args[2]) if norm.attrs.center else np.zeros(depth, np.float32)
    if gamma is None or beta is None or not gamma.size == beta.size == depth:
        return []
    found = []
    for user in graph.users.get(binding.var, ()):
        weight = graph.constant(user.args[1]) if op_name(user) == "relax.matmul" else None
        if weight is None or weight.ndim != 2 or weight.shape[1] < _LEAST_COLUMNS:
            return []
        last, bias = _biased(graph, user, weight.shape[1])
        epsilon = float(norm.attrs.epsilon)
        found.append(
            _Product(last, norm.args[0], gamma.ravel(), beta.ravel(), epsilon, weight, bias)
        )
    return found


def _is_narrow(graph: Graph, data: Any) -> bool:
    """Whether a value is one that is stored in 16 bits: no input or output, and not of few."""
    if math.prod(shape_of(data) or ()) <= FEW:
        return False
    while True:
        if not all(isinstance(user, relax.Call) for user in graph.users.get(data, ())):
            return False
        call = graph.value(data)
        if op_name(call) != "relax.reshape":
            return isinstance(call, relax.Call)
        data = call.args[0]


def _biased(graph: Graph, product: Any, columns: int) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return the call that adds a constant for each column to a product, and that."""
    (var,) = (b.var for b in graph.bindings if b.value.same_as(product))
    user = graph.users[var][0] if graph.is_used_once(var) else product
    if op_name(user) == "relax.add":
        for other in user.args:
            bias = graph.constant(other)
            if bias is not None and bias.shape[-1:] == (bias.size,) == (columns,):
                return user, bias.ravel()
    return product, np.zeros(columns, np.float32)


@mutator
class _Folder(PyExprMutator):  # type: ignore[misc]
    found: Mapping[int, _Product]  # by address of its last call
    precision: str

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        product = self.found.get(call.__chandle__())
        if product is None:
            return super().visit_call_(call)
        weight = product.weight.astype(np.float64)
        own = rounded((product.gamma[:, None] * weight).astype(np.float32), self.precision)
        # Of the weights as they are multiplied, so that a row of equal values leaves nothing.
        sums = own.sum(axis=0, dtype=np.float64).astype(np.float32)
        made = self.builder_.call_te(
            functools.partial(_computed, epsilon=product.epsilon),
            self.visit_expr(product.data),
            relax.const(own),
            relax.const(sums),
            primfunc_name_hint="norm_matmul",
            primfunc_attrs={"op_pattern": TAKES_AN_EPILOGUE},
        )
        bias = (product.bias + product.beta @ weight).astype(np.float32)
        return relax.op.add(self.builder_.emit(made), relax.const(bias)) if bias.any() else made


def _computed(x: te.Tensor, w: te.Tensor, sums: te.Tensor, *, epsilon: float) -> te.Tensor:
    *lead, depth = x.shape
    size = tirx.FloatImm("float32", float(int(depth)))
    total, squares, product = (
        te.reduce_axis(tvm.ir.Range(tirx.IntImm("int64", 0), depth), name=f"k{n}") for n in range(3)
    )
    total_of = te.compute(lead, lambda *i: te.sum(x(*i, total), axis=total), name="norm_total")
    squares_of = te.compute(
        lead, lambda *i: te.sum(x(*i, squares) * x(*i, squares), axis=squares), name="norm_squares"
    )
    products = te.compute(
        [*lead, w.shape[1]],
        lambda *i: te.sum(x(*i[:-1], product) * w(product, i[-1]), axis=product),
        name="norm_products",
    )

    def result(*i: Any) -> Any:
        mean = total_of(*i[:-1]) / size
        variance = tirx.max(squares_of(*i[:-1]) / size - mean * mean, tirx.FloatImm("float32", 0.0))
        rstd = tirx.rsqrt(variance + tirx.FloatImm("float32", epsilon))
        return rstd * (products(*i) - mean * sums(i[-1]))

    return te.compute(products.shape, result, name="norm_matmul")
