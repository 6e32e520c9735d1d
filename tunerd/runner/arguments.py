"""The arguments of kernels on a device: seeded random values, made once.

Weights are only read. All of them, and all copies of them, are views of one piece of memory of
their type, which all kernels share: one that is met for the first time has its 512 copies within
milliseconds. Kernels write their activations, so these are tensors of their own, filled from the
same piece. A kernel of several models is given a copy for each, by its slots (`builder.tenants`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunerd.artifacts.weights import view
from tunerd.system.arrays import dtype_of, timing_values
from tunerd.vocabulary import SLOT_BYTES, Arrays, Build, TensorSpec

MAX_COPIES = 512  # of the weights of a kernel
MAX_COPY_BYTES = 1 << 30
_ALIGNED = 512  # bytes; as what cudaMalloc returns
_STEP = 16 << 20  # a piece has a multiple of it
_MADE_ON_HOST = 4 << 20  # the rest of a piece repeats it
_MOST_SETS = 50_000  # that are kept: some 20 MB of this process's memory

ArgumentSet = tuple[Any, ...]  # tensors, of one call


class Arguments:
    """Makes and keeps the arguments of kernels.

    Args:
        empty: makes a tensor on the device, by its shape and type, with any values.
        settle: waits until copies are where they are to be.
        max_bytes: of activations that are kept for the next kernels.
    """

    def __init__(
        self,
        empty: Callable[[Sequence[int], str], Any],
        settle: Callable[[], None],
        *,
        max_bytes: int,
    ) -> None:
        self._empty, self._settle = empty, settle
        self._max_bytes = max_bytes
        self._pieces: dict[str, Any] = {}  # one dimension each, by type
        self._activations: dict[tuple[tuple[int, ...], str, int], Any] = {}
        self._kept_bytes = 0  # of activations
        self._scratch: dict[TensorSpec, Any] = {}  # which all kernels share
        self._sets: dict[tuple[Any, ...], list[ArgumentSet]] = {}

    def sets(self, build: Build, *, range_bytes: int) -> list[ArgumentSet]:
        """Return the arguments of successive calls: the same activations, other copies of weights.

        Tensors of one call do not overlap, so that no kernel reads what it writes.

        Args:
            range_bytes: that the copies are together to reach over; for 0 there is one.
        """
        key = (build.args, build.scratch, build.weight_args, build.tenants, range_bytes)
        if key not in self._sets:
            if sum(map(len, self._sets.values())) > _MOST_SETS:
                self._sets.clear()
            made = self._made(build.args, build.weight_args, build.tenants, range_bytes)
            own = tuple(map(self._zeros, build.scratch))
            self._sets[key] = [(*arguments, *own) for arguments in made]
            self._settle()
        return self._sets[key]

    def _made(
        self, specs: Sequence[TensorSpec], weights: Sequence[int], tenants: int, range_bytes: int
    ) -> list[ArgumentSet]:
        copies = copies_of(tenants * sum(_bytes_of(specs[i]) for i in weights), range_bytes)
        begins: dict[int, int] = {}  # where in its piece the first copy of a weight does
        each: Counter[str] = Counter()  # bytes of a piece that one copy of all weights takes
        for i in weights:
            begins[i] = each[specs[i].dtype]
            each[specs[i].dtype] += aligned(_bytes_of(specs[i]))
        if tenants > 1:  # the slot of a lane is of all its weights, whatever their types
            each = Counter(dict.fromkeys(each, max(each.values(), default=0)))
        for spec in specs:
            self._reserve(spec.dtype, max(copies * tenants * each[spec.dtype], _bytes_of(spec)))
        taken: Counter[tuple[tuple[int, ...], str]] = Counter()
        arguments: list[Any] = [None] * len(specs)
        for i, spec in enumerate(specs):
            if tenants > 1 and i == 0:
                arguments[i] = self._slots(tenants, max(each.values(), default=0))
            elif i not in begins:
                arguments[i] = self._activation(spec, taken[spec.shape, spec.dtype])
                taken[spec.shape, spec.dtype] += 1
        found = []
        for copy in range(copies):
            for i, begin in begins.items():
                arguments[i] = self._view(specs[i], begin + copy * tenants * each[specs[i].dtype])
            found.append(tuple(arguments))
        return found

    def _slots(self, tenants: int, distance: int) -> Any:
        """Return a copy of the weights for each lane, that are so many bytes apart."""
        slots = self._empty((tenants,), "int32")
        slots.copyfrom(np.arange(tenants, dtype=np.int32) * (distance // SLOT_BYTES))
        return slots

    def _activation(self, spec: TensorSpec, nth: int) -> Any:
        """Return the nth tensor of a kind."""
        key = (spec.shape, spec.dtype, nth)
        if key not in self._activations:
            if self._kept_bytes + _bytes_of(spec) > self._max_bytes:
                self._activations.clear()
                self._sets.clear()
                self._kept_bytes = 0
            tensor = self._empty(spec.shape, spec.dtype)
            self._view(spec, 0).copyto(tensor)
            self._activations[key] = tensor
            self._kept_bytes += _bytes_of(spec)
        return self._activations[key]

    def _zeros(self, spec: TensorSpec) -> Any:
        """Return scratch memory, which kernels leave as they found it or write before they read."""
        if spec not in self._scratch:
            self._scratch[spec] = self._empty(spec.shape, spec.dtype)
            self._scratch[spec].copyfrom(np.zeros(spec.shape, spec.dtype))
        return self._scratch[spec]

    def _view(self, spec: TensorSpec, begin: int) -> Any:
        return view(self._pieces[spec.dtype], spec.shape, spec.dtype, begin)

    def _reserve(self, dtype: str, size: int) -> None:
        """Have a piece of a type with at least so many bytes."""
        item = dtype_of(dtype).itemsize
        if dtype in self._pieces and self._pieces[dtype].shape[0] * item >= size:
            return
        self._pieces.pop(dtype, None)
        self._sets.clear()  # they have views of it
        # A quarter more, because the next kernel's copies may reach a little further.
        self._pieces[dtype] = self._filled(dtype, aligned(max(size + size // 4, 1), _STEP) // item)

    def _filled(self, dtype: str, count: int) -> Any:
        piece = self._empty((count,), dtype)
        item = dtype_of(dtype).itemsize
        have = min(count, _MADE_ON_HOST // item)
        values = timing_values(TensorSpec("", (have,), dtype), seed=0)
        view(piece, (have,), dtype, 0).copyfrom(values)
        while have < count:
            more = min(have, count - have)
            view(piece, (more,), dtype, 0).copyto(view(piece, (more,), dtype, have * item))
            have += more
        return piece


def copies_of(bytes_each: int, range_bytes: int) -> int:
    """Return how many copies of a kernel's weights reach over a range, or as far as is allowed.

    >>> copies_of(bytes_each=3 << 20, range_bytes=100 << 20)
    34
    >>> copies_of(bytes_each=0, range_bytes=100 << 20)
    1
    """
    if not bytes_each:
        return 1
    wanted = math.ceil(range_bytes / bytes_each)
    return max(1, min(wanted, MAX_COPIES, MAX_COPY_BYTES // bytes_each))


def _bytes_of(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize


def aligned(size: int, to: int = _ALIGNED) -> int:
    """Return a number of bytes rounded up to where the next tensor may begin."""
    return -(-size // to) * to


def timed_inputs(model: Any) -> Arrays:
    """Return what a loaded artifact is timed on, by input name: its sample, or seeded values."""
    return model.sample or {s.name: timing_values(s, seed=i) for i, s in enumerate(model.inputs)}
