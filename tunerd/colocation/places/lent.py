"""Arrays for callers' inputs in memory that processes map as well: nobody copies them.

A process has such memory from the second request on that comes with it: what is lent for one
request alone is copied, which takes less than to map it. Each takes two descriptors, so that there
are only so many at a time; further ones are plain arrays.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunerd.runner.seat_service import in_order
from tunerd.system.arrays import dtype_of
from tunerd.system.shared_arrays import SharedArrays
from tunerd.vocabulary import Arrays, TensorSpec

_MOST = 64


class Lent(dict[str, "np.ndarray[Any, Any]"]):
    """Inputs by name, in memory of a number and a descriptor."""

    def __init__(self, arrays: Arrays, number: int, descriptor: int) -> None:
        super().__init__(arrays)
        self.number, self.descriptor = number, descriptor


class Lender:
    """Lends memory until nobody holds an array of it. Any thread.

    `gone` are the numbers of what is there no more, for processes to be told.
    """

    def __init__(self) -> None:
        self.gone: deque[int] = deque()
        self._numbers = iter(range(1, 1 << 31))
        self._lent: dict[int, weakref.finalize[Any, Any]] = {}

    def lent(self, specs: Sequence[TensorSpec]) -> Arrays:
        """Return zeros."""
        if len(self._lent) >= _MOST:
            return {spec.name: np.zeros(spec.shape, dtype_of(spec.dtype)) for spec in specs}
        number, memory = next(self._numbers), SharedArrays(in_order(specs))
        descriptor = memory.descriptor
        assert descriptor is not None
        self._lent[number] = weakref.finalize(memory.mapped, self._end, number, descriptor)
        return Lent({spec.name: memory.arrays[spec.name] for spec in specs}, number, descriptor)

    def close(self) -> None:
        """Give up the descriptors. Arrays stay as long as anybody holds them."""
        for end in list(self._lent.values()):
            end()

    def _end(self, number: int, descriptor: int) -> None:
        del self._lent[number]
        os.close(descriptor)
        self.gone.append(number)
