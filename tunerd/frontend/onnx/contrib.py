"""ONNX Runtime's own operators on quantized values, written as standard ones.

Its quantizer makes them where it writes operators instead of QDQ nodes (QuantFormat.QOperator), and
so are the int8 models of ONNX's model zoo. Each dequantizes, computes in float32 and quantizes, as
ContribOperators.md of ONNX Runtime has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.frontend.onnx.builder import (
    Builder,
    Decomposition,
    attributes_of,
    decompose,
    inputs_of,
)
from tunerd.frontend.onnx.graphs import STANDARD_DOMAINS

if TYPE_CHECKING:
    import onnx

_DOMAIN = "com.microsoft"
_BY_CHANNEL_OPSET = 13  # of DequantizeLinear with a scale for each channel


def use_standard_operators(proto: onnx.ModelProto) -> None:
    """Replace these operators in place; raises Refused for what one cannot be written as."""
    if any(node.domain == _DOMAIN for node in proto.graph.node):
        if not any(o.domain in STANDARD_DOMAINS for o in proto.opset_import):
            return
        decompose(proto, _TABLE, (_DOMAIN,))


def _pair(kind: str) -> Decomposition:
    """Return what writes an operator of two quantized values."""

    def written(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
        a, b, y = _threes(inputs_of(node, 8))
        return [_quantized(build, build.op(kind, _wide(build, a), _wide(build, b)), y)]

    return written


def _single(kind: str, *, dropped: Sequence[str] = ()) -> Decomposition:
    """Return what writes an operator of one quantized value, with its own attributes."""

    def written(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
        x, x_scale, x_zero, y_scale, y_zero = inputs_of(node, 5)
        own: dict[str, Any] = attributes_of(node)
        if own.pop("channels_last", 0):
            raise ValueError("channels last is not known; quantize the model with QDQ nodes")
        kept = {name: value for name, value in own.items() if name not in dropped}
        y = build.op(kind, _wide(build, (x, x_scale, x_zero)), **kept)
        return [_quantized(build, y, ("", y_scale, y_zero))]

    return written


def _concatenated(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    y_scale, y_zero, *parts = node.input
    wide = [_wide(build, tuple(parts[i : i + 3])) for i in range(0, len(parts), 3)]
    return [
        _quantized(build, build.op("Concat", *wide, **attributes_of(node)), ("", y_scale, y_zero))
    ]


def _product(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = inputs_of(node, 9)
    own: dict[str, Any] = attributes_of(node)
    columns = 0 if own.get("transB") else 1
    scales = build.op("Mul", a_scale, b_scale)
    operands = [_wide(build, (a, a_scale, a_zero)), _wide(build, (b, b_scale, b_zero), columns)]
    if c:
        operands.append(build.op("Mul", build.cast(c, np.float32), scales))
    y = build.op("Gemm", *operands, **own)
    return [_quantized(build, y, ("", y_scale, y_zero)) if y_scale else y]


def _of_floats(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """MatMulIntegerToFloat: a product of integers, scaled, plus a bias."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = inputs_of(node, 7)
    total = build.op("MatMulInteger", a, b, *([a_zero, b_zero] if a_zero or b_zero else []))
    y = build.op("Mul", build.cast(total, np.float32), build.op("Mul", a_scale, b_scale))
    return [build.op("Add", y, bias) if bias else y]


def _dynamic(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """DynamicQuantizeMatMul: the same of values that are quantized first."""
    a, b, b_scale, b_zero, bias = inputs_of(node, 5)
    q, scale, zero = build.ops("DynamicQuantizeLinear", 3, a)
    total = build.op("MatMulInteger", q, b, zero, *([b_zero] if b_zero else []))
    y = build.op("Mul", build.cast(total, np.float32), build.op("Mul", scale, b_scale))
    return [build.op("Add", y, bias) if bias else y]


def _same(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """One that the standard has, too."""
    return [build.op(node.op_type, *node.input, **attributes_of(node))]


def _threes(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return two values with their scales and zero points, and those of the result."""
    return tuple(names[:3]), tuple(names[3:6]), ("", *names[6:8])


def _wide(build: Builder, of: Sequence[str], axis: int | None = None) -> str:
    x, scale, zero = of
    by_channel = {}
    if axis is not None and int(np.prod(build.shape(scale))) > 1:
        if build.opset < _BY_CHANNEL_OPSET:
            raise ValueError(
                f"scales by channel need opset {_BY_CHANNEL_OPSET}; export the model with it"
            )
        by_channel = {"axis": axis}
    return build.op("DequantizeLinear", x, scale, *([zero] if zero else []), **by_channel)


def _quantized(build: Builder, x: str, of: Sequence[str]) -> str:
    _, scale, zero = of
    return build.op("QuantizeLinear", x, scale, *([zero] if zero else []))


_TABLE: dict[str, Decomposition] = {
    "DequantizeLinear": _same,
    "DynamicQuantizeMatMul": _dynamic,
    "MatMulIntegerToFloat": _of_floats,
    "QGemm": _product,
    "QLinearAdd": _pair("Add"),
    "QLinearAveragePool": _single("AveragePool"),
    "QLinearConcat": _concatenated,
    "QLinearGlobalAveragePool": _single("GlobalAveragePool"),
    "QLinearLeakyRelu": _single("LeakyRelu"),
    "QLinearMul": _pair("Mul"),
    "QLinearSigmoid": _single("Sigmoid"),
    "QLinearSoftmax": _single("Softmax", dropped=("opset",)),
    "QuantizeLinear": _same,
}
