"""Transposes after what computes each value by itself, until they meet one that undoes them.

A model that goes between layouts, as ConvNeXt's blocks between convolutions and products of
channels, has its residuals in one of them and its kernels in the other: each block ends and begins
with a copy, and neither the scale nor the residual is part of the product before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.movement import OF_ONE, OF_TWO, op_name, shape_of

_MOVE = "relax.permute_dims"

Order = tuple[int, ...]


def sink_permutes(mod: IRModule) -> IRModule:
    """Return `mod` with transposes moved down in `main`, unless more values are moved then."""
    sinker = _Sinker(mod)
    main = sinker.visit_expr(mod["main"])
    sunk = mod.clone()
    sunk.update_func(mod.get_global_var("main"), main)
    sunk = relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(sunk))
    return sunk if _moved_values(sunk) < _moved_values(mod) else mod


def _moved_values(mod: IRModule) -> int:
    """Return how many values transposes move, those apart that only move dimensions of one."""
    count = 0
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            order, shape = _order(binding.value), shape_of(binding.value)
            if order and shape:
                wide = [axis for axis in order if shape_of(binding.value.args[0])[axis] > 1]  # type: ignore[index]
                count += math.prod(shape) if wide != sorted(wide) else 0
    return count


def _order(expr: relax.Expr | None) -> Order:
    """Return the order of a transpose, () of anything else."""
    if expr is None or op_name(expr) != _MOVE:
        return ()
    axes = expr.attrs.axes
    rank = len(shape_of(expr) or ())
    return tuple(int(a) for a in axes) if axes is not None else tuple(range(rank))[::-1]


@mutator
class _Sinker(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name = op_name(visited)
        if order := _order(visited):
            return self._permuted(visited.args[0], order)
        if name in OF_ONE:
            operands = visited.args[:1]
        elif name in OF_TWO or name == "relax.mean":
            operands = visited.args
        else:
            return visited
        order = next((o for o in map(self._order_of, operands) if o), ())
        rank = len(shape_of(call) or ())
        if not order or rank != len(order):
            return visited
        if name == "relax.mean":
            return self._mean(visited, order)
        moved = [self._before(operand, order) for operand in operands]
        if any(m is None for m in moved):
            return visited
        rest = visited.args[len(operands) :]
        made = self.builder_.emit(relax.Call(visited.op, [*moved, *rest], visited.attrs))
        return self._permuted(made, order)

    def _mean(self, call: relax.Call, order: Order) -> relax.Expr:
        axes = call.attrs.axis
        if not call.attrs.keepdims or axes is None:
            return call
        own = sorted(order[int(a)] for a in axes)
        source = self._source(call.args[0])
        made = self.builder_.emit(relax.op.mean(source, own, keepdims=True))
        return self._permuted(made, order)

    def _before(self, operand: relax.Expr, order: Order) -> relax.Expr | None:
        """Return an operand as it is before a transpose of the result; None where it is a copy."""
        if self._order_of(operand) == order:
            return self._source(operand)
        if not isinstance(operand, GenericConst):
            return operand if shape_of(operand) == () else None
        values = operand.value.numpy()
        if values.size == 1:
            return operand
        values = values.reshape((1,) * (len(order) - values.ndim) + values.shape)
        return relax.const(values.transpose(np.argsort(order)), str(operand.ty.dtype))

    def _permuted(self, source: relax.Expr, order: Sequence[int]) -> relax.Expr:
        """Return a transpose; one of another is one, or none."""
        if before := self._order_of(source):
            source, order = self._source(source), [before[axis] for axis in order]
        if list(order) == sorted(order):
            return source
        return relax.op.permute_dims(source, list(order))

    def _order_of(self, expr: relax.Expr) -> Order:
        return _order(self._bound(expr))

    def _source(self, expr: relax.Expr) -> relax.Expr:
        bound = self._bound(expr)
        assert bound is not None
        return bound.args[0]

    def _bound(self, expr: relax.Expr) -> relax.Expr | None:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
