"""When what runs is evicted, and for how long its time does not run."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tunerd.colocation.policies.base import View
from tunerd.colocation.work import Running, Seat

# A member without a limit of its own is evicted after so many times what it takes.
_LIMIT_TIMES, _LEAST_LIMIT_SECS = 100.0, 10.0
# Loading again excuses others for so long at most: who lets nobody be loaded is evicted then. To
# end a client of MPS may take twenty.
_MOST_EXCUSED_SECS = 30.0


class TimeLimits:
    """While seats are loaded again, which may hold up the device, nobody's time runs."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._loading: set[Seat] = set()  # again
        self._since = math.inf

    def load(self, seats: Iterable[Seat]) -> None:
        """Note that seats are loaded again, from now on."""
        if not self._loading:
            self._since = self._view.now
        self._loading |= set(seats)

    def loaded(self, seat: Seat, running: Iterable[Running]) -> None:
        """Note that a seat is loaded, or is not going to be; `running` is what has had less time.

        Of a lane that is the first: the time of what is behind it has not begun.
        """
        self._loading.discard(seat)
        if not self._loading:
            for each in running:
                each.excused_secs += self._excused_secs(each, self._view.now)
            self._since = math.inf

    def evicted_at(self, running: Running) -> float:
        """Return when a segment is evicted if it does not end; at the latest, if others load."""
        excused_secs = running.excused_secs
        if self._loading:
            excused_secs += self._excused_secs(running, math.inf)
        return running.started_at + self.secs(running) + excused_secs

    def secs(self, running: Running) -> float:
        """Return what a segment may take."""
        view = self._view
        limits = [view.members[waiting.request.member].limit_ms for waiting in running.waits]
        known = [limit_ms for limit_ms in limits if limit_ms is not None]
        if len(known) == len(limits):
            return max(known) / 1e3
        if view.now < running.started_at + _LEAST_LIMIT_SECS:
            return _LEAST_LIMIT_SECS  # for now; it is not worth to reckon yet
        lane, count = view.lanes[running.lane], len(running.waits)
        usual = view.left_secs(running.waiting, lane, likely=True, count=count)
        return max(_LEAST_LIMIT_SECS, _LIMIT_TIMES * usual)

    def _excused_secs(self, running: Running, until: float) -> float:
        """Return for how much of its time others are loaded again, up to a moment."""
        ends_at = min(until, self._since + _MOST_EXCUSED_SECS)
        return max(0.0, ends_at - max(self._since, running.started_at))
