"""What each queue has had of the device's time: who is owed most.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a queue's account grows by what its requests
have run over its weight, and one that begins to be active begins where the others stand.
"""

from __future__ import annotations

from collections.abc import Iterable

from tunerd.colocation.work import Queue


class Accounts:
    def __init__(self, queues: Iterable[Queue]) -> None:
        self._active = dict.fromkeys(queues, 0)  # requests that wait or run
        self._secs = dict.fromkeys(self._active, 0.0)

    def open(self, queue: Queue) -> None:
        """Note a request. Being idle has saved nothing up."""
        if not self._active[queue]:
            least = min(self._of_the_active(), default=0.0)
            self._secs[queue] = max(self._secs[queue], least)
        self._active[queue] += 1

    def close(self, queue: Queue) -> None:
        """Note that a request has its answer."""
        self._active[queue] -= 1

    def charge(self, queue: Queue, secs: float) -> None:
        """Note what a request has had, over its queue's weight."""
        self._secs[queue] += secs

    def lag_secs(self, queue: Queue) -> float:
        """Return by how much less a queue has had than the active one that had most."""
        return max(self._of_the_active(), default=0.0) - self._secs[queue]

    def _of_the_active(self) -> list[float]:
        return [self._secs[queue] for queue, count in self._active.items() if count]
