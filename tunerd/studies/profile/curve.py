"""Visits to slices of several shares -> a curve with intervals, its knee, a share for a latency.

No files, no slices, no clock.

The knee of a model is the smallest share at which one inference takes at most `loss` longer than
on the whole device, each alone. The word is that of D-STACK (Dhakal et al., arXiv 2304.13541),
which calls the GPU percentage that is right for a model its Knee and estimates it by a model of the
parallelism that the network can use; GSLICE (Dhakal et al., SoCC 2020) before it learns how much of
a GPU a model needs for its latency while it serves. Ours is neither: it is a plain threshold on
measured latencies, with the loss that somebody states. It can be checked, depends on no fitted
curve, and moves with the loss: at another loss, or by their definitions, it is another share. Only
SMs (or cores) are cut: caches and memory bandwidth are whole in every measurement, and are not when
neighbours come.

A round visits every share once, in an order of its own. The figures of a share are means of its
rounds' logarithms, and intervals are Student's t over rounds, 95%, each share by itself: what a
process got for its life, and what a clock or a neighbour did meanwhile, differ between rounds and
not within one. Shares are compared round by round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tunerd.stats.rounds import mean_over_rounds
from tunerd.vocabulary.verdict import Answer, Interval, Verdict

TAIL = 95  # the percentile of a round that has to meet a latency


@dataclass(frozen=True)
class Visit:
    """What one slice did in one round: every inference of a batch, one after the other."""

    round: int
    pct: int  # asked
    sm_count: int  # obtained; cores on CPUs
    batch: int
    run_secs: tuple[float, ...]
    worked_secs: float  # from the first's start to the last's end

    def __post_init__(self) -> None:
        secs = (*self.run_secs, self.worked_secs)
        if not self.run_secs or not all(0 < s < math.inf for s in secs):
            raise ValueError(f"a visit at {self.pct}% holds no times, or one that is none")
        if min(self.sm_count, self.batch) < 1:
            raise ValueError(f"a visit at {self.pct}% has no SMs or cores, or no batch")


@dataclass(frozen=True)
class Point:
    """A batch at one number of SMs."""

    sm_count: int
    pcts: tuple[int, ...]  # that obtained it, the smallest first
    rounds: int
    samples: int
    latency: Interval  # medians of rounds
    tail: Interval  # 95th percentiles of rounds; of fewer than 20 inferences the slowest
    per_sec: float  # inputs, of one client that waits for each answer
    slowdown: Interval  # latency over the whole device's, of the same rounds

    @property
    def pct(self) -> int:
        return self.pcts[0]


@dataclass(frozen=True)
class Curve:
    """A batch over shares, the fewest SMs first; the last is the whole device."""

    batch: int
    points: tuple[Point, ...]

    @property
    def full(self) -> Point:
        return self.points[-1]


# How sure it is which share is the smallest that is good enough: "at most" where the smallest that
# was measured is, "none" where not even the whole device is.
Found = Literal["found", "at most", "cannot tell", "none"]


@dataclass(frozen=True)
class SmallestShare:
    """The smallest share that is good enough.

    `safe` is the smallest of those that are, with all larger ones; None where even the whole device
    is not known to be. `least` is the smallest that may be; the same share unless it cannot be
    told, and None where none can be.
    """

    found: Found
    safe: Point | None
    least: Point | None


def curves(visits: Iterable[Visit], aliases: Iterable[tuple[int, int]] = ()) -> tuple[Curve, ...]:
    """Return a curve for each batch; ValueError where the visits hold no two comparable shares.

    aliases: shares and the SMs that they obtained, also of shares that were not visited because
    another one obtains as many.
    """
    found = list(visits)
    pcts: dict[int, set[int]] = {}
    for pct, sm_count in (*((v.pct, v.sm_count) for v in found), *aliases):
        pcts.setdefault(sm_count, set()).add(pct)
    return tuple(
        _curve(batch, [v for v in found if v.batch == batch], pcts)
        for batch in sorted({v.batch for v in found})
    )


def whole_rounds(visits: Iterable[Visit]) -> int:
    """Return how many rounds, from the first on, lack no visit that another round has."""
    rounds: dict[int, set[tuple[int, int]]] = {}
    for visit in visits:
        rounds.setdefault(visit.round, set()).add((visit.sm_count, visit.batch))
    everything = set[tuple[int, int]]().union(*rounds.values())
    number = 0
    while rounds.get(number + 1) == everything:
        number += 1
    return number


def knee(curve: Curve, loss: float) -> SmallestShare:
    """Return the smallest share at which an inference takes at most 1 + `loss` of the whole's."""
    if not 0 < loss < math.inf:
        raise ValueError(f"the loss is {loss}; it is above 0")
    return _smallest(curve, lambda point: point.slowdown.is_within(1 + loss))


def share_for(curve: Curve, slo_secs: float) -> SmallestShare:
    """Return the smallest share at which 95 of 100 inferences take at most `slo_secs`."""
    if not 0 < slo_secs < math.inf:
        raise ValueError(f"the latency to meet is {slo_secs} s; it is above 0")
    return _smallest(curve, lambda point: meets(point, slo_secs))


def meets(point: Point, slo_secs: float) -> Answer:
    """Say whether 95 of 100 inferences take at most `slo_secs` at a share."""
    return point.tail.is_within(slo_secs)


def estimate(values: Sequence[float]) -> Interval:
    """Return the geometric mean of one positive value for each round, with its interval."""
    return mean_over_rounds(np.log(np.asarray(values, dtype=np.float64)))


def _curve(batch: int, visits: Sequence[Visit], pcts: dict[int, set[int]]) -> Curve:
    counts = sorted({v.sm_count for v in visits})
    full = {v.round: _median(v) for v in visits if v.sm_count == counts[-1]}
    points = []
    for count in counts:
        here = {v.round: v for v in visits if v.sm_count == count}  # the last of a round
        shared = sorted(here.keys() & full.keys())
        if not shared:
            raise ValueError(f"{count} SMs and the whole device have no round in common")
        ratios = [_median(here[r]) / full[r] for r in shared]
        rounds = list(here.values())
        points.append(
            Point(
                sm_count=count,
                pcts=tuple(sorted(pcts[count])),
                rounds=len(rounds),
                samples=sum(len(v.run_secs) for v in rounds),
                latency=estimate([_median(v) for v in rounds]),
                tail=estimate([_tail(v) for v in rounds]),
                per_sec=batch
                * sum(len(v.run_secs) for v in rounds)
                / sum(v.worked_secs for v in rounds),
                slowdown=estimate(ratios) if count != counts[-1] else Interval(1.0, 1.0, 1.0),
            )
        )
    return Curve(batch, tuple(points))


def _median(visit: Visit) -> float:
    return float(np.median(visit.run_secs))


def _tail(visit: Visit) -> float:
    return float(np.percentile(visit.run_secs, TAIL, method="higher"))


def _smallest(curve: Curve, fits: Callable[[Point], Answer]) -> SmallestShare:
    """Walk from the whole device down to the first share that is not good enough."""
    safe: Point | None = None
    least: Point | None = None
    is_sure = True
    for point in reversed(curve.points):
        answer = fits(point)
        if answer is Verdict.NO:
            break
        is_sure = is_sure and answer is Verdict.YES
        least = point
        if is_sure:
            safe = point
    else:
        return SmallestShare("at most" if is_sure else "cannot tell", safe, least)
    if least is None:
        return SmallestShare("none", None, None)
    return SmallestShare("found" if is_sure else "cannot tell", safe, least)
