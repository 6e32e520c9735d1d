"""What CUDA's driver API answers, through cuda.bindings."""

from __future__ import annotations

from typing import Any


def checked(answer: Any) -> Any:
    """Return what a call gave besides its status; RuntimeError with CUDA's name for an error."""
    status, *values = answer
    if status.name != "CUDA_SUCCESS":
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
