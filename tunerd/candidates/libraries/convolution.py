"""A task's kernel as a convolution by cuDNN, if it is one to the last element.

Images lie as [n, h, w, c], and filters as [r, s, c, k], which cuDNN wants as [k, r, s, c]: filters
that are weights are laid so. Which axis is which follows from how far apart its values lie in the
filters and in the result; where the image is read gives strides, dilations and padding. Whether a
tap is read or is padding is asked of the kernel for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunerd.candidates.libraries.epilogue import Epilogue, epilogue_of
from tunerd.candidates.libraries.matched import Matched
from tunerd.candidates.nests.contraction import unwidened
from tunerd.candidates.nests.nest import Axis, Expr, Linear, Nest, NotANest, Tensor, linear
from tunerd.libraries.cudnn_graphs import ACTIVATIONS, ConvolutionCall, Image
from tunerd.vocabulary import Layout

FILTERS = (3, 0, 1, 2)  # [r, s, c, k] as [k, r, s, c]
_NO_CONVOLUTION = "it is no convolution of two dimensions"


def convolution_of(
    nest: Nest, precision: str, weights: Collection[int]
) -> Matched[ConvolutionCall]:
    """Return a nest as a convolution by cuDNN; raises NotANest with the reason.

    weights: parameters that are constants of the model. The filters are among them, and a bias is
    taken in the type of the result.
    """
    x, filters, is_inside = _operands(nest, weights)
    image, taps, result = (nest.params[i] for i in (x.value, filters.value, -1))
    if any(len(each.shape) != 4 for each in (image, taps, result)):
        raise NotANest(_NO_CONVOLUTION)
    if image.dtype != taps.dtype:
        raise NotANest(f"its image is {image.dtype}, and its filters are {taps.dtype}")
    n, p, q, k = _axes(nest.target, result)
    r, s, c, out = _axes(filters.args[0], taps)
    if out != k or {r, s, c} - {None} != set(nest.reduction.axes):
        raise NotANest(_NO_CONVOLUTION)
    window = _window(_Read(n, p, q, k, r, s, c), x.args[0], image, taps, result)
    _require_padding(is_inside, window, (p, q, r, s), image, result, taps)
    epilogue = epilogue_of(nest.epilogue, ACTIVATIONS)
    residual, bias = _added(nest, epilogue, k, weights)
    call = ConvolutionCall(
        x=Image(image.dtype, _four(image.shape)),
        filters=_four([taps.shape[axis] for axis in FILTERS]),
        y=Image(result.dtype, _four(result.shape)),
        strides=window.strides,
        dilations=window.dilations,
        before=window.before,
        after=window.after,
        precision=precision,
        activation=epilogue.activation,
        alpha=epilogue.alpha,
        has_residual=residual is not None,
        has_bias=bias is not None,
    )
    if call.problem:
        raise NotANest(call.problem)
    casts = []
    if bias is not None and nest.params[bias].dtype != result.dtype:
        casts.append((bias, result.dtype))
    added = tuple(param for param in (residual, bias) if param is not None)
    params = (x.value, filters.value, *added, len(nest.params) - 1)
    return Matched(call, params, tuple(casts), ((filters.value, Layout(taps.shape, FILTERS)),))


def _operands(nest: Nest, weights: Collection[int]) -> tuple[Expr, Expr, Expr | None]:
    """Return the loads of an image and of filters, and what says that a tap is in the image.

    None: every tap is.
    """
    reduction = nest.reduction
    value = reduction.value
    while value.op == "cast":
        (value,) = value.args
    if reduction.fold != "add" or reduction.start != 0 or value.op != "mul":
        raise NotANest("it is no sum of products")
    x, filters = (unwidened(each) for each in value.args)
    if x.op == "load" and x.value in weights:
        x, filters = filters, x
    if filters.op != "load" or filters.value not in weights:
        raise NotANest("its filters are no weights of the model")
    is_inside = None
    if x.op == "select":
        is_inside, x, zero = x.args
        x = unwidened(x)
        if zero.op != "const" or zero.value != 0:
            raise NotANest("what lies around its image is not 0")
    if x.op != "load":
        raise NotANest("its image is computed before it is convolved")
    return x, filters, is_inside


@dataclass(frozen=True)
class _Read:
    """Axes of a convolution, None for one of a single value."""

    n: Axis | None
    p: Axis | None
    q: Axis | None
    k: Axis | None
    r: Axis | None
    s: Axis | None
    c: Axis | None


@dataclass(frozen=True)
class _Window:
    strides: tuple[int, int]
    dilations: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]


def _axes(place: Expr, tensor: Tensor) -> tuple[Axis | None, ...]:
    """Return the axis along each dimension of a tensor that is walked whole."""
    found = linear(place)
    if found is None or found.constant:
        raise NotANest(_NO_CONVOLUTION)
    axes: list[Axis | None] = []
    rest = dict(found.factors)
    for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
        own = [a for a, f in rest.items() if extent > 1 and (a.extent, f) == (extent, stride)]
        if (extent > 1) != bool(own):
            raise NotANest(_NO_CONVOLUTION)
        axes.append(own[0] if own else None)
        rest = {axis: f for axis, f in rest.items() if axis not in own}
    if rest:
        raise NotANest(_NO_CONVOLUTION)
    return tuple(axes)


def _window(of: _Read, place: Expr, image: Tensor, taps: Tensor, result: Tensor) -> _Window:
    """Return how a window moves over its image, from where that is read."""
    _, h, w, channels = image.shape
    per_group, filters = taps.shape[2:]
    if channels % per_group or filters % (channels // per_group):
        raise NotANest(_NO_CONVOLUTION)
    groups = channels // per_group
    of_group = filters // groups
    group = of.k if of_group == 1 and groups > 1 else Axis("group", groups)
    found = linear(_with_group(place, of.k, of_group, group) if of.k and group else place)
    if found is None:
        raise NotANest("where its image is read is no sum of steps")
    steps = dict(found.factors)

    def step(axis: Axis | None, size: int, otherwise: int) -> int:
        taken = steps.pop(axis, 0) if axis else otherwise * size
        if taken <= 0 or taken % size:
            raise NotANest(_NO_CONVOLUTION)
        return taken // size

    strides = step(of.p, w * channels, 1), step(of.q, channels, 1)
    dilations = step(of.r, w * channels, 1), step(of.s, channels, 1)
    if of.n and steps.pop(of.n, 0) != h * w * channels:
        raise NotANest(_NO_CONVOLUTION)
    if of.c and steps.pop(of.c, 0) != 1:
        raise NotANest(_NO_CONVOLUTION)
    if groups > 1 and group and steps.pop(group, 0) != per_group:
        raise NotANest(_NO_CONVOLUTION)
    before, rest = divmod(-found.constant, channels)
    if steps or rest or before < 0 or image.shape[0] != result.shape[0]:
        raise NotANest(_NO_CONVOLUTION)
    padding = divmod(before, w)
    after = tuple(
        max(0, (outs - 1) * stride + (size - 1) * dilation + 1 - extent - pad)
        for outs, stride, size, dilation, extent, pad in zip(
            result.shape[1:3], strides, taps.shape[:2], dilations, (h, w), padding, strict=True
        )
    )
    for axis in (0, 1):
        reach = (taps.shape[axis] - 1) * dilations[axis] + 1
        outs = (image.shape[1 + axis] + padding[axis] + after[axis] - reach) // strides[axis] + 1
        if outs != result.shape[1 + axis]:
            raise NotANest("it computes a part of a convolution")
    return _Window(strides, dilations, padding, (after[0], after[1]))


def _with_group(expr: Expr, k: Axis, of_group: int, group: Axis) -> Expr:
    """Return an expression with an axis in place of the number of a filter's group."""
    is_group = expr.op == "floordiv" and expr.args[0].op == "axis" and expr.args[0].value == k
    if is_group and expr.args[1].value == of_group:
        return Expr("axis", value=group, dtype=expr.dtype)
    args = tuple(_with_group(each, k, of_group, group) for each in expr.args)
    return Expr(expr.op, args, expr.value, expr.dtype)


