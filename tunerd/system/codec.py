"""Values as the JSON and the blobs of a message between processes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunerd.vocabulary import (
    Arrays,
    TensorSpec,
)


def specs_from(entries: Sequence[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(e["name"], tuple(e["shape"]), e["dtype"]) for e in entries)


def arrays_to(arrays: Arrays) -> tuple[list[dict[str, Any]], list[bytes]]:
    specs = [
        {"name": name, "shape": list(a.shape), "dtype": str(a.dtype)} for name, a in arrays.items()
    ]
    return specs, [np.ascontiguousarray(a).tobytes() for a in arrays.values()]


def arrays_from(specs: Sequence[dict[str, Any]], blobs: Sequence[bytes]) -> Arrays:
    return {
        s["name"]: np.frombuffer(b, np.dtype(s["dtype"])).reshape(s["shape"]).copy()
        for s, b in zip(specs, blobs, strict=True)
    }
