"""Convolutions and products on CPUs whose output channels fill no vectors get some nobody reads.

A schedule cuts the channels into vectors and the vectors into tiles, by the factors of their
number: 255 of a detector's head are 3, 5 and 17, and 1,000 of a classifier are no vectors of 16.
One more, or 24, cost less than that: two or four vectors in a tile load less for each sum, and
whole tiles of weights may lie as they are read. What follows channel by channel is computed of
them, too, and then they are cut off. Large weights, which lie in a file of their own, stay as they
are: nobody copies them.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.onnx.weights import LEAST_BYTES
from tunerd.frontend.relax.movement import OF_ONE, OF_TWO, op_name
from tunerd.system.arrays import dtype_of

_VECTOR = 16  # float32 in 64 bytes, the widest that there are
_MOST = 1 / 32  # of the channels, that may be added
_CUT = "relax.strided_slice"


def fill_vectors(mod: IRModule) -> IRModule:
    """Widen these in `main`; the layout of convolutions must be NHWC."""
    rewriter = _Widening(mod)
    main = rewriter.visit_expr(mod["main"])
    rewriter.builder_.update_func(mod.get_global_var("main"), main)
    return rewriter.builder_.get()


def added(channels: int) -> int:
    """Return how many channels a convolution or a product gets.

    >>> added(1000), added(255), added(500), added(24), added(64)
    (24, 1, 12, 0, 0)
    """
    if channels % _VECTOR == 0:
        return 0
    found = (-channels % (vectors * _VECTOR) for vectors in (4, 2, 1))
    return next((more for more in found if more <= _MOST * channels), 0)


@mutator
class _Widening(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self._widened: list[relax.Var] = []

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        wide = self._wide_of(visited)
        if wide is None:
            return visited
        shape = call.ty.shape.values
        kept = self.builder_.emit(wide)
        self._widened.append(kept)
        last = len(shape) - 1
        return relax.op.strided_slice(kept, axes=[last], begin=[0], end=[int(shape[last])])

    def _wide_of(self, call: relax.Call) -> relax.Call | None:
        """Return a call with more channels, None where it gets none."""
        name = op_name(call)
        if name in ("relax.nn.conv2d", "relax.matmul"):
            return self._wide_sums(call)
        if name in OF_ONE and (wide := self._wide(call.args[0])) is not None:
            return relax.Call(call.op, [wide, *call.args[1:]], call.attrs)
        if name in OF_TWO:
            return self._wide_pair(call)
        return None

    def _wide_sums(self, call: relax.Call) -> relax.Call | None:
        (data, weight), attrs = call.args, call.attrs
        if not isinstance(weight, GenericConst) or not _is_by_channel(call, weight):
            return None
        more = 0 if _bytes(weight) >= LEAST_BYTES else added(_channels(weight))
        return relax.Call(call.op, [data, _padded(weight, more)], attrs) if more else None

    def _wide_pair(self, call: relax.Call) -> relax.Call | None:
        """Return an operator of a widened operand and a constant."""
        for i, operand in enumerate(call.args):
            wide, other = self._wide(operand), call.args[1 - i]
            if wide is None or not isinstance(other, GenericConst):
                continue
            is_by_channel = other.value.shape and other.value.shape[-1] > 1
            more = _channels(wide) - _channels(operand)
            pair = [wide, _padded(other, more) if is_by_channel else other]
            return relax.Call(call.op, pair if i == 0 else pair[::-1], call.attrs)
        return None

    def _wide(self, expr: relax.Expr) -> relax.Var | None:
        """Return what an expression is the first channels of, if it was widened here."""
        bound = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        if bound is None or op_name(bound) != _CUT:
            return None
        return next((v for v in self._widened if v.same_as(bound.args[0])), None)


def _is_by_channel(call: relax.Call, weight: GenericConst) -> bool:
    """Whether the last axis of a weight has the channels of the result, and no axis has groups."""
    if op_name(call) == "relax.matmul":
        return len(weight.value.shape) == 2
    layouts = call.attrs.data_layout, call.attrs.kernel_layout, call.attrs.groups
    return bool(layouts == ("NHWC", "HWIO", 1))


def _bytes(constant: GenericConst) -> int:
    size = dtype_of(str(constant.ty.dtype)).itemsize
    return size * math.prod(map(int, constant.value.shape))


def _channels(expr: relax.Expr) -> int:
    return int(expr.ty.shape.values[-1])


def _padded(constant: GenericConst, more: int) -> relax.Expr:
    values = constant.value.numpy()
    widths = [(0, 0)] * (values.ndim - 1) + [(0, more)]
    return relax.const(np.pad(values, widths), str(constant.ty.dtype))
