"""Memory for the inputs of a request that the device reads itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tunerd.vocabulary import Arrays, TensorSpec


class InputBuffers(Mapping[str, np.ndarray[Any, Any]]):
    """Arrays by name that a caller writes in place and sends without a copy.

        buffers = engine.input_buffers("detector")
        buffers["x"][...] = image
        outputs = engine.submit("detector", buffers).result()

    They are read until the future is done: write them again only then. They may be sent several
    times at once, and to each member whose inputs are the same.
    """

    def __init__(self, specs: tuple[TensorSpec, ...], arrays: Arrays) -> None:
        """Take what a place has lent; `Engine.input_buffers` does it."""
        self.specs, self.arrays = specs, arrays

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)
