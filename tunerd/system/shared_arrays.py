"""Tensors in memory that two processes have in common, without a name that could be left behind.

64 bytes: a flag and padding | the tensors in order, each aligned to 64 bytes
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import Arrays, TensorSpec

_ALIGNMENT = 64  # bytes; what TVM asks of a tensor that it takes where it lies


class SharedArrays:
    """`arrays` are the tensors by name, in the shared memory; close() is idempotent.

    Args:
        specs: of the tensors, the same on both sides.
        descriptor: of the memory that the other side made; None makes it.
    """

    def __init__(self, specs: Sequence[TensorSpec], descriptor: int | None = None) -> None:
        offsets, end = [], _ALIGNMENT
        for spec in specs:
            offsets.append(end)
            end += -(-_size(spec) // _ALIGNMENT) * _ALIGNMENT
        if descriptor is None:
            descriptor = os.memfd_create("tunerd", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, end)
        self.descriptor: int | None = descriptor
        self._memory = mmap.mmap(descriptor, end)
        self.arrays: Arrays = {
            spec.name: np.ndarray(spec.shape, dtype_of(spec.dtype), self._memory, offset)
            for spec, offset in zip(specs, offsets, strict=True)
        }

    @property
    def mapped(self) -> mmap.mmap:
        """Return what lives as long as any of the arrays, and these do not know of it otherwise."""
        return self._memory

    @property
    def flag(self) -> bool:
        return self._memory[0] != 0

    @flag.setter
    def flag(self, value: bool) -> None:
        self._memory[0] = int(value)

    def close(self) -> None:
        """Give up the descriptor; the memory goes with the last array that lies in it."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _size(spec: TensorSpec) -> int:
    size = dtype_of(spec.dtype).itemsize
    for length in spec.shape:
        size *= length
    return size
