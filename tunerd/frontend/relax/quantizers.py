"""Quantization written as the operators that it is made of, with scales behind products.

An exported model multiplies values that it has just dequantized: whole numbers less a zero point,
times a scale. The scales of both operands come out of a sum, so that what is left inside is a
product of whole numbers. Floats hold those exactly, in 16 bits too, and `integers` makes integer
arithmetic of them where a device has instructions for it. What is left of quantizing is
elementwise: it joins the kernels around it, and TVM can turn its layout, which it cannot for the
operators `quantize` and `dequantize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import rewritten
from tunerd.frontend.relax.movement import Graph, op_name, shape_of

_RANGES = {d: np.iinfo(d) for d in ("int8", "uint8", "int16", "uint16")}
_PRODUCTS = frozenset(("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d", "relax.matmul"))
_CHANNELS = 1  # the axis of a convolution's result; `main` is in NC... here


def expand_quantizers(mod: IRModule, *, keeps_zeros: bool = False) -> IRModule:
    """Return `mod` without the operators `quantize` and `dequantize` of up to 16 bits in `main`.

    keeps_zeros: also add and subtract zero points of 0, if others are not, so that layers that only
    differ in that are one kernel.
    """
    expander = _Expander(mod)
    expander.keeps_zeros = keeps_zeros and _has_zero_points(mod)
    return rewritten(mod, expander)


@dataclass(frozen=True)
class _Scaled:
    """A dequantized value: `whole` numbers as float32, times a scale."""

    whole: relax.Expr
    scale: relax.Expr  # of one number, or of one for each place of an axis
    axis: int | None  # that of the scale, None for all


@mutator
class _Expander(PyExprMutator):  # type: ignore[misc]
    keeps_zeros: bool

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        # By address of the variable, which is kept: another one may not get it.
        self._scaled: dict[int, tuple[relax.Var, _Scaled]] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name = op_name(call)
        if name == "relax.quantize" and str(call.attrs.out_dtype) in _RANGES:
            return self._quantized(visited)
        if name == "relax.dequantize" and _is_narrow(visited.args[0]):
            return self._dequantized(visited)
        if name == "relax.permute_dims":
            return self._turned(visited)
        if name == "relax.multiply":
            return self._rescaled(visited)
        return self._product(visited) if name in _PRODUCTS else visited

    def _rescaled(self, call: relax.Call) -> relax.Expr:
        """Multiply widened sums by a constant and a number, one after the other.

        So does dynamic quantization, by their product. A constant of no shape would be a part of
        the kernel, which would be one of this layer alone.
        """
        for sums, scale in (call.args, call.args[::-1]):
            factors = self._bound(scale)
            widened = self._bound(sums)
            if op_name(factors) != "relax.multiply" or op_name(widened) != "relax.astype":
                continue
            if shape_of(scale) != () or not shape_of(sums):
                continue
            for by, constant in (factors.args, factors.args[::-1]):
                if self._values(constant) is not None and self._values(by) is None:
                    spread = self._spread(constant, len(shape_of(sums) or ()), 0)
                    scaled = self._emit(relax.op.multiply(sums, spread))
                    return relax.op.multiply(scaled, by)
        return call

    def _quantized(self, call: relax.Call) -> relax.Expr:
        data, scale, zero = call.args
        dtype = str(call.attrs.out_dtype)
        rank, axis = len(shape_of(data) or ()), int(call.attrs.axis)
        if str(data.ty.dtype) != "float32":
            return call
        steps = relax.op.divide(data, self._spread(scale, rank, axis))
        steps = self._emit(relax.op.round(self._emit(steps)))
        if self.keeps_zeros or not self._is_zero(zero):
            at = self._spread(self._as_float(zero), rank, axis)
            steps = self._emit(relax.op.add(steps, at))
        limits = _RANGES[dtype]
        # Not `clip`, through which ConvertLayout passes no layout.
        low, high = (relax.const(float(n), "float32") for n in (limits.min, limits.max))
        kept = relax.op.minimum(self._emit(relax.op.maximum(steps, low)), high)
        return relax.op.astype(self._emit(kept), dtype)

    def _dequantized(self, call: relax.Call) -> relax.Expr:
        data, scale, zero = call.args
        rank, axis = len(shape_of(data) or ()), int(call.attrs.axis)
        if str(call.ty.dtype) != "float32":
            return call
        whole: relax.Expr
        values, zeros, scales = (self._values(e) for e in (data, zero, scale))
        if values is not None and zeros is not None:
            at = zeros if zeros.size == 1 else zeros.reshape(_along(rank, axis))
            whole = relax.const(values.astype(np.float32) - at.astype(np.float32), "float32")
        else:
            whole = self._emit(relax.op.astype(data, "float32"))
            if self.keeps_zeros or not self._is_zero(zero):
                at_of = self._spread(self._as_float(zero), rank, axis)
                whole = self._emit(relax.op.subtract(whole, at_of))
        is_one = np.prod(shape_of(scale) or (1,)) == 1
        scaled = _Scaled(whole, scale, None if is_one else axis % rank)
        if isinstance(whole, GenericConst) and scales is not None:
            by = scales if is_one else scales.reshape(_along(rank, axis))
            value: relax.Expr = relax.const(whole.value.numpy() * by.astype(np.float32), "float32")
        else:
            value = relax.op.multiply(whole, self._spread(scale, rank, axis))
        kept = self.builder_.emit(value)  # a constant, too, so that it has a name
        self._scaled[kept.__chandle__()] = kept, scaled
        return kept

    def _turned(self, call: relax.Call) -> relax.Expr:
        """Turn a dequantized constant with the numbers that it was made of."""
        scaled = self._scaled_of(call.args[0])
        if scaled is None or not isinstance(scaled.whole, GenericConst) or not call.attrs.axes:
            return call
        axes = [int(a) for a in call.attrs.axes]
        turned = np.ascontiguousarray(scaled.whole.value.numpy().transpose(axes))
        axis = None if scaled.axis is None else axes.index(scaled.axis)
        kept = self.builder_.emit(call)
        whole = relax.const(turned, "float32")
        self._scaled[kept.__chandle__()] = kept, _Scaled(whole, scaled.scale, axis)
        return kept

    def _product(self, call: relax.Call) -> relax.Expr:
        data, weight = (self._scaled_of(a) for a in call.args[:2])
        shape = shape_of(call)
        if data is None or weight is None or shape is None or data.axis is not None:
            return call
        if not isinstance(weight.whole, GenericConst):
            return call
        is_matrix = op_name(call) == "relax.matmul"
        weight_shape = shape_of(weight.whole) or ()
        if is_matrix and len(weight_shape) != 2:
            return call
        columns = 1 if is_matrix else 0  # the axis of the weight that is one of the result
        if weight.axis not in (None, columns):
            return call
        axis = len(shape) - 1 if is_matrix else _CHANNELS
        product = relax.Call(call.op, [data.whole, weight.whole], call.attrs)
        by_column = self._spread(weight.scale, len(shape), axis)
        scale: relax.Expr = relax.op.multiply(by_column, self._spread(data.scale, len(shape), 0))
        a, b = self._values(data.scale), self._values(weight.scale)
        if a is not None and b is not None:
            values = (a.astype(np.float32) * b.astype(np.float32)).ravel()
            scale = self._spread(relax.const(values, "float32"), len(shape), axis)
        else:
            scale = self._emit(scale)
        return relax.op.multiply(self._emit(product), scale)

    def _scaled_of(self, expr: relax.Expr) -> _Scaled | None:
        while isinstance(expr, relax.Var):  # it may be of a name of its own
            if (known := self._scaled.get(expr.__chandle__())) is not None:
                return known[1]
            expr = self.lookup_binding(expr)
        return None

    def _spread(self, of: relax.Expr, rank: int, axis: int) -> relax.Expr:
        """Return numbers of an axis, or one, in a shape that broadcasts over a tensor.

        One number has a shape, too: of none it would be a part of the kernel, and layers that only
        differ in it would be tasks of their own.
        """
        values = self._values(of)
        size = int(np.prod(shape_of(of) or (1,)))
        shape = (1,) * rank if size == 1 else _along(rank, axis)
        if values is not None:
            return relax.const(values.reshape(shape), str(values.dtype))
        return self._emit(relax.op.reshape(of, [size if d < 0 else d for d in shape]))

    def _as_float(self, of: relax.Expr) -> relax.Expr:
        values = self._values(of)
        if values is not None:
            return relax.const(values.astype(np.float32), "float32")
        return self._emit(relax.op.astype(of, "float32"))

    def _is_zero(self, expr: relax.Expr) -> bool:
        values = self._values(expr)
        return values is not None and not values.any()

    def _bound(self, expr: relax.Expr) -> Any:
        while isinstance(expr, relax.Var):
            expr = self.lookup_binding(expr)
        return expr

    def _values(self, expr: relax.Expr) -> np.ndarray[Any, Any] | None:
        bound = self._bound(expr)
        return np.asarray(bound.value.numpy()) if isinstance(bound, GenericConst) else None

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return expr if isinstance(expr, relax.Var | GenericConst) else self.builder_.emit(expr)


def _has_zero_points(mod: IRModule) -> bool:
    graph = Graph(mod)
    for binding in graph.bindings:
        if op_name(binding.value) == "relax.quantize":
            zero = graph.constant(binding.value.args[2])
            if zero is not None and zero.any():
                return True
    return False


def _along(rank: int, axis: int) -> tuple[int, ...]:
    """Return a shape for NumPy's reshape: all of one, but for the axis."""
    return tuple(-1 if i == axis % rank else 1 for i in range(rank))


def _is_narrow(expr: relax.Expr) -> bool:
    return str(expr.ty.dtype) in _RANGES
