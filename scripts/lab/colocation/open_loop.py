"""CUDA graphs under an open load: requests come when they come, and wait for their turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tunerd.system.cuda_driver import NO_TIMES, checked

_LEAD_SECS = 0.05  # before the first request


class Lane(Protocol):
    """What runs graphs one after another."""

    def launch(self, model: int) -> None: ...

    def ended(self) -> int:
        """Return how many that were launched have ended since it was asked last."""
        ...


class StreamLane:
    """A stream. launches: by model, what queues its graph on a stream, given as CUDA's handle."""

    def __init__(self, launches: Sequence[Callable[[], None]], stream: int) -> None:
        from cuda.bindings import driver

        self._driver, self._launches, self._stream = driver, launches, stream
        self._waits: deque[Any] = deque()
        self._spare: list[Any] = []

    def launch(self, model: int) -> None:
        self._launches[model]()
        event = self._spare.pop() if self._spare else self._made()
        checked(self._driver.cuEventRecord(event, self._stream))
        self._waits.append(event)

    def ended(self) -> int:
        count = 0
        while self._waits:
            (status,) = self._driver.cuEventQuery(self._waits[0])
            if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                break
            checked((status,))
            self._spare.append(self._waits.popleft())
            count += 1
        return count

    def _made(self) -> Any:
        return checked(self._driver.cuEventCreate(NO_TIMES))


def served(
    arrivals: Sequence[tuple[float, int]],
    lanes: Sequence[Lane],
    *,
    now: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Send requests to the lane with the fewest before them; return when each came and its latency.

    arrivals: in order, the second at which one is meant to come, and its model. Latencies count
    from that second, so that what a late sender delays is in them. One thread looks after all.
    """
    start = now() + _LEAD_SECS
    under_way: list[deque[float]] = [deque() for _ in lanes]
    found: list[tuple[float, float]] = []
    sent = 0
    while len(found) < len(arrivals):
        while sent < len(arrivals) and arrivals[sent][0] <= now() - start:
            at, model = arrivals[sent]
            number = min(range(len(lanes)), key=lambda n: len(under_way[n]))
            lanes[number].launch(model)
            under_way[number].append(at)
            sent += 1
        for lane, queue in zip(lanes, under_way, strict=True):
            if queue and (ended := lane.ended()):
                late = now() - start
                meant = [queue.popleft() for _ in range(ended)]
                found += [(at, late - at) for at in meant]
    return found
