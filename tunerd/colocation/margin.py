"""How late those were whose deadlines were promised: what admission leaves from then on.

A promise knows how long segments take, and not how long the host takes for what comes at once. So
what misses its deadline teaches by how much, as a part of the time that it was given: what comes
later and waits for others is to end so much before its own. What was learned loses half of its
weight every few seconds.
"""

from __future__ import annotations

import math

from tunerd.colocation.work import Waiting

_HALF_LIFE_SECS = 5.0  # longer than between two bursts of a second, as they come to servers
_MOST = 0.5


class Margin:
    """One for all members: who is late shows that the host was."""

    def __init__(self) -> None:
        self._needed = 0.0, -math.inf  # and when

    def missed(self, waiting: Waiting, now: float) -> None:
        """Note that a request has ended after its deadline although it was to leave its margin."""
        request = waiting.request
        given_secs = request.deadline_at - request.arrived_at
        late = (now - request.deadline_at) / given_secs if given_secs > 0 else _MOST
        needed = min(_MOST, waiting.margin + late)
        if needed > self.part(now):
            self._needed = needed, now

    def part(self, now: float) -> float:
        """Return which part of its time a request is to leave. Any thread may ask."""
        needed, at = self._needed
        return needed and needed * 0.5 ** ((now - at) / _HALF_LIFE_SECS)
