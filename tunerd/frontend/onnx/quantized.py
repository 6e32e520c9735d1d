"""Write products of quantized tensors as products of their differences from the zero points.

Matrices are multiplied as int32, and convolved in float32 where no sum can pass 2^24, up to which
float32 holds every integer; TVM has no kernels for convolutions of mixed types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, inputs_of

if TYPE_CHECKING:
    import onnx

_MAX_EXACT = 1 << 24  # of float32
_LARGEST = 255 * 255  # product of two differences of 8 bits


def multiplied(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """QLinearMatMul: a product of int32, scaled and rounded."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    op = build.op
    wide = [_difference(build, *each, axis) for each, axis in (((a, a_zero), 0), ((b, b_zero), 1))]
    scales = [build.cast(s, np.float32) for s in (_row(build, a_scale), b_scale, y_scale)]
    product = build.cast(op("MatMul", *wide), np.float32)
    return [_rounded(build, product, scales, y_zero)]


def convolved(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """QLinearConv: a convolution of the differences, scaled and rounded."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = inputs_of(node, 9)
    total = _convolution(node, build, (x, x_zero), (w, w_zero))
    # Of the rank of the sums: ConvertLayout turns no constants of a lower one.
    column = [1, -1, *[1] * (len(build.shape(x)) - 2)]
    if bias:
        total = build.op("Add", total, build.reshape(build.cast(bias, np.float32), *column))
    if math.prod(build.shape(w_scale)) > 1:
        w_scale = build.reshape(w_scale, *column)
    return [_rounded(build, total, [x_scale, w_scale, y_scale], y_zero)]


def convolved_integers(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """ConvInteger; raises ValueError where float32 may round its sums."""
    x, w, x_zero, w_zero = inputs_of(node, 4)
    terms = math.prod(build.shape(w)[1:])
    if terms * _LARGEST > _MAX_EXACT:
        raise ValueError(
            f"each of its sums has {terms} terms, and of up to {_MAX_EXACT // _LARGEST} is float32 "
            "exact; export the model with QDQ nodes"
        )
    return [build.cast(_convolution(node, build, (x, x_zero), (w, w_zero)), np.int32)]


def _convolution(
    node: onnx.NodeProto, build: Builder, x: tuple[str, str], w: tuple[str, str]
) -> str:
    given: dict[str, Any] = attributes_of(node)
    wide = []
    for name, zero in (x, w):
        value = build.cast(name, np.float32)
        if zero:
            at = build.cast(zero, np.float32)
            if math.prod(build.shape(zero)) > 1:  # of each output channel
                at = build.reshape(at, -1, *[1] * (len(build.shape(name)) - 1))
            value = build.op("Sub", value, at)
        wide.append(value)
    return build.op("Conv", *wide, **given)


def _difference(build: Builder, x: str, zero: str, axis: int) -> str:
    """Return x less its zero point, of which there may be one for each row or column."""
    at = build.cast(_row(build, zero) if axis == 0 else zero, np.int32)
    return build.op("Sub", build.cast(x, np.int32), at)


def _row(build: Builder, x: str) -> str:
    """Return a vector of one number for each row as a column."""
    shape = build.shape(x)
    return build.reshape(x, *shape, 1) if len(shape) == 1 and shape[0] > 1 else x


def _rounded(build: Builder, total: str, scales: Sequence[str], zero: str) -> str:
    """Return sums times the scales of what was multiplied, over that of the result, quantized."""
    a, b, y = scales
    factor = build.op("Div", build.op("Mul", a, b), y)
    scaled = build.op("Mul", total, factor)
    return build.op("QuantizeLinear", scaled, build.constant(1, np.float32), zero)
