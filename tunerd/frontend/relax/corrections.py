"""Converters for operators of which TVM's ONNX importer makes something else than ONNX says.

Some ignore an attribute, some fail for types or axes that ONNX allows, some give another value at
the ends of a type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import onnx_frontend as stock

_Attributes = dict[str, Any]


def corrections() -> dict[str, Any]:
    """Return this module's converters, by the operators that they take."""
    return {
        "BitCast": _BitCast,
        "BitShift": _BitShift,
        "Elu": _Elu,
        "IsInf": _IsInf,
        "SequenceInsert": _SequenceInsert,
        "Mod": _Mod,
        "OneHot": _OneHot,
        "Pow": _Pow,
        "RMSNormalization": _RMSNormalization,
        "ReduceMax": _ReduceMax,
        "ReduceMin": _ReduceMin,
        "RoiAlign": _RoiAlign,
        "Selu": _Selu,
        "Tile": _Tile,
    }


def _dtype(x: relax.Expr) -> str:
    return str(x.ty.dtype)


def _shape(x: relax.Expr) -> list[int]:
    return [int(d) for d in x.ty.shape]


def _const(value: Any, like: relax.Expr) -> relax.Expr:
    return relax.const(value, _dtype(like))


def _where(bb: Any, condition: relax.Expr, yes: relax.Expr, no: relax.Expr) -> relax.Expr:
    return bb.normalize(relax.op.where(bb.normalize(condition), yes, no))


# --- reductions --------------------------------------------------------------------------------


