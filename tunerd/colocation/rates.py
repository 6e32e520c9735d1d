"""How soon the next request of a group comes, by when the last ones came."""

from __future__ import annotations

import math
from collections import deque

_KEPT = 9  # arrivals: eight gaps, few, so that the begin and the end of a burst show


class Rates:
    def __init__(self) -> None:
        self._arrivals: dict[str, deque[float]] = {}

    def note(self, name: str, now: float) -> None:
        self._arrivals.setdefault(name, deque(maxlen=_KEPT)).append(now)

    def gap_secs(self, name: str, now: float) -> float:
        """Return the mean gap, the one since the last arrival among them if that makes it longer.

        Infinite where it is not known yet.
        """
        arrivals = self._arrivals.get(name)
        if arrivals is None or len(arrivals) < _KEPT:
            return math.inf
        gaps = _KEPT - 1
        return max((arrivals[-1] - arrivals[0]) / gaps, (now - arrivals[0]) / (gaps + 1))
