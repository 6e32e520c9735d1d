"""How long a segment of a member takes on a lane, learned from what it has taken.

What the device says of a segment is what it usually takes. Promises go by how long the lane was not
free for another one: that has in it how late its end is seen, and how late the next one begins.

A launch of a group takes what the kernels take that were compiled for as many requests or for the
next number above, however many are in it: each of these is learned apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from tunerd.colocation.work import Seat

_KEPT = 32  # samples: some, so that one straggler moves nothing, and few, so that changes show
_USUAL = 0.5  # of the samples are at most this long
_LIKELY = 0.9  # the same, where a promise is made
# What was not seen so long is taken for its best again: admission that goes by an estimate would
# else refuse for ever, and never see what refutes it.
_STALE_SECS = 1.0


class _Samples:
    """The last ones."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=_KEPT)
        self._ordered: list[float] = []  # empty where it is not known yet

    def add(self, secs: float) -> None:
        self._kept.append(secs)
        if self._ordered:
            self._ordered = []

    def keep_best(self) -> None:
        self._kept = deque((min(self._kept),), maxlen=_KEPT)

    def at(self, part: float) -> float:
        """Return the one that such a part of the others is not above."""
        if not self._ordered:
            self._ordered = sorted(self._kept)
        return self._ordered[int(part * (len(self._ordered) - 1))]


class _Seen:
    """What a segment has taken. had: its lane, until that was free again."""

    def __init__(self) -> None:
        self.took, self.had = _Samples(), _Samples()
        self.at = -math.inf

    def add(self, secs: float, had_secs: float, now: float) -> None:
        if -math.inf < self.at < now - _STALE_SECS:
            self.took.keep_best()
            self.had.keep_best()
        self.took.add(secs)
        self.had.add(had_secs)
        self.at = now


class Estimates:
    """Seconds by seat and segment. What was never seen takes no time: it must be seen first."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Seat, int, int], _Seen] = {}
        self._counts: dict[Seat, list[int]] = {}

    def compiled_for(self, seat: Seat, counts: Iterable[int]) -> None:
        """Note for how many requests at once there are kernels in a seat; for one, else."""
        self._counts[seat] = sorted(counts)

    def observe(
        self,
        seat: Seat,
        segment: int,
        secs: float,
        *,
        now: float,
        count: int = 1,
        had_secs: float = 0.0,
    ) -> None:
        """Take what a segment of a launch of `count` requests has had of the device.

        had_secs: of its lane; not less than that.
        """
        key = self._key(seat, segment, count)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen()
        seen.add(secs, max(secs, had_secs), now)

    def observe_together(
        self,
        seat: Seat,
        segments: range,
        secs: float,
        *,
        now: float,
        count: int = 1,
        had_secs: float = 0.0,
    ) -> None:
        """Take what segments had together as spread over them as it was expected."""
        if len(segments) == 1:
            self.observe(seat, segments[0], secs, now=now, count=count, had_secs=had_secs)
            return
        expected = [self.secs(seat, segment, now=now) for segment in segments]
        together = math.fsum(expected)
        for segment, one in zip(segments, expected, strict=True):
            part = one / together if together else 1 / len(segments)
            self.observe(seat, segment, secs * part, now=now, had_secs=had_secs * part)

    def secs(self, seat: Seat, segment: int, *, now: float, count: int = 1) -> float:
        """Return what a segment usually takes, of a launch of `count` requests."""
        seen = self._seen.get(self._key(seat, segment, count))
        if seen is None:
            return 0.0
        return seen.took.at(0.0 if now - seen.at > _STALE_SECS else _USUAL)

    def likely_secs(self, seat: Seat, segment: int, *, now: float, count: int = 1) -> float:
        """Return for how much of its lane a segment seldom needs more, for promises."""
        seen = self._seen.get(self._key(seat, segment, count))
        if seen is None:
            return 0.0
        return seen.had.at(0.0 if now - seen.at > _STALE_SECS else _LIKELY)

    def _key(self, seat: Seat, segment: int, count: int) -> tuple[Seat, int, int]:
        counts = self._counts.get(seat)
        if counts is not None:
            count = counts[min(bisect_left(counts, count), len(counts) - 1)]
        return seat, segment, count