class _Extreme(stock.OnnxOpConverter):  # type: ignore[misc]
    """A largest or a smallest element, also of booleans.

    TVM's begins at the largest finite number of the type: of infinities alone it gives that number.
    Whether there is nothing else is seen from the first of them.
    """

    of: Any
    nothing: float  # what no element is beyond

    @classmethod
    def get_converter(cls, opset: int) -> Callable[..., relax.Expr]:
        convert = cls.of.get_converter(opset)

        def run(bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
            x = inputs[0]
            if _dtype(x) == "bool":
                whole = bb.normalize(relax.op.astype(x, "int8"))
                given = stock.onnx_input([whole, *inputs[1:]])
                found = bb.normalize(convert(bb, given, attr, params))
                return relax.op.astype(found, "bool")
            found = bb.normalize(convert(bb, inputs, attr, params))
            if not _dtype(x).startswith("float") or found.same_as(x):
                return found
            axes = _reduced(inputs, attr, params, len(_shape(x)))
            first = bb.normalize(relax.op.strided_slice(x, axes, [0] * len(axes), [1] * len(axes)))
            if not attr.get("keepdims", 1):
                first = bb.normalize(relax.op.squeeze(first, axes))
            limits = np.finfo(_dtype(x))
            last = limits.min if cls.nothing < 0 else limits.max
            is_last = bb.normalize(relax.op.equal(found, _const(last, x)))
            is_nothing = bb.normalize(relax.op.equal(first, _const(cls.nothing, x)))
            only = relax.op.logical_and(is_last, is_nothing)
            return _where(bb, only, _const(cls.nothing, x), found)

        return run


class _ReduceMax(_Extreme):
    of, nothing = stock.ReduceMax, -math.inf


class _ReduceMin(_Extreme):
    of, nothing = stock.ReduceMin, math.inf


def _reduced(inputs: Any, attr: _Attributes, params: Any, rank: int) -> list[int]:
    axes = attr.get("axes")
    if axes is None and inputs[1] is not None:
        axes = stock.get_constant(inputs[1], params).value.numpy().tolist()
    return [axis % rank for axis in axes or range(rank)]


class _RMSNormalization(stock.RMSNormalization):  # type: ignore[misc]
    """Normalizes over all axes, too, for which TVM has no kernel: as one row."""

    @classmethod
    def _impl_v23(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        x, scale = inputs[0], inputs[1]
        shape = _shape(x)
        if attr.get("axis", -1) % len(shape):
            return super()._impl_v23(bb, inputs, attr, params)
        whole = relax.op.broadcast_to(scale, shape)
        row = bb.normalize(relax.op.reshape(x, (1, math.prod(shape))))
        flat = bb.normalize(relax.op.reshape(bb.normalize(whole), (math.prod(shape),)))
        given = stock.onnx_input([row, flat])
        found = super()._impl_v23(bb, given, {**attr, "axis": 1}, params)
        return relax.op.reshape(bb.normalize(found), shape)


# --- elements ----------------------------------------------------------------------------------


class _IsInf(stock.OnnxOpConverter):  # type: ignore[misc]
    """Tells the two infinities apart."""

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        x = inputs[0]
        positive = relax.op.equal(x, _const(math.inf, x))
        negative = relax.op.equal(x, _const(-math.inf, x))
        if attr.get("detect_negative", 1) and attr.get("detect_positive", 1):
            return relax.op.logical_or(bb.normalize(positive), bb.normalize(negative))
        if attr.get("detect_negative", 1):
            return negative
        return positive if attr.get("detect_positive", 1) else relax.op.zeros_like(x, "bool")


class _Mod(stock.Mod):  # type: ignore[misc]
    """Knows what is left of a division by infinity: the dividend, or infinity of another sign."""

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        x, y = inputs[0], inputs[1]
        if not _dtype(x).startswith("float"):
            return super()._impl_v10(bb, inputs, attr, params)
        zero = _const(0, x)
        quotient = bb.normalize(relax.op.divide(x, y))
        is_floor = not attr.get("fmod", 0)
        whole = bb.normalize(relax.op.floor(quotient) if is_floor else relax.op.trunc(quotient))
        left = bb.normalize(relax.op.subtract(x, bb.normalize(relax.op.multiply(whole, y))))
        same = x
        if is_floor:
            signs = [bb.normalize(relax.op.sign(each)) for each in (x, y)]
            product = bb.normalize(relax.op.multiply(*signs))
            same = _where(bb, relax.op.less(product, zero), y, x)
        endless = bb.normalize(relax.op.isinf(y))
        both = bb.normalize(relax.op.logical_and(endless, bb.normalize(relax.op.isfinite(x))))
        return _where(bb, both, same, left)


class _BitShift(stock.BitShift):  # type: ignore[misc]
    """Shifts by as many bits as the type has, or more: nothing is left, where a CPU begins anew."""

    @classmethod
    def _impl_v11(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        x, y = inputs[0], inputs[1]
        if all(isinstance(i, GenericConst) for i in inputs):
            return super()._impl_v11(bb, inputs, attr, params)
        bits = np.dtype(_dtype(x)).itemsize * 8
        inside = bb.normalize(relax.op.less(y, _const(bits, y)))
        if _dtype(y).startswith("int"):
            positive = bb.normalize(relax.op.greater_equal(y, _const(0, y)))
            inside = bb.normalize(relax.op.logical_and(inside, positive))
        by = _where(bb, inside, y, _const(0, y))
        shifted = bb.normalize(super()._impl_v11(bb, stock.onnx_input([x, by]), attr, params))
        rest = _const(0, x)
        if attr.get("direction") == b"RIGHT" and _dtype(x).startswith("int"):
            rest = _where(bb, relax.op.less(x, rest), _const(-1, x), rest)
        return _where(bb, inside, shifted, rest)


class _BitCast(stock.OnnxOpConverter):  # type: ignore[misc]
    @classmethod
    def _impl_v26(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        to = stock.get_type(attr["to"])
        if np.dtype(to).itemsize != np.dtype(_dtype(inputs[0])).itemsize:
            raise NotImplementedError(f"from {_dtype(inputs[0])} to {to}, of another width")

        def reinterpreted(x: Any) -> Any:
            return te.compute(x.shape, lambda *i: tirx.reinterpret(to, x(*i)), name="bit_cast")

        return bb.emit_te(reinterpreted, inputs[0])


class _SequenceInsert(stock.SequenceInsert):  # type: ignore[misc]
    """Counts a negative place from the end: -1 is before the last, where TVM appends."""

    @classmethod
    def _impl_v11(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        place = inputs[2] if len(inputs) == 3 else None
        if isinstance(place, GenericConst) and (at := int(place.value.numpy())) < 0:
            inputs = [*inputs[:2], relax.const(len(inputs[0]) + at, "int64")]
        return super()._impl_v11(bb, inputs, attr, params)


class _Pow(stock.Pow):  # type: ignore[misc]
    """Takes an exponent of another type than the base, which is the result's, and integers.

    TVM raises floats alone. Integers up to 2^53 are exact in float64.
    """

    @classmethod
    def _impl_v7(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        base, exponent = inputs[0], inputs[1]
        dtype = _dtype(base)
        is_float = dtype.startswith("float")
        if not is_float and not isinstance(base, GenericConst):
            wide = [bb.normalize(relax.op.astype(x, "float64")) for x in (base, exponent)]
            power = bb.normalize(super()._impl_v7(bb, stock.onnx_input(wide), attr, params))
            if not _dtype(exponent).startswith("float"):
                power = bb.normalize(relax.op.round(power))
            return relax.op.astype(power, dtype)
        if isinstance(exponent, GenericConst):
            exponent = relax.const(exponent.value.numpy().astype(dtype), dtype)
        elif _dtype(exponent) != dtype:
            exponent = bb.normalize(relax.op.astype(exponent, dtype))
        return super()._impl_v7(bb, stock.onnx_input([base, exponent]), attr, params)


class _Elu(stock.OnnxOpConverter):  # type: ignore[misc]
    """Works in the type of its operand."""

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        return _elu(bb, inputs[0], attr.get("alpha", 1.0), 1.0)


class _Selu(stock.OnnxOpConverter):  # type: ignore[misc]
    """Works in the type of its operand."""

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        alpha = attr.get("alpha", 1.67326319217681884765625)
        return _elu(bb, inputs[0], alpha, attr.get("gamma", 1.05070102214813232421875))


def _elu(bb: Any, x: relax.Expr, alpha: float, gamma: float) -> relax.Expr:
    """Return gamma x above 0, and gamma alpha (exp(x) - 1) below."""
    below = bb.normalize(relax.op.exp(bb.normalize(relax.op.minimum(x, _const(0, x)))))
    below = bb.normalize(relax.op.subtract(below, _const(1, x)))
    below = bb.normalize(relax.op.multiply(below, _const(alpha * gamma, x)))
    above = bb.normalize(relax.op.maximum(x, _const(0, x)))
    if gamma != 1:
        above = bb.normalize(relax.op.multiply(above, _const(gamma, x)))
    return relax.op.add(above, below)


# --- places ------------------------------------------------------------------------------------


class _OneHot(stock.OneHot):  # type: ignore[misc]
    """Takes a depth that is a float, and values that are no constants or of another type."""

    @classmethod
    def _impl_v11(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        depth, indices, values = stock.get_constant(inputs[1], params), inputs[0], inputs[2]
        if not isinstance(depth, GenericConst):
            raise NotImplementedError("a depth that is no constant")
        if _dtype(indices) != "int32":
            indices = bb.normalize(relax.op.astype(indices, "int64"))
        size = relax.const(int(depth.value.numpy().item()), "int64")
        given = stock.onnx_input([indices, size, relax.const(np.array([0, 1], np.int32))])
        rank = len(_shape(indices))
        axis = attr.get("axis", -1) % (rank + 1)
        attr = {**attr, "axis": -1 if axis == rank else axis}
        made = bb.normalize(super()._impl_v11(bb, given, attr, params))
        off, on = (
            bb.normalize(relax.op.take(values, relax.const(i, "int64"), axis=0)) for i in (0, 1)
        )
        return relax.op.where(bb.normalize(relax.op.astype(made, "bool")), on, off)


class _RoiAlign(stock.RoiAlign):  # type: ignore[misc]
    """Refuses the mode max, which is another thing in TVM than in ONNX Runtime."""

    @classmethod
    def _impl(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any, default: Any) -> Any:
        if attr.get("mode", b"avg") != b"avg":
            raise NotImplementedError("mode=max")
        return super()._impl(bb, inputs, attr, params, default)


class _Tile(stock.Tile):  # type: ignore[misc]
    """Repeats by a broadcast: LLVM 20 makes wrong code for AVX-512 of TVM's remainders."""

    @classmethod
    def _impl_v13(cls, bb: Any, inputs: Any, attr: _Attributes, params: Any) -> relax.Expr:
        repeats = stock.get_constant(inputs[1], params)
        if not isinstance(repeats, GenericConst):
            raise NotImplementedError("repeats that depend on the values of the inputs")
        x, times = inputs[0], repeats.value.numpy().tolist()
        for axis, count in enumerate(times):
            x = x if count == 1 else _tiled(bb, x, axis, count)
        return x


def _tiled(bb: Any, x: relax.Expr, axis: int, count: int) -> relax.Expr:
    shape = _shape(x)
    wide = bb.normalize(relax.op.reshape(x, [*shape[:axis], 1, *shape[axis:]]))
    many = bb.normalize(relax.op.broadcast_to(wide, [*shape[:axis], count, *shape[axis:]]))
    shape[axis] *= count
    return bb.normalize(relax.op.reshape(many, shape))
