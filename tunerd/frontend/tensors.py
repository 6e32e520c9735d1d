"""Which tensors a model may take and return."""

from __future__ import annotations

from tunerd.errors import ModelError
from tunerd.frontend.onnx.shapes import MAX_RANK

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = frozenset({"float16", "float32", "float64", "bool", *_INTEGERS})


def require_usable(what: str, *, dtype: str, rank: int) -> None:
    """Raise ModelError for a type or a number of dimensions that kernels cannot have."""
    if dtype not in _DTYPES:
        raise ModelError(f"{what} has type {dtype}; allowed are {', '.join(sorted(_DTYPES))}")
    if rank > MAX_RANK:
        raise ModelError(
            f"{what} has {rank} dimensions; at most {MAX_RANK} are allowed, so export the model "
            "with fewer"
        )