def _require_padding(
    is_inside: Expr | None,
    window: _Window,
    axes: Sequence[Axis | None],
    image: Tensor,
    result: Tensor,
    taps: Tensor,
) -> None:
    """Raise NotANest unless exactly what lies in the image is read."""
    extents = (*result.shape[1:3], *taps.shape[:2])
    p, q, r, s = np.ogrid[tuple(slice(extent) for extent in extents)]
    expected = np.ones(extents, bool)
    moves = zip((p, q), (r, s), window.strides, window.dilations, window.before, strict=True)
    for size, (out, tap, stride, dilation, before) in zip(image.shape[1:3], moves, strict=True):
        at = out * stride + tap * dilation - before
        expected &= (at >= 0) & (at < size)
    grid = {axis: values for axis, values in zip(axes, (p, q, r, s), strict=True) if axis}
    found = True if is_inside is None else _evaluated(is_inside, grid)
    if not np.array_equal(np.broadcast_to(found, extents), expected):
        raise NotANest("what lies around its image is not the padding of a convolution")


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": np.floor_divide,
    "floormod": np.mod,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
}


def _evaluated(expr: Expr, grid: Mapping[Axis, Any]) -> Any:
    """Return an expression's values at all places of a grid."""
    if expr.op == "const":
        return expr.value
    if expr.op == "axis" and expr.value in grid:
        return grid[expr.value]
    if expr.op not in _FUNCTIONS:
        raise NotANest("what lies around its image is not the padding of a convolution")
    return _FUNCTIONS[expr.op](*(_evaluated(each, grid) for each in expr.args))


def _added(
    nest: Nest, epilogue: Epilogue, k: Axis | None, weights: Collection[int]
) -> tuple[int | None, int | None]:
    """Return the parameters that are a residual and a bias, of those that are added."""
    target, dtype = linear(nest.target), nest.params[-1].dtype
    of_channel = Linear({k: 1} if k else {})
    residual, bias = None, None
    for load in epilogue.added:
        place, is_same = linear(load.args[0]), nest.params[load.value].dtype == dtype
        if bias is None and place == of_channel and (is_same or load.value in weights):
            bias = load.value
        elif residual is None and place == target and is_same:
            residual = load.value
        else:
            raise NotANest("more is added than a bias and one tensor of the result's type")
    return residual, bias


def _four(shape: Sequence[int]) -> tuple[int, int, int, int]:
    a, b, c, d = shape
    return a, b, c, d
