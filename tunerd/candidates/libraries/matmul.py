"""A task's kernel as a product by cuBLASLt, if it is one to the last element.

Axes of the result and of the sum become the rows, columns, depth and batch of a product where they
lie in each tensor like one axis: each a fixed distance from the next. Where the rows do not, the
first of their axes may be those of a batch whose other operand is the same, and so for columns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tunerd.candidates.libraries.epilogue import Epilogue, epilogue_of
from tunerd.candidates.libraries.matched import Matched
from tunerd.candidates.nests.contraction import Contraction, contraction_of, unwidened
from tunerd.candidates.nests.nest import Axis, Expr, Linear, Nest, NotANest, linear
from tunerd.libraries.cublaslt import ACTIVATIONS, MatmulCall, Matrix


def matmul_of(nest: Nest, precision: str, weights: Collection[int]) -> Matched[MatmulCall]:
    """Return a nest as a product by cuBLASLt; raises NotANest with the reason.

    weights: parameters that are constants of the model. A bias among them is taken in the type of
    the result, as the library wants it.
    """
    contraction = contraction_of(nest)
    epilogue = epilogue_of(nest.epilogue, ACTIVATIONS)
    reason = ""
    for axes in _ways(contraction):
        try:
            return _matched(nest, axes, epilogue, precision, weights)
        except NotANest as error:
            reason = reason or str(error)
    raise NotANest(reason)


@dataclass(frozen=True)
class _Axes:
    """What is what in op(A) [m, k] op(B) [k, n]."""

    a: Expr
    b: Expr
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]
    k: tuple[Axis, ...]
    batch: tuple[Axis, ...]


def _ways(of: Contraction) -> Iterator[_Axes]:
    """Yield the ways to read a contraction as a product, or as a batch of them."""
    order = of.nest.axes.index
    cuts = [(i, 0) for i in range(len(of.row_axes))]
    cuts += [(0, i) for i in range(1, len(of.column_axes))]
    for rows, columns in cuts:
        moved = (*of.row_axes[:rows], *of.column_axes[:columns])
        batch = tuple(sorted((*of.apart, *moved), key=order))
        left, right = of.row_axes[rows:], of.column_axes[columns:]
        yield _Axes(of.right, of.left, right, left, of.depth_axes, batch)
        yield _Axes(of.left, of.right, left, right, of.depth_axes, batch)


def _matched(
    nest: Nest, axes: _Axes, epilogue: Epilogue, precision: str, weights: Collection[int]
) -> Matched[MatmulCall]:
    m, n, k = (_size(x) for x in (axes.m, axes.n, axes.k))
    a_param, a_place = _load(unwidened(axes.a))
    b_param, b_place = _load(unwidened(axes.b))
    depth = tuple(sorted(axes.k, key=lambda axis: -a_place.factors.get(axis, 0)))
    matrices = []
    for param, place, sizes, along in (
        (a_param, a_place, (m, k), (axes.m, depth)),
        (b_param, b_place, (k, n), (depth, axes.n)),
    ):
        steps = [_step(place, x) for x in along]
        matrices.append(_stored(nest.params[param].dtype, sizes, steps, _step(place, axes.batch)))
    (a, a_transposed), (b, b_transposed) = matrices
    d_param = len(nest.params) - 1
    d = _like_result(nest, axes, d_param, _place(nest.target))
    c, bias = _added(nest, axes, epilogue, weights)
    call = MatmulCall(
        a=a,
        b=b,
        c=c and c[1],
        d=d,
        transposed=(a_transposed, b_transposed),
        batch=_size(axes.batch),
        precision=precision,
        activation=epilogue.activation,
        has_bias=bias is not None,
        alpha=epilogue.alpha,
    )
    if call.problem:
        raise NotANest(call.problem)
    casts = []
    if bias is not None and nest.params[bias].dtype != d.dtype:
        casts.append((bias, d.dtype))
    added = (*(c[:1] if c else ()), *(() if bias is None else (bias,)))
    return Matched(call, (a_param, b_param, *added, d_param), tuple(casts))


def _like_result(nest: Nest, axes: _Axes, param: int, place: Linear) -> Matrix:
    """Return a parameter that lies as the result has to: by the rows of the first operand."""
    steps = [_step(place, x) for x in (axes.m, axes.n)]
    sizes = _size(axes.m), _size(axes.n)
    found, is_transposed = _stored(nest.params[param].dtype, sizes, steps, _step(place, axes.batch))
    if is_transposed:
        raise NotANest("its result does not lie by the rows of an operand")
    return found


def _added(
    nest: Nest, axes: _Axes, epilogue: Epilogue, weights: Collection[int]
) -> tuple[tuple[int, Matrix] | None, int | None]:
    """Return the parameters that are added: a tensor like the result, and a bias."""
    tensor, bias = None, None
    for load in epilogue.added:
        param, place = _load(load)
        is_same = nest.params[param].dtype == nest.params[-1].dtype
        is_bias = set(place.factors) <= set(axes.m) and _step(place, axes.m) in (0, 1)
        is_of_rows = _size(axes.m) == 1 or place.factors
        if bias is None and is_bias and is_of_rows and (is_same or param in weights):
            bias = param
        elif not is_same:
            raise NotANest("what is added is of another type than the result")
        elif tensor is None:
            tensor = param, _like_result(nest, axes, param, place)
        else:
            raise NotANest("more is added than a bias and one tensor")
    return tensor, bias


def _load(expr: Expr) -> tuple[int, Linear]:
    if expr.op != "load":
        raise NotANest("an operand is computed before it is multiplied")
    return expr.value, _place(expr.args[0])


def _place(expr: Expr) -> Linear:
    place = linear(expr)
    if place is None or place.constant:
        raise NotANest("a tensor is not read from its beginning in equal steps")
    return place


def _step(place: Linear, axes: Sequence[Axis]) -> int:
    """Return how many elements each value of axes, counted as one, is from the next."""
    real = [axis for axis in axes if axis.extent > 1]
    step = expected = place.factors.get(real[-1], 0) if real else 0
    for axis in reversed(real):
        if place.factors.get(axis, 0) != expected:
            raise NotANest("its axes are not those of a matrix")
        expected *= axis.extent
    return step


def _stored(
    dtype: str, sizes: tuple[int, int], steps: Sequence[int], apart: int
) -> tuple[Matrix, bool]:
    """Return how values [rows, columns] lie by columns, and whether that is transposed."""
    for is_transposed in (False, True):
        (rows, columns), (down, across) = sizes, steps
        if is_transposed:
            rows, columns, down, across = columns, rows, across, down
        stride = across if columns > 1 else rows
        if (down == 1 or rows == 1) and stride >= rows:
            return Matrix(dtype, rows, columns, stride, apart), is_transposed
    raise NotANest("an operand does not lie like a matrix")


def _size(axes: Sequence[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)
