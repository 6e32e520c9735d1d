"""Converters that replace some of TVM's ONNX importer while a model is imported.

TVM's own compute the same with operators that ConvertLayout does not know, or as finished kernels:
each would put a transpose before and after it, and stay unfused. These use operators with a rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import onnx_frontend as stock

_Attributes = dict[str, Any]


@contextmanager
def layout_friendly_converters() -> Iterator[None]:
    """Use this module's converters inside of the block."""
    original = stock._get_convert_map
    ours = {
        "Clip": _Clip,
        "HardSigmoid": _HardSigmoid,
        "HardSwish": _HardSwish,
        "LeakyRelu": _LeakyRelu,
        "Max": _Max,
        "Min": _Min,
    }
    stock._get_convert_map = lambda: {**original(), **ours}
    try:
        yield
    finally:
        stock._get_convert_map = original


def _bounded(x: relax.Expr, low: float, high: float) -> relax.Expr:
    """Return x between two numbers; as in ONNX Runtime, a bound that is no number is none."""
    dtype = x.ty.dtype
    if not math.isnan(low) and low != -math.inf:
        x = relax.op.maximum(x, relax.const(low, dtype))
    if not math.isnan(high) and high != math.inf:
        x = relax.op.minimum(x, relax.const(high, dtype))
    return x


def _affine(x: relax.Expr, scale: float, shift: float) -> relax.Expr:
    dtype = x.ty.dtype
    return relax.op.add(relax.op.multiply(x, relax.const(scale, dtype)), relax.const(shift, dtype))


class _Clip(stock.Clip):  # type: ignore[misc]
    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        return _bounded(inputs[0], attr.get("min", -math.inf), attr.get("max", math.inf))

    @classmethod
    def _impl_v13(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        bounds = [inputs[1], inputs[2]]
        if any(b is not None and not isinstance(b, GenericConst) for b in bounds):
            return super()._impl_v13(bb, inputs, attr, params)
        low, high = (math.nan if b is None else b.value.numpy().item() for b in bounds)
        return _bounded(inputs[0], low, high)


class _HardSigmoid(stock.OnnxOpConverter):  # type: ignore[misc]
    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        line = _affine(inputs[0], attr.get("alpha", 0.2), attr.get("beta", 0.5))
        return _bounded(bb.normalize(line), 0.0, 1.0)


class _HardSwish(stock.OnnxOpConverter):  # type: ignore[misc]
    @classmethod
    def _impl_v14(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        line = bb.normalize(_affine(inputs[0], 1 / 6, 0.5))
        return relax.op.multiply(inputs[0], _bounded(line, 0.0, 1.0))


class _LeakyRelu(stock.OnnxOpConverter):  # type: ignore[misc]
    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        x = inputs[0]
        zero, alpha = relax.const(0.0, x.ty.dtype), relax.const(attr.get("alpha", 0.01), x.ty.dtype)
        below = relax.op.multiply(relax.op.minimum(x, zero), alpha)
        return relax.op.add(relax.op.maximum(x, zero), below)


class _Max(stock.OnnxOpConverter):  # type: ignore[misc]
    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        return functools.reduce(lambda a, b: bb.normalize(relax.op.maximum(a, b)), inputs)


class _Min(stock.OnnxOpConverter):  # type: ignore[misc]
    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        return functools.reduce(lambda a, b: bb.normalize(relax.op.minimum(a, b)), inputs)
