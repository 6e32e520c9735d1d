"""What each queue has had of the device's time: who is owed most.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a queue's account grows by what its requests
have run over its weight, and one that begins to be active begins where the others stand.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tunerd.colocation.work import Queue

_LEAST_KEPT = 64  # entries of a heap, below which it is not swept


class Accounts:
    """Each call takes O(log n) of n queues, amortised: two heaps know who has had least and most.

    An account that has grown gets a new entry in both when somebody asks. The old one is dropped
    when it comes to the top, or with all others like it, once they are more than those that count.
    """

    def __init__(self, queues: Iterable[Queue]) -> None:
        self._active = dict.fromkeys(queues, 0)  # requests that wait or run
        self._secs = dict.fromkeys(self._active, 0.0)
        self._number = {queue: number for number, queue in enumerate(self._active)}
        self._queues = list(self._active)
        self._least: list[tuple[float, int]] = []  # (seconds, number of the queue)
        self._most: list[tuple[float, int]] = []  # (minus seconds, number of the queue)
        self._grown: dict[Queue, None] = {}  # since somebody asked
        self._most_secs = 0.0  # that any has had
        self._least_secs = 0.0  # that an active one has had, at least

    def open(self, queue: Queue) -> None:
        """Note a request. Being idle has saved nothing up."""
        if not self._active[queue]:
            least = self._top(self._least, 1)
            if least is not None:
                self._secs[queue] = max(self._secs[queue], least)
            self._least_secs = min(self._least_secs, self._secs[queue])
            self._active[queue] = 1
            self._grown[queue] = None
        else:
            self._active[queue] += 1

    def close(self, queue: Queue) -> None:
        """Note that a request has its answer."""
        self._active[queue] -= 1

    def charge(self, queue: Queue, secs: float) -> None:
        """Note what a request has had, over its queue's weight."""
        had_secs = self._secs[queue] = self._secs[queue] + secs
        if had_secs > self._most_secs:
            self._most_secs = had_secs
        self._grown[queue] = None

    def may_lag(self, secs: float) -> bool:
        """Say whether an active queue may lag by more than that; to say no costs nearly nothing."""
        if self._most_secs - self._least_secs > secs:  # by what was least when somebody looked
            least = self._top(self._least, 1)
            self._least_secs = self._most_secs if least is None else least
        return self._most_secs - self._least_secs > secs

    def lag_secs(self, queue: Queue) -> float:
        """Return by how much less a queue has had than the active one that had most."""
        most = self._top(self._most, -1)
        return (0.0 if most is None else most) - self._secs[queue]

    def _enter(self, queue: Queue) -> None:
        secs, number = self._secs[queue], self._number[queue]
        for heap, sign in ((self._least, 1), (self._most, -1)):
            heapq.heappush(heap, (sign * secs, number))
            if len(heap) > max(_LEAST_KEPT, 2 * len(self._queues)):
                heap[:] = {entry for entry in heap if self._counts(entry, sign)}
                heapq.heapify(heap)

    def _top(self, heap: list[tuple[float, int]], sign: int) -> float | None:
        """Return the account at a heap's top, None where no queue is active."""
        while self._grown:
            queue, _ = self._grown.popitem()
            if self._active[queue]:
                self._enter(queue)
        while heap and not self._counts(heap[0], sign):
            heapq.heappop(heap)
        return sign * heap[0][0] if heap else None

    def _counts(self, entry: tuple[float, int], sign: int) -> bool:
        queue = self._queues[entry[1]]
        return bool(self._active[queue]) and self._secs[queue] == sign * entry[0]
