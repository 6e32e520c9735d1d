"""Converters that replace some of TVM's ONNX importer while a model is imported.

Of some operators TVM's own compute the same with operators that ConvertLayout does not know, or as
finished kernels: each would put a transpose before and after it, and stay unfused. Of others they
import something else than what ONNX says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import onnx_frontend as stock

from tunerd.frontend.onnx.weights import is_apart, values_of
from tunerd.frontend.relax.corrections import corrections
from tunerd.frontend.relax.interpolation import Axis

_Attributes = dict[str, Any]


@contextmanager
def own_converters() -> Iterator[None]:
    """Use this module's converters, and those of `corrections`, inside of the block."""
    original = stock._get_convert_map, stock.ONNXGraphImporter._parse_array
    ours = {
        "Clip": _Clip,
        "ConvTranspose": _ConvTranspose,
        "HardSigmoid": _HardSigmoid,
        "HardSwish": _HardSwish,
        "LeakyRelu": _LeakyRelu,
        "LpNormalization": _LpNormalization,
        "Max": _Max,
        "MaxPool": _MaxPool,
        "Min": _Min,
        "Resize": _Resize,
        "Slice": _Slice,
        "Upsample": _Upsample,
        **corrections(),
    }
    stock._get_convert_map = lambda: {**original[0](), **ours}
    stock.ONNXGraphImporter._parse_array = lambda importer, tensor: _array(tensor)
    try:
        yield
    finally:
        stock._get_convert_map, stock.ONNXGraphImporter._parse_array = original


def _array(tensor: Any) -> Any:
    """Return a weight as TVM's tensor; one that was set apart where it is mapped."""
    values = values_of(tensor)
    if is_apart(tensor):
        return tvm.runtime.from_dlpack(values)
    return tvm.runtime.tensor(values.reshape(tuple(tensor.dims)))


# --- for the layout ----------------------------------------------------------------------------


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


# --- for what ONNX says ------------------------------------------------------------------------


def _shape(x: relax.Expr) -> list[int]:
    return [int(d) for d in x.ty.shape]


