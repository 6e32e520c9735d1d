"""Copies of the host's memory to a GPU that disturb nobody else: pinned, on a stream of their own.

What is copied from ordinary memory is copied by the driver on the default stream, and who waits for
it waits for all that the GPU does. Here a thread copies a part into memory that the driver knows,
while the GPU takes the part before it from there, and waits for that stream alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from typing import Any

from tunerd.system.cuda_driver import NO_TIMES, beside_captures, checked, current

log = logging.getLogger(__name__)

PART_BYTES = 4 << 20  # two of them; the bus is busy from here on, and little memory is pinned
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE


class PinnedCopies:
    """Any thread may copy; copies of several take turns. Of the context that is current here."""

    def __init__(self, driver: Any, part_bytes: int = PART_BYTES) -> None:
        """Raises RuntimeError where there is no memory that can be pinned."""
        self._driver, self._part_bytes = driver, part_bytes
        self._turn = threading.Lock()
        self._buffers: list[int] = []
        self._events: list[Any] = []
        self._stream: Any = None
        self._context = checked(driver.cuCtxGetCurrent())
        self._stream = checked(driver.cuStreamCreate(_NON_BLOCKING))
        for _ in range(2):
            self._buffers.append(int(checked(driver.cuMemHostAlloc(part_bytes, _PORTABLE))))
            self._events.append(checked(driver.cuEventCreate(NO_TIMES)))

    def copy(self, there: int, data: Any) -> None:
        """Copy an array of bytes to an address of the GPU, and return when they are there."""
        driver, size, here = self._driver, int(data.nbytes), int(data.ctypes.data)
        with self._turn, current(driver, self._context), self.beside_captures():
            try:
                for nth, begin in enumerate(range(0, size, self._part_bytes)):
                    buffer, event = self._buffers[nth % 2], self._events[nth % 2]
                    part = min(self._part_bytes, size - begin)
                    if nth > 1:  # the GPU has taken what was there
                        checked(driver.cuEventSynchronize(event))
                    ctypes.memmove(buffer, here + begin, part)
                    checked(driver.cuMemcpyHtoDAsync(there + begin, buffer, part, self._stream))
                    checked(driver.cuEventRecord(event, self._stream))
            finally:  # also what was queued before an error must not find other bytes there
                checked(driver.cuStreamSynchronize(self._stream))

    def beside_captures(self) -> contextlib.AbstractContextManager[None]:
        """Have the calling thread allocate in this block, whoever captures a graph meanwhile."""
        return beside_captures(self._driver)

    def __del__(self) -> None:
        # Of a context that is gone, all is gone: what these answer does not matter.
        for event in getattr(self, "_events", ()):
            self._driver.cuEventDestroy(event)
        for buffer in getattr(self, "_buffers", ()):
            self._driver.cuMemFreeHost(buffer)
        if getattr(self, "_stream", None) is not None:
            self._driver.cuStreamDestroy(self._stream)


def pinned_copies() -> PinnedCopies | None:
    """Return them for the GPU that is current; None, which is logged, where the driver has none."""
    try:
        from cuda.bindings import driver

        return PinnedCopies(driver)
    except (ImportError, RuntimeError) as error:
        log.warning("weights are copied without pinned memory, which stops launches: %s", error)
        return None
