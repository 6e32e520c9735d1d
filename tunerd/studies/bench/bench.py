"""Repeats in slices -> how fast an artifact is, alone and beside neighbours. No slices, no clock.

A round lets some slices work between the same two moments. Only its window counts: the time in
which all of them worked, from the last one's first repeat to the first one's last. Rounds alone
and beside neighbours take turns, so that a clock that changes changes both.

Each request follows the one before: one is under way at any time (a closed loop). The throughput is
therefore what one client that waits for each answer gets, not what a queue of requests would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tunerd.runner.load import Repeats
from tunerd.stats.paired import compare
from tunerd.stats.tail import PERCENTILES, percentiles_of
from tunerd.vocabulary.outcome import Comparison


class Condition(StrEnum):
    ALONE = "alone"
    BESIDE = "beside"
    NEIGHBOUR = "neighbour"  # the other slice alone


@dataclass(frozen=True)
class Round:
    """What ran at once: replicas of the artifact, and others. A neighbour alone has no replicas."""

    condition: Condition
    replicas: tuple[Repeats, ...]
    others: tuple[Repeats, ...] = ()

    @property
    def window(self) -> tuple[float, float]:
        """The time in which all worked; ValueError where there was none."""
        everybody = (*self.replicas, *self.others)
        idle = [r.slice_id for r in everybody if not r.starts]
        if idle:
            raise ValueError(f"{', '.join(idle)} did not work in a round")
        first, last = max(r.starts[0] for r in everybody), min(r.ends[-1] for r in everybody)
        if first >= last:
            raise ValueError("the slices did not work at the same time in a round")
        return first, last

    @property
    def problem(self) -> str:
        """Say why the round tells nothing; "" where it does."""
        try:
            counted = self.replicas or self.others
            empty = [r.slice_id for r in counted if not self.trimmed(r).starts]
        except ValueError as error:
            return str(error)
        if empty:
            return f"{', '.join(empty)} ended no inference while all slices worked"
        return ""

    def trimmed(self, ran: Repeats) -> Repeats:
        """Return the repeats of a slice that lie in the window."""
        first, last = self.window
        pairs = zip(ran.starts, ran.ends, strict=True)
        kept = [(s, e) for s, e in pairs if s >= first and e <= last]
        starts, ends = (tuple(pair[i] for pair in kept) for i in (0, 1))
        return Repeats(ran.slice_id, starts, ends, ran.calls)


@dataclass(frozen=True)
class Speed:
    """How fast one slice was under one condition. None: too few samples to tell."""

    slice_id: str
    samples: int
    p50_secs: float | None
    p95_secs: float | None
    p99_secs: float | None
    per_sec: float | None  # calls, while it worked

    @property
    def percentiles(self) -> tuple[tuple[int, float | None], ...]:
        values = (self.p50_secs, self.p95_secs, self.p99_secs)
        return tuple(zip(PERCENTILES, values, strict=True))


@dataclass(frozen=True)
class Side:
    """All slices under one condition."""

    condition: Condition
    rounds: int
    window_secs: float  # of all rounds together
    replicas: tuple[Speed, ...]
    others: tuple[Speed, ...]

    @property
    def per_sec(self) -> float | None:
        """Return the throughput of all replicas together."""
        known = [r.per_sec for r in self.replicas if r.per_sec is not None]
        return sum(known) if len(known) == len(self.replicas) else None

    @property
    def spread(self) -> float | None:
        """Return by how much the slowest replica's median is over the fastest's; 0.1 is 10%."""
        known = [r.p50_secs for r in self.replicas if r.p50_secs is not None]
        if len(known) < max(2, len(self.replicas)):
            return None
        return max(known) / min(known) - 1


@dataclass(frozen=True)
class Bench:
    """An artifact's speed alone, and beside neighbours where there were any.

    `slowdown` compares the first replica's medians of the rounds: its ratio is beside over alone,
    above 1 where neighbours cost time. `neighbour_slowdown` is the same of the only neighbour; None
    where it was not measured alone, or ended nothing in a round beside.
    """

    alone: Side
    beside: Side | None
    slowdown: Comparison | None
    neighbour: Side | None = None
    neighbour_slowdown: Comparison | None = None


def summarize(rounds: Sequence[Round]) -> Bench:
    """Sum up rounds; ValueError where one has a problem."""
    if problems := [r.problem for r in rounds if r.problem]:
        raise ValueError(problems[0])
    alone = [r for r in rounds if r.condition is Condition.ALONE]
    beside = [r for r in rounds if r.condition is Condition.BESIDE]
    apart = [r for r in rounds if r.condition is Condition.NEIGHBOUR]
    slowdown = neighbour_slowdown = None
    if beside:
        slowdown = compare(
            _medians([r.trimmed(r.replicas[0]) for r in beside]),
            _medians([r.trimmed(r.replicas[0]) for r in alone]),
        )
    if beside and apart:
        others = [r.trimmed(r.others[0]) for r in beside]
        if all(each.starts for each in others):
            of_alone = _medians([r.trimmed(r.others[0]) for r in apart])
            neighbour_slowdown = compare(_medians(others), of_alone)
    return Bench(
        alone=_side(Condition.ALONE, alone),
        beside=_side(Condition.BESIDE, beside) if beside else None,
        slowdown=slowdown,
        neighbour=_side(Condition.NEIGHBOUR, apart) if apart else None,
        neighbour_slowdown=neighbour_slowdown,
    )


def _medians(rans: Sequence[Repeats]) -> list[float]:
    return [float(np.median(ran.secs)) for ran in rans]


def _side(condition: Condition, rounds: Sequence[Round]) -> Side:
    replicas = zip(*([r.trimmed(x) for x in r.replicas] for r in rounds), strict=True)
    others = zip(*([r.trimmed(x) for x in r.others] for r in rounds), strict=True)
    windows = [r.window for r in rounds]
    return Side(
        condition=condition,
        rounds=len(rounds),
        window_secs=sum(last - first for first, last in windows),
        replicas=tuple(_speed(rans) for rans in replicas),
        others=tuple(_speed(rans) for rans in others),
    )


def _speed(rans: Sequence[Repeats]) -> Speed:
    """Sum up one slice's rounds."""
    secs = [s for ran in rans for s in ran.secs]
    worked_secs = sum(ran.ends[-1] - ran.starts[0] for ran in rans if ran.starts)
    p50, p95, p99 = percentiles_of(secs)
    per_sec = rans[0].calls * len(secs) / worked_secs if worked_secs else None
    return Speed(rans[0].slice_id, len(secs), p50, p95, p99, per_sec)
