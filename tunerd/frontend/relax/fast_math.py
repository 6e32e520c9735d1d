"""Write exp, erf, tanh and what is made of them as polynomials that CPUs run in vectors.

TVM's code for CPUs calls the C library for each element, in the middle of loops that are vectorized
otherwise: of an encoder's GELU that was over half of the kernel (results, "Functions on CPUs").
`topi` has approximations. exp's is within 2e-6 of the value, and 5e-6 beyond 20 either way; erf's,
tanh's and that of a sigmoid within 5e-7 (tests/contract/test_fast_math.py). CUDA code has
approximations of its own, by --use_fast_math.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te, topi
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

Compute = Callable[[te.Tensor], te.Tensor]


def use_fast_math(mod: IRModule) -> IRModule:
    """Replace these operators on float32 in `main`."""
    rewriter = _FastMath(mod)
    main = rewriter.visit_expr(mod["main"])
    rewriter.builder_.update_func(mod.get_global_var("main"), main)
    return rewriter.builder_.get()  # with the kernels that it has got


def _sigmoid(x: te.Tensor) -> te.Tensor:
    return topi.divide(1.0, topi.add(topi.fast_exp(topi.negative(x)), 1.0))


def _silu(x: te.Tensor) -> te.Tensor:
    return topi.multiply(x, _sigmoid(x))


def _half_of(x: te.Tensor, one_at_most: te.Tensor) -> te.Tensor:
    return topi.multiply(x, topi.add(topi.multiply(one_at_most, 0.5), 0.5))


def _gelu(x: te.Tensor) -> te.Tensor:
    return _half_of(x, topi.fast_erf(topi.multiply(x, 0.5**0.5)))


def _gelu_tanh(x: te.Tensor) -> te.Tensor:
    cubic = topi.add(topi.multiply(topi.multiply(x, x), 0.044715), 1.0)
    inner = topi.multiply(topi.multiply(x, cubic), 0.7978845608028654)  # the root of 2/pi
    return _half_of(x, topi.fast_tanh(inner))


# By TVM's name of the operator; the second is a part of the kernel's name.
_COMPUTES: dict[str, tuple[Compute, str]] = {
    "relax.exp": (topi.fast_exp, "exp"),
    "relax.erf": (topi.fast_erf, "erf"),
    "relax.tanh": (topi.fast_tanh, "tanh"),
    "relax.sigmoid": (_sigmoid, "sigmoid"),
    "relax.nn.silu": (_silu, "silu"),
    "relax.nn.gelu": (_gelu, "gelu"),
    "relax.nn.gelu_tanh": (_gelu_tanh, "gelu_tanh"),
}


@mutator
class _FastMath(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name = getattr(visited.op, "name", "")
        if name not in (*_COMPUTES, "relax.nn.softmax"):
            return visited
        if str(visited.args[0].ty.dtype) != "float32":
            return visited
        if name == "relax.nn.softmax":
            return self._call(topi.nn.fast_softmax, visited, "softmax", int(visited.attrs.axis))
        compute, hint = _COMPUTES[name]
        return self._call(compute, visited, hint)

    def _call(self, compute: Compute, call: relax.Call, hint: str, *args: Any) -> relax.Call:
        return self.builder_.call_te(compute, call.args[0], *args, primfunc_name_hint=hint)
