"""How long requests wait in a lane. No clock, no engine.

A lane that serves one request at a time, in the order of arrival, with Poisson arrivals of several
members that take a fixed time each, is an M/G/1 queue. Its waiting time has an exponential tail,

    P(W > t) ~ C exp(-a t),  a > 0: sum_i rate_i (exp(a secs_i) - 1) = a,
    C = (1 - busy) / (sum_i rate_i secs_i exp(a secs_i) - 1)

(the Cramér-Lundberg approximation: Asmussen, Applied Probability and Queues, 2nd ed., XIII.5), and
P(W > 0) is the lane's utilisation. Launches of several tenants are a queue with bulk service
(Bailey, J. R. Stat. Soc. B 16, 1954): whoever waits goes along with the next launch, as far as
there is room. Several slices with launches of sizes that take different times have no formula; the
queue itself is run, with seeded arrivals.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tunerd.stats.interval import Floats

_ARRIVALS = 20_000  # of a queue that is run: 200 lie beyond the 99th percentile
_WARM_UP = 1_000
_STEEPEST = 600.0  # exponents beyond that overflow
_STEPS = 80  # of the bisection


@dataclass(frozen=True)
class Stream:
    """Requests of one member: how many a second, and how long each has the lane."""

    rate: float
    secs: float

    @property
    def busy(self) -> float:
        return self.rate * self.secs


def utilisation(streams: Sequence[Stream]) -> float:
    """Return the part of its time that a lane is busy; 1 and more is more than it can serve."""
    return math.fsum(stream.busy for stream in streams)


@dataclass(frozen=True)
class Wait:
    """The waiting time of a lane: P(W > t) is about constant * exp(-decay * t)."""

    busy: float
    constant: float
    decay: float  # 1 / s

    def quantile(self, part: float) -> float:
        """Return what `part` of the requests wait at most, in seconds; infinite where it grows."""
        if self.busy >= 1:
            return math.inf
        beyond = 1 - part
        if beyond >= self.busy:
            return 0.0
        return max(0.0, math.log(self.constant / beyond) / self.decay)


def wait_of(streams: Sequence[Stream]) -> Wait:
    """Return the waiting time of a lane in which so many streams take turns."""
    busy, longest = utilisation(streams), max(stream.secs for stream in streams)
    if busy >= 1:
        return Wait(busy, 1.0, 0.0)

    def excess(decay: float) -> float:
        return math.fsum(s.rate * math.expm1(decay * s.secs) for s in streams) - decay

    low, high = 0.0, _STEEPEST / longest
    if excess(high) <= 0:  # hardly any request
        return Wait(busy, busy, high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    slope = math.fsum(s.busy * math.exp(high * s.secs) for s in streams) - 1
    return Wait(busy, (1 - busy) / slope, high)


@dataclass(frozen=True)
class Launched:
    """What requests of each group got of slices with launches of several tenants."""

    latency: tuple[Callable[[float], float], ...]  # of each group: quantile -> seconds
    busy: float
    tenants: float  # in a launch, on average


def launches(
    rates: Sequence[float],
    secs_of: Sequence[Sequence[float]],
    *,
    slices: int,
    window_secs: float = 0.0,
    seed: int = 0,
) -> Launched:
    """Run a queue with bulk service. The last few that were run are kept.

    Args:
        rates: requests per second of each group.
        secs_of: of each group what launches of 1, 2, ... requests take; its length is the most.
        slices: that serve all groups, each one launch at a time.
        window_secs: for which a launch that is not full may wait; added to each latency.
    """
    return _launches(tuple(rates), tuple(map(tuple, secs_of)), slices, window_secs, seed)


@functools.lru_cache(maxsize=64)
def _launches(
    rates: tuple[float, ...],
    secs_of: tuple[tuple[float, ...], ...],
    slices: int,
    window_secs: float,
    seed: int,
) -> Launched:
    at_full = math.fsum(
        rate * secs[-1] / len(secs) for rate, secs in zip(rates, secs_of, strict=True)
    )
    if at_full >= slices:
        return Launched(tuple((lambda part: math.inf) for _ in rates), at_full / slices, math.nan)
    came = _arrivals(rates, seed)
    ends, counts = _served([each.tolist() for each in came], secs_of, slices)
    last_at = max(float(each[-1]) for each in came if len(each))
    begun_at = last_at * _WARM_UP / _ARRIVALS
    latencies = []
    for at, end_of, count_of in zip(came, ends, counts, strict=True):
        taken = np.repeat(end_of, count_of) - at
        latencies.append(np.sort(taken[at > begun_at]))
    worked = math.fsum(
        secs[count - 1]
        for secs, count_of in zip(secs_of, counts, strict=True)
        for count in count_of
    )

    def quantile_of(values: Floats) -> Callable[[float], float]:
        if not len(values):
            return lambda part: math.inf
        return lambda part: (
            float(values[min(len(values) - 1, int(part * len(values)))]) + (window_secs)
        )

    return Launched(
        tuple(map(quantile_of, latencies)),
        worked / (last_at * slices),
        _ARRIVALS / sum(map(len, counts)),
    )


def _served(
    came: Sequence[list[float]], secs_of: Sequence[Sequence[float]], slices: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Return when each launch of each group ends, and how many requests it has.

    Whoever has waited for longest is next, and as many of its group as there are and have room.

    came: when the requests of each group came, in order.
    """
    ends: list[list[float]] = [[] for _ in came]
    counts: list[list[int]] = [[] for _ in came]
    lines = [[*line, math.inf] for line in came]
    lasts = [len(line) for line in came]
    most = [len(secs) for secs in secs_of]
    heads, at = [line[0] for line in lines], [0] * len(lines)
    free = [0.0] * slices
    while (first := min(heads)) < math.inf:
        group = heads.index(first)
        start, line, nth = max(free[0], first), lines[group], at[group]
        after = bisect_right(line, start, nth + 1, min(nth + most[group], lasts[group]))
        end = start + secs_of[group][after - nth - 1]
        heapq.heapreplace(free, end)
        ends[group].append(end)
        counts[group].append(after - nth)
        heads[group], at[group] = line[after], after
    return ends, counts


def _arrivals(rates: Sequence[float], seed: int) -> list[Floats]:
    """Return when the requests of each group come, in order."""
    moments, marks = _drawn(seed)
    edges = np.cumsum(rates)
    group_of = np.searchsorted(edges[:-1], marks * edges[-1], side="right")
    return [moments[group_of == group] / edges[-1] for group in range(len(rates))]


@functools.cache
def _drawn(seed: int) -> tuple[Floats, Floats]:
    """Return when requests come of which there is one a second, and of each which it is, by chance.

    Each queue that is run has the same ones, so that two differ by what serves them alone.
    """
    rng = random.Random(seed)
    gaps = [rng.expovariate(1.0) for _ in range(_ARRIVALS)]
    return np.cumsum(gaps), np.array([rng.random() for _ in range(_ARRIVALS)])
