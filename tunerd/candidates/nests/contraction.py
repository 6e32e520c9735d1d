"""Sums of products: matrix products, and convolutions as implicit ones.

The axes of the result are rows, columns or, where both operands have them, separate products; the
axes of the sum are the depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tunerd.candidates.nests.nest import Axis, Expr, Nest, NotANest, Reduction

ONE_ROW = Axis("one", 1)  # of a product with a vector


@dataclass(frozen=True)
class Contraction:
    """A nest as a product of `left` [rows, depth] and `right` [depth, columns]."""

    nest: Nest
    left: Expr
    right: Expr
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]
    apart: tuple[Axis, ...]  # of which each value is a product of its own
    depth_axes: tuple[Axis, ...]

    @cached_property
    def rows(self) -> int:
        return _size(self.row_axes)

    @cached_property
    def columns(self) -> int:
        return _size(self.column_axes)

    @cached_property
    def batch(self) -> int:
        return _size(self.apart)

    @cached_property
    def depth(self) -> int:
        return _size(self.depth_axes)


def contraction_of(nest: Nest, reduction: Reduction | None = None) -> Contraction:
    """Return a nest as a contraction; raises NotANest with the reason where it is none.

    reduction: that is the sum of products; None: the only one.
    """
    reduction = reduction or nest.reduction
    if reduction.fold != "add" or reduction.start != 0:
        raise NotANest("it is no sum of products")
    value = reduction.value
    while value.op == "cast":
        (value,) = value.args
    if value.op != "mul" or not reduction.axes:
        raise NotANest("it is no sum of products")
    left, right = value.args
    if any(len(side.loads) != 1 for side in (left, right)):
        raise NotANest("an operand is no single tensor")
    if nest.axes and nest.axes[-1] in left.axes and nest.axes[-1] not in right.axes:
        left, right = right, left  # columns are what lies together in the result
    rows = tuple(a for a in nest.axes if a in left.axes and a not in right.axes)
    columns = tuple(a for a in nest.axes if a in right.axes and a not in left.axes)
    apart = tuple(a for a in nest.axes if a in left.axes and a in right.axes)
    if len(rows) + len(columns) + len(apart) < len(nest.axes):
        raise NotANest("an axis of the result is one of no operand")
    if not columns:
        raise NotANest("it has no columns")
    for axis in reduction.axes:
        if axis not in left.axes or axis not in right.axes:
            raise NotANest("an axis of the sum is one of one operand only")
    return Contraction(nest, left, right, rows or (ONE_ROW,), columns, apart, reduction.axes)


def unwidened(operand: Expr) -> Expr:
    """Return an operand without its casts to fp32: what multiplies takes what was stored."""
    while operand.op == "cast":
        (operand,) = operand.args
    if operand.op == "select" and operand.args[1].op == "cast":
        test, yes, no = operand.args
        if no.op == "const" and no.value == 0:
            return Expr("select", (test, yes.args[0], no), dtype=yes.args[0].dtype)
    return operand


def _size(axes: tuple[Axis, ...]) -> int:
    return math.prod(a.extent for a in axes)
