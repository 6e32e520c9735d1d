"""How long a segment of a member takes on a lane, learned from what it has taken."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from tunerd.colocation.work import Seat

_KEPT = 32  # samples: some, so that one straggler moves nothing, and few, so that changes show
_LIKELY = 0.9  # of the samples are at most this long, where a promise is made
# What was not seen so long is taken for its best again: admission that goes by an estimate would
# else refuse for ever, and never see what refutes it.
_STALE_SECS = 1.0


@dataclass
class _Seen:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    at: float = 0.0
    _ordered: list[float] = field(default_factory=list)  # empty where it is not known yet

    def add(self, secs: float, now: float) -> None:
        if now - self.at > _STALE_SECS and self.samples:
            best = self.best
            self.samples.clear()
            self.samples.append(best)
        self.samples.append(secs)
        self.at = now
        self._ordered = []

    @property
    def best(self) -> float:
        return self._in_order()[0]

    @property
    def usual(self) -> float:
        return self._in_order()[(len(self.samples) - 1) // 2]

    @property
    def likely(self) -> float:
        ordered = self._in_order()
        return ordered[int(_LIKELY * (len(ordered) - 1))]

    def _in_order(self) -> list[float]:
        if not self._ordered:
            self._ordered = sorted(self.samples)
        return self._ordered


class Estimates:
    """Seconds by seat and segment. What was never seen takes no time: it must be seen first."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Seat, int], _Seen] = {}

    def observe(self, seat: Seat, segment: int, secs: float, *, now: float) -> None:
        self._seen.setdefault((seat, segment), _Seen()).add(secs, now)

    def observe_together(self, seat: Seat, segments: range, secs: float, *, now: float) -> None:
        """Take what segments had together as spread over them as it was expected."""
        if len(segments) == 1:
            self.observe(seat, segments[0], secs, now=now)
            return
        expected = [self.secs(seat, segment, now=now) for segment in segments]
        together = math.fsum(expected)
        for segment, one in zip(segments, expected, strict=True):
            part = one / together if together else 1 / len(segments)
            self.observe(seat, segment, secs * part, now=now)

    def secs(self, seat: Seat, segment: int, *, now: float) -> float:
        """Return what a segment usually takes."""
        seen = self._seen.get((seat, segment))
        if seen is None:
            return 0.0
        return seen.best if now - seen.at > _STALE_SECS else seen.usual

    def likely_secs(self, seat: Seat, segment: int, *, now: float) -> float:
        """Return what a segment seldom exceeds, for promises."""
        seen = self._seen.get((seat, segment))
        if seen is None:
            return 0.0
        return seen.best if now - seen.at > _STALE_SECS else seen.likely
