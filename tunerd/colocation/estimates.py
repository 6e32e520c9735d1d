"""How long a segment of a member takes on a lane, learned from what it has taken.

A launch of a group takes what the kernels take that were compiled for as many requests or for the
next number above, however many are in it: each of these is learned apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
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
        self._seen: dict[tuple[Seat, int, int], _Seen] = {}
        self._counts: dict[Seat, list[int]] = {}

    def compiled_for(self, seat: Seat, counts: Iterable[int]) -> None:
        """Note for how many requests at once there are kernels in a seat; for one, else."""
        self._counts[seat] = sorted(counts)

    def observe(self, seat: Seat, segment: int, secs: float, *, now: float, count: int = 1) -> None:
        """Take what a segment of a launch of `count` requests has had."""
        key = self._key(seat, segment, count)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen()
        seen.add(secs, now)

    def observe_together(
        self, seat: Seat, segments: range, secs: float, *, now: float, count: int = 1
    ) -> None:
        """Take what segments had together as spread over them as it was expected."""
        if len(segments) == 1:
            self.observe(seat, segments[0], secs, now=now, count=count)
            return
        expected = [self.secs(seat, segment, now=now) for segment in segments]
        together = math.fsum(expected)
        for segment, one in zip(segments, expected, strict=True):
            part = one / together if together else 1 / len(segments)
            self.observe(seat, segment, secs * part, now=now)

    def secs(self, seat: Seat, segment: int, *, now: float, count: int = 1) -> float:
        """Return what a segment usually takes, of a launch of `count` requests."""
        seen = self._seen.get(self._key(seat, segment, count))
        if seen is None:
            return 0.0
        return seen.best if now - seen.at > _STALE_SECS else seen.usual

    def likely_secs(self, seat: Seat, segment: int, *, now: float, count: int = 1) -> float:
        """Return what a segment seldom exceeds, for promises."""
        seen = self._seen.get(self._key(seat, segment, count))
        if seen is None:
            return 0.0
        return seen.best if now - seen.at > _STALE_SECS else seen.likely

    def _key(self, seat: Seat, segment: int, count: int) -> tuple[Seat, int, int]:
        counts = self._counts.get(seat)
        if counts is not None:
            count = counts[min(bisect_left(counts, count), len(counts) - 1)]
        return seat, segment, count
