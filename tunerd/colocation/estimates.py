"""How long a segment of a member takes on a lane, learned from what it has taken."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.colocation.work import Seat

_GAIN, _SPREAD_GAIN = 1 / 8, 1 / 4  # as TCP smooths round trips (RFC 6298, section 2.3)
_SPREADS = 2.0  # added to the mean where a promise is made


@dataclass
class _Smoothed:
    secs: float
    spread_secs: float

    def observe(self, secs: float) -> None:
        self.spread_secs += _SPREAD_GAIN * (abs(secs - self.secs) - self.spread_secs)
        self.secs += _GAIN * (secs - self.secs)


class Estimates:
    """Seconds by seat and segment. What was never seen takes no time: it must be seen first."""

    def __init__(self) -> None:
        self._known: dict[tuple[Seat, int], _Smoothed] = {}

    def observe(self, seat: Seat, segment: int, secs: float) -> None:
        known = self._known.get((seat, segment))
        if known is None:
            self._known[seat, segment] = _Smoothed(secs, 0.0)
        else:
            known.observe(secs)

    def secs(self, seat: Seat, segment: int) -> float:
        known = self._known.get((seat, segment))
        return 0.0 if known is None else known.secs

    def likely_secs(self, seat: Seat, segment: int) -> float:
        """Return what a segment seldom exceeds, for promises."""
        known = self._known.get((seat, segment))
        return 0.0 if known is None else known.secs + _SPREADS * known.spread_secs
