"""Write powers by a constant as products.

CUDA code is compiled with --use_fast_math, as TVM's own is, where powf(x, y) is 2^(y log2 x): not a
number for any x below zero (CUDA C++ Programming Guide, intrinsic functions). Such are the cube of
GELU's approximation and the square of a normalization that was exported as its parts. Products are
right for both signs, and faster on any device.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

MAX_EXPONENT = 64  # by squaring: at most 10 products


def expand_powers(mod: IRModule) -> IRModule:
    """Replace x^n, n a whole number of at most 64 either way, x^0.5 and x^-0.5 in `main`."""
    main = _Powers(mod).visit_expr(mod["main"])
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), main)
    return mod


@mutator
class _Powers(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.power":
            return visited
        base, exponent = visited.args
        if isinstance(exponent, relax.Var):
            exponent = self.lookup_binding(exponent)
        if not isinstance(exponent, GenericConst) or exponent.value.numpy().size != 1:
            return visited
        if base.ty.ndim < exponent.value.numpy().ndim:  # it would broadcast
            return visited
        value = float(exponent.value.numpy().item())
        root = abs(value) == 0.5
        if not root and not (value.is_integer() and 1 <= abs(value) <= MAX_EXPONENT):
            return visited
        if not str(base.ty.dtype).startswith("float") and (root or value < 0):
            return visited
        power = self._emit(relax.op.sqrt(base)) if root else self._power(base, int(abs(value)))
        if value > 0:
            return power
        return relax.op.divide(relax.const(1, str(base.ty.dtype)), power)

    def _power(self, base: relax.Expr, exponent: int) -> relax.Expr:
        if exponent == 1:
            return base
        half = self._power(base, exponent // 2)
        square = self._emit(relax.op.multiply(half, half))
        return square if exponent % 2 == 0 else self._emit(relax.op.multiply(square, base))

    def _emit(self, call: relax.Call) -> relax.Var:
        return self.builder_.emit(call)
