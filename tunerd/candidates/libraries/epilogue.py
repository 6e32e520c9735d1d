"""What follows a sum of products, as a library says it: scaled, added to, and through a function.

Casts between floating types are passed over: a library rounds once, at its end, which is nearer to
the sum than what it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunerd.candidates.nests.nest import Expr, NotANest

Values = npt.NDArray[np.float64]

_POINTS = np.concatenate([np.linspace(-12.0, 12.0, 481), [-1000.0, -50.0, 50.0, 1000.0]])
_APART = 1e-5  # of its values; the two usual forms of GELU are 5e-4 apart


@dataclass(frozen=True)
class Epilogue:
    """activation(alpha sum + all that is added)."""

    alpha: float
    added: tuple[Expr, ...]  # loads
    activation: str  # a name of those that were allowed; "" for none


def _gelu_tanh(x: Values) -> Values:
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


def _erf(x: Values) -> Values:
    return np.array([math.erf(each) for each in x])


def _sigmoid(x: Values) -> Values:
    return np.asarray(1 / (1 + np.exp(-x)))


_ACTIVATIONS: Mapping[str, Callable[[Values], Values]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    "swish": lambda x: x * _sigmoid(x),
    "gelu_tanh": _gelu_tanh,
}


def epilogue_of(expr: Expr, activations: tuple[str, ...]) -> Epilogue:
    """Return the epilogue of a nest with one reduction; raises NotANest for any other form."""
    inner = _inner(expr)
    alpha, added = _affine(inner) or (1.0, ())
    if inner == _bare(expr):
        return Epilogue(alpha, added, "")
    found = _evaluated(expr, inner)
    for name in activations:
        with np.errstate(over="ignore"):
            expected = _ACTIVATIONS[name](_POINTS) if name else _POINTS
        if np.allclose(found, expected, rtol=_APART, atol=_APART):
            return Epilogue(alpha, added, name)
    raise NotANest("what follows the sum is no function that the library has")


def _inner(expr: Expr) -> Expr:
    """Return the largest part of an expression that is a sum of the reduction and of tensors."""
    expr = _bare(expr)
    if _affine(expr) is not None:
        return expr
    parts = {_inner(each) for each in expr.args if _is_of_sum(each)}
    if len(parts) > 1:
        parts = {_unscaled(each) for each in parts}
    if len(parts) != 1:
        raise NotANest("what follows the sum is no function of one value")
    return parts.pop()


def _affine(expr: Expr) -> tuple[float, tuple[Expr, ...]] | None:
    """Return what scales the reduction, and the loads that are added to it; None where it is no
    such sum."""
    expr = _bare(expr)
    if expr.op == "reduced":
        return 1.0, ()
    if expr.op not in ("add", "mul", "div") or len(expr.args) != 2:
        return None
    one, other = map(_bare, expr.args)
    if not _is_of_sum(one) and expr.op != "div":
        one, other = other, one
    if not _is_of_sum(one) or _is_of_sum(other):
        return None
    known = _affine(one)
    if known is None:
        return None
    alpha, added = known
    if expr.op == "add":
        more = _loads(other)
        return None if more is None else (alpha, (*added, *more))
    if other.op != "const" or added:
        return None
    factor = float(other.value)
    return (alpha * factor if expr.op == "mul" else alpha / factor), ()


def _loads(expr: Expr) -> tuple[Expr, ...] | None:
    """Return the loads that an expression adds up, None where it does anything else."""
    expr = _bare(expr)
    if expr.op == "load":
        return (expr,)
    if expr.op != "add":
        return None
    parts = [_loads(each) for each in expr.args]
    return None if None in parts else tuple(load for part in parts for load in part or ())


def _unscaled(expr: Expr) -> Expr:
    expr = _bare(expr)
    if expr.op in ("mul", "div"):
        of_sum = [each for each in expr.args if _is_of_sum(each)]
        if len(of_sum) == 1:
            return _unscaled(of_sum[0])
    return expr


def _bare(expr: Expr) -> Expr:
    """Return an expression without the casts around it."""
    while expr.op == "cast" and _is_float(expr.dtype) and _is_float(expr.args[0].dtype):
        (expr,) = expr.args
    return expr


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _is_of_sum(expr: Expr) -> bool:
    return any(each.op == "reduced" for each in expr.walk())


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "exp": np.exp,
    "tanh": np.tanh,
    "fabs": np.abs,
    "erf": _erf,
    "sigmoid": _sigmoid,
    "select": np.where,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _evaluated(expr: Expr, inner: Expr) -> Values:
    """Return an expression's values where a part of it has those of _POINTS."""
    if expr == inner:
        return _POINTS
    if expr.op == "const":
        return np.full_like(_POINTS, float(expr.value))
    parts = [_evaluated(each, inner) for each in expr.args]
    if expr.op == "cast":
        return parts[0]
    if expr.op not in _FUNCTIONS:
        raise NotANest(f"no library has {expr.op} after a sum")
    with np.errstate(all="ignore"):
        return np.asarray(_FUNCTIONS[expr.op](*parts))
