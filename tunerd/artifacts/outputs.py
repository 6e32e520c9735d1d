"""What a graph leaves for its callers: outputs in pinned memory, large ones theirs without a copy.

All requests of an engine go through one thread, which copies no large output for them: of simulated
graphs with outputs of 196 KB two cores serve a sixth more so (results/colocation), and 25 MB, whose
copy takes 2 to 80 ms as there are pages for it or not, would keep everybody waiting. Who reads them
has the memory that they are in, and the next launch leaves its own elsewhere. The memory comes back
when the caller has them no more. Of who keeps all that there is, a thread of the graph's copies
them, and its next launch waits for that alone. Memory of such copies is used again, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from tunerd.artifacts.staging import Array, PinnedMemory, array_at, laid_out
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import Arrays, TensorSpec

_BLOCKS, _BLOCKS_BYTES = 8, 32 << 20  # at most, of one graph
# At least: for the next launch, for who reads the last one, and for who has the one before.
_LEAST_BLOCKS = 3
_SPARE = 2  # pieces of memory for copies that are kept while nobody has them

_T = TypeVar("_T")
_Place = tuple[str, int, int, tuple[int, ...], Any]  # name, where in a block, bytes, shape, dtype


class Outputs:
    """Outputs by name of the launches of one graph. The calling thread has a context.

    places: the address and the bytes of each that has any, to be filled by the next launch.

    Raises RuntimeError where there is no memory.
    """

    def __init__(
        self,
        driver: Any,
        specs: Sequence[TensorSpec],
        *,
        by_row: bool = False,
        gives_away: bool = False,
    ) -> None:
        """Make room for them.

        Args:
            by_row: each row of all outputs is a result of its own.
            gives_away: what is read may stay where it is, and `places` change; else it is copied.
        """
        self._places, size = laid_out(specs)
        block_bytes = max(size, 1)
        self._specs = specs
        self._results = list(_results(specs, self._places, by_row=by_row))
        most = max(_LEAST_BLOCKS, min(_BLOCKS, _BLOCKS_BYTES // block_bytes))
        count = most if gives_away else 1
        self._memory = PinnedMemory(driver, count * block_bytes)
        first = self._memory.address
        self._free = deque(range(first, first + count * block_bytes, block_bytes))
        self._stays: list[Arrays] | None = None  # the arrays of a block that is copied
        self._gives_away = gives_away
        self._copier: ThreadPoolExecutor | None = None
        self._copied: Future[list[Arrays]] | None = None  # of the last launch
        self._spare = deque[Array](maxlen=_SPARE)
        self._block_bytes = block_bytes
        self._take_block()

    def is_ready(self, count: int = 1) -> bool:
        """Say whether `read` need copy nothing large; else a thread begins to, or goes on."""
        if self._copied is None:
            if self._free or not self._gives_away:
                return True
            if self._copier is None:
                self._copier = ThreadPoolExecutor(1, thread_name_prefix="tunerd-outputs")
            self._copied = self._copier.submit(self._large_copies, count)
        return self._copied.done()

    def read(self, count: int = 1) -> list[Arrays]:
        """Return the first results of the last launch; the arrays are the caller's."""
        copied, self._copied = self._copied, None
        if copied is not None:
            return copied.result()
        if not self._gives_away:
            return self._copies(count)
        if not self._free:  # callers have all of it
            return self._large_copies(count)
        given = self._at_address(self._at, count, _Block(self._memory, self._free, self._at))
        self._take_block()
        return given

    def _copies(self, count: int) -> list[Arrays]:
        if self._stays is None:
            self._stays = self._at_address(self._at, len(self._results))
        stays = self._stays[:count]
        return [{name: array.copy() for name, array in each.items()} for each in stays]

    def _large_copies(self, count: int) -> list[Arrays]:
        """Return copies. NumPy gives the interpreter away while it makes them."""
        shape = (self._block_bytes,)
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = np.empty(shape, np.uint8)
        np.copyto(memory, array_at(self._at, self._block_bytes, shape, np.uint8, None))
        return self._at_address(memory.ctypes.data, count, _Block(memory, self._spare, memory))

    def _take_block(self) -> None:
        self._at = self._free.popleft()
        self._stays = None
        self.places = {
            spec.name: (self._at + begin, size)
            for spec, (begin, size) in zip(self._specs, self._places, strict=True)
            if size
        }

    def _at_address(self, at: int, count: int, keeps: object = None) -> list[Arrays]:
        """Return the arrays of the first results in a block that is there."""
        return [
            {
                name: array_at(at + begin, size, shape, dtype, keeps)
                for name, begin, size, shape, dtype in result
            }
            for result in self._results[:count]
        ]


class _Block(Generic[_T]):
    """Memory that callers have; free again when none of its arrays is left, in any thread."""

    def __init__(self, memory: object, free: deque[_T], at: _T) -> None:
        self._memory, self._free, self._at = memory, free, at

    def __del__(self) -> None:
        self._free.append(self._at)


def _results(
    specs: Sequence[TensorSpec], places: Sequence[tuple[int, int]], *, by_row: bool
) -> Iterator[list[_Place]]:
    """Yield the arrays of each result."""
    arrays = [
        (spec.name, begin, size, tuple(spec.shape), dtype_of(spec.dtype))
        for spec, (begin, size) in zip(specs, places, strict=True)
    ]
    if not by_row:
        yield arrays
        return
    for row in range(min(shape[0] for *_, shape, _ in arrays)):
        yield [
            (name, begin + row * (size // shape[0]), size // shape[0], shape[1:], dtype)
            for name, begin, size, shape, dtype in arrays
        ]