class _ConvTranspose(stock.ConvTranspose):  # type: ignore[misc]
    """Takes `output_shape`, too: it says the sizes that the pads must give."""

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        if "output_shape" not in attr:
            return super()._impl_v1(bb, inputs, attr, params)
        sizes, kernel = _shape(inputs[0])[2:], _shape(inputs[1])[2:]
        strides = attr.get("strides", [1] * len(sizes))
        dilations = attr.get("dilations", [1] * len(sizes))
        extra = attr.get("output_padding", [0] * len(sizes))
        wanted = attr["output_shape"][-len(sizes) :]
        first, last = [], []
        for i, size in enumerate(sizes):
            whole = strides[i] * (size - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1
            fewer, more = (whole - wanted[i]) // 2, -((wanted[i] - whole) // 2)
            is_upper = attr.get("auto_pad") == b"SAME_UPPER"
            first.append(fewer if is_upper else more)
            last.append(more if is_upper else fewer)
        attr = {k: v for k, v in attr.items() if k not in ("auto_pad", "output_shape")}
        return super()._impl_v1(bb, inputs, {**attr, "pads": [*first, *last]}, params)


class _MaxPool(stock.MaxPool):  # type: ignore[misc]
    """Rounds the sizes of SAME_LOWER up, as those of SAME_UPPER."""

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        if attr.get("auto_pad") != b"SAME_LOWER":
            return super()._impl_v1(bb, inputs, attr, params)
        sizes, kernel = _shape(inputs[0])[2:], attr["kernel_shape"]
        strides = attr.get("strides", [1] * len(sizes))
        dilations = attr.get("dilations", [1] * len(sizes))
        pads = []
        for i, size in enumerate(sizes):
            reach = (-(-size // strides[i]) - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
            pads.append(max(0, reach - size))
        sides = [*(p - p // 2 for p in pads), *(p // 2 for p in pads)]
        attr = {**attr, "auto_pad": b"NOTSET", "pads": sides}
        return super()._impl_v1(bb, inputs, attr, params)


class _LpNormalization(stock.OnnxOpConverter):  # type: ignore[misc]
    """TVM's importer has none. Where the norm is 0 the result is 0, as in ONNX Runtime."""

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        x, axis = inputs[0], attr.get("axis", -1)
        if attr.get("p", 2) == 1:
            norm = bb.normalize(relax.op.sum(bb.normalize(relax.op.abs(x)), axis, keepdims=True))
        else:
            squares = bb.normalize(relax.op.multiply(x, x))
            norm = bb.normalize(relax.op.sqrt(bb.normalize(relax.op.sum(squares, axis, True))))
        tiny = relax.const(np.finfo(str(x.ty.dtype)).tiny, x.ty.dtype)
        return relax.op.divide(x, bb.normalize(relax.op.maximum(norm, tiny)))


class _Resize(stock.OnnxOpConverter):  # type: ignore[misc]
    """Takes `scales` at their word: TVM's own takes them for the ratio of the sizes.

    Where that makes a difference, each axis becomes a gather, or the mean of two.
    """

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        scales = _numbers(inputs[1], params)
        if scales is None or (scales.min() < 1 < scales.max()):
            raise NotImplementedError("opset 10 with one axis that grows and one that shrinks")
        attr = {
            "mode": attr.get("mode", b"nearest"),
            "coordinate_transformation_mode": b"asymmetric",
            "nearest_mode": b"floor" if scales.min() >= 1 else b"ceil",
        }
        inputs = stock.onnx_input([inputs[0], None, inputs[1]])
        return cls._impl_v11(bb, inputs, attr, params)

    @classmethod
    def _impl_v11(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        x, roi = inputs[0], inputs[1]
        axes = _axes(
            _shape(x), _numbers(inputs[2], params), _numbers(inputs[3], params), attr.get("axes")
        )
        mode = attr.get("mode", b"nearest").decode()
        coordinates = attr.get("coordinate_transformation_mode", b"half_pixel").decode()
        is_cropped = coordinates == "tf_crop_and_resize"
        if attr.get("antialias") and any(a.scale < 1 for a in axes):
            raise NotImplementedError("antialias=1 where an axis shrinks")
        if attr.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            raise NotImplementedError("a keep_aspect_ratio_policy other than stretch")
        if is_cropped and "axes" in attr:
            raise NotImplementedError(f"{coordinates} of some axes only")
        needs_scales = coordinates not in ("align_corners", "tf_crop_and_resize")
        is_whole = all(a.is_whole for a in axes) and coordinates != "half_pixel_symmetric"
        is_image = 3 <= len(axes) <= 5 and all(a.size == a.new_size for a in axes[:2])
        if is_image and (is_whole or not needs_scales):
            sizes = relax.const(np.array([a.new_size for a in axes], np.int64))
            given = stock.onnx_input([x, roi, None, sizes])
            return stock.Resize._impl_v18(bb, given, attr, params)
        if is_cropped or mode not in ("nearest", "linear"):
            raise NotImplementedError(f"mode={mode} by scales that do not give whole sizes")
        if mode == "nearest":
            rounding = attr.get("nearest_mode", b"round_prefer_floor").decode()
            for i, axis in enumerate(axes):
                if (axis.size, axis.scale) != (axis.new_size, 1):
                    x = _take(bb, x, axis.nearest(coordinates, rounding), i)
            return x
        return _linear(bb, x, axes, coordinates)


class _Slice(stock.Slice):  # type: ignore[misc]
    """Takes attributes, too, as before opset 10."""

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        starts = attr["starts"]
        given = (starts, attr["ends"], attr.get("axes", range(len(starts))))
        constants = [relax.const(np.array(values, np.int64)) for values in given]
        return cls._impl_v10(bb, stock.onnx_input([inputs[0], *constants]), {}, params)

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        return super()._impl_v13(bb, inputs, attr, params)


class _Upsample(stock.OnnxOpConverter):  # type: ignore[misc]
    @classmethod
    def _impl_v7(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        scales = relax.const(np.array(attr["scales"], np.float32))
        return _Resize._impl_v10(bb, stock.onnx_input([inputs[0], scales]), attr, params)

    @classmethod
    def _impl_v9(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        return _Resize._impl_v10(bb, inputs, attr, params)


def _numbers(given: relax.Expr | None, params: Any) -> np.ndarray | None:
    """Return an input's numbers, or None where it has none."""
    if given is None:
        return None
    found = stock.get_constant(given, params)
    if isinstance(found, relax.ShapeExpr):
        return np.array([int(d) for d in found.values], np.int64)
    if not isinstance(found, GenericConst):
        raise NotImplementedError("sizes or scales that depend on the values of the inputs")
    values = np.asarray(found.value.numpy())
    return values if values.size else None


def _axes(
    shape: list[int],
    scales: np.ndarray | None,
    sizes: np.ndarray | None,
    which: list[int] | None,
) -> list[Axis]:
    """Return all axes; `scales` or `sizes` are those of `which`, or of all."""
    axes = [Axis(size, size, 1.0) for size in shape]
    for at, i in enumerate(range(len(shape)) if which is None else which):
        size = shape[i]
        if scales is not None:
            new_size = int(np.float32(scales[at]) * np.float32(size))
            axes[i] = Axis(size, new_size, float(scales[at]))
        elif sizes is not None:
            axes[i] = Axis(size, int(sizes[at]), int(sizes[at]) / size)
    return axes


def _take(bb: Any, x: relax.Expr, indices: np.ndarray, axis: int) -> relax.Expr:
    return bb.normalize(relax.op.take(x, relax.const(indices), axis=axis, mode="clip"))


def _linear(bb: Any, x: relax.Expr, axes: list[Axis], coordinates: str) -> relax.Expr:
    dtype = str(x.ty.dtype)
    if not dtype.startswith("float"):
        raise NotImplementedError(f"mode=linear of {dtype} by scales that do not give whole sizes")
    wide = "float64" if dtype == "float64" else "float32"
    x = bb.normalize(relax.op.astype(x, wide))
    for i, axis in enumerate(axes):
        if (axis.size, axis.scale) == (axis.new_size, 1):
            continue
        low, high, weight = axis.linear(coordinates)
        column = weight.astype(wide).reshape(-1, *[1] * (len(axes) - i - 1))
        below = relax.op.multiply(_take(bb, x, low, i), relax.const(1 - column))
        above = relax.op.multiply(_take(bb, x, high, i), relax.const(column))
        x = bb.normalize(relax.op.add(below, above))
    return relax.op.astype(x, dtype)
