"""Where requests wait for a GPU: pinned memory, from which it copies without anybody waiting."""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunerd.system.arrays import dtype_of
from tunerd.system.cuda_driver import checked, current
from tunerd.vocabulary import Arrays, TensorSpec

Array = np.ndarray[Any, Any]
Writes = list[Callable[[], object]]  # of inputs to pinned memory

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_ALIGNMENT = 256  # bytes, of each array
_POOL_BYTES, _POOL_ARRAYS = 64 << 20, 64  # at most, in one pool
# What takes less time to copy than it takes two streams to agree.
_LARGE_BYTES = 128 << 10


def bytes_of(spec: TensorSpec) -> int:
    """Return the bytes of an array."""
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize


def are_large(specs: Sequence[TensorSpec]) -> bool:
    """Say whether arrays are copied on a stream of their own, while that of the graphs has work."""
    return sum(map(bytes_of, specs)) >= _LARGE_BYTES


class PinnedMemory:
    """Memory of the host that a GPU reads and writes while nobody waits; freed when nobody has it.

    Who drops it last, in whichever thread, needs no context.
    """

    def __init__(self, driver: Any, size_bytes: int) -> None:
        """Take it of the calling thread's context. Raises RuntimeError where there is none."""
        context = checked(driver.cuCtxGetCurrent())
        self.address = int(checked(driver.cuMemHostAlloc(max(size_bytes, 1), _PORTABLE)))
        # Not at the end of the process, of which nothing is left either way.
        weakref.finalize(self, _free, driver, context, self.address).atexit = False


def _free(driver: Any, context: Any, address: int) -> None:
    # Of a context that is gone, all is gone.
    with contextlib.suppress(RuntimeError), current(driver, context):
        driver.cuMemFreeHost(address)


def laid_out(specs: Sequence[TensorSpec]) -> tuple[list[tuple[int, int]], int]:
    """Return where arrays begin in one piece of memory and the bytes of each, and those of all."""
    places, at = [], 0
    for spec in specs:
        size = bytes_of(spec)
        places.append((at, size))
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, at


def array_at(address: int, size: int, shape: Sequence[int], dtype: Any, keeps: object) -> Array:
    """Return the array that is at an address, and has something kept while anybody has it."""
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    memory.keeps = keeps
    return np.ndarray(shape, dtype, buffer=memory)


class PinnedArrays(dict[str, Array]):
    """Arrays by name in one piece of pinned memory. The calling thread has a context.

    places: the address and the bytes of each that has any.
    is_lent: to a caller, who sends it as often as they like; no pool takes it back.

    Raises RuntimeError where there is no memory.
    """

    def __init__(self, driver: Any, specs: Sequence[TensorSpec], *, is_lent: bool = False) -> None:
        self.is_lent = is_lent
        places, total = laid_out(specs)
        memory = PinnedMemory(driver, total)
        self.places: dict[str, tuple[int, int]] = {}
        for spec, (begin, size) in zip(specs, places, strict=True):
            at = memory.address + begin
            self[spec.name] = array_at(at, size, spec.shape, dtype_of(spec.dtype), memory)
            if size:
                self.places[spec.name] = at, size

    def write(self, given: Mapping[str, Any]) -> None:
        """Copy arrays by name; TypeError for one of another type."""
        for name, array in self.items():
            np.copyto(array, given[name], casting="no")


def written(write: Callable[[], object], later: Writes | None) -> None:
    """Write now, or have it done later."""
    if later is None:
        write()
    else:
        later.append(write)


class PinnedPool:
    """Arrays for requests that wait, as many as fit into 64 MiB, at most 64; thread-safe.

    So who sends a request copies its inputs, beside others, and who starts it has no more to copy.
    """

    def __init__(self, make: Callable[[], PinnedArrays], request_bytes: int) -> None:
        count = min(_POOL_ARRAYS, _POOL_BYTES // max(request_bytes, 1))
        self._free = deque(make() for _ in range(count))

    def holding(self, inputs: Arrays) -> Arrays:
        """Return a copy of a request's inputs in pinned memory; itself where none is left.

        What is in pinned memory stays where it is.
        """
        if isinstance(inputs, PinnedArrays):
            return inputs
        try:
            held = self._free.pop()
        except IndexError:
            return inputs
        held.write(inputs)
        return held

    def give_back(self, inputs: Arrays) -> None:
        """Take back what `holding` returned, which nobody reads any more."""
        if isinstance(inputs, PinnedArrays) and not inputs.is_lent:
            self._free.append(inputs)
