"""How long requests wait in a lane. No clock, no engine.

A lane that serves one request at a time, in the order of arrival, with Poisson arrivals of several
members that take a fixed time each, is an M/G/1 queue. Its waiting time has an exponential tail,

    P(W > t) ~ C exp(-a t),  a > 0: sum_i rate_i (exp(a secs_i) - 1) = a,
    C = (1 - busy) / (sum_i rate_i secs_i exp(a secs_i) - 1)

(the Cramér-Lundberg approximation: Asmussen, Applied Probability and Queues, 2nd ed., XIII.5), and
P(W > 0) is the lane's utilisation. Launches of several tenants are a queue with bulk service
(Bailey, J. R. Stat. Soc. B 16, 1954): whoever waits goes along with the next launch, as far as
there is room. Several slices with launches of sizes that take different times have no formula; the
queue itself is run, with seeded arrivals. Requests that find no weights on the device
(residency.py) have their lane for longer: they are a stream of their own, by chance and not by what
came before.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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

    def beyond(self, secs: float) -> float:
        """Return which part of the requests waits for longer than this."""
        if secs < 0 or self.busy >= 1:
            return 1.0
        return min(self.busy, self.constant * math.exp(-self.decay * secs))

    def latency(self, part: float, times: Sequence[tuple[float, float]]) -> float:
        """Return within what `part` of requests is answered, in seconds, that take several times.

        times: of each the part of the requests that takes it, and the seconds.
        """
        ends = [self.quantile(part) + secs for _, secs in times]
        low, high = min(ends), max(ends)
        if low == high:
            return high
        for _ in range(_STEPS):
            middle = (low + high) / 2
            over = math.fsum(of * self.beyond(middle - secs) for of, secs in times)
            low, high = (middle, high) if over > 1 - part else (low, middle)
        return high


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


class Latency(Protocol):
    """Latencies of a group's requests."""

    def __call__(self, part: float, cold: float = 0.0) -> float:
        """Return within what `part` of requests is answered, of which `cold` are cold starts."""
        ...


@dataclass(frozen=True)
class Launched:
    """What requests of each group got of slices with launches of several tenants."""

    latency: tuple[Latency, ...]  # of each group, in seconds
    busy: float
    tenants: float  # in a launch, on average


def launches(
    rates: Sequence[float],
    secs_of: Sequence[Sequence[float]],
    *,
    slices: int,
    window_secs: float = 0.0,
    colds: Sequence[tuple[float, float]] = (),
    seed: int = 0,
) -> Launched:
    """Run a queue with bulk service. The last few that were run are kept.

    Args:
        rates: requests per second of each group.
        secs_of: of each group what launches of 1, 2, ... requests take; its length is the most.
        slices: that serve all groups, each one launch at a time.
        window_secs: for which a launch that is not full may wait; added to each latency.
        colds: of each group which part of its requests is a cold start, by chance, and by how many
            seconds each of these makes its launch longer; none if not given.
    """
    of_each = tuple(map(tuple, secs_of))
    starts = tuple(colds) or ((0.0, 0.0),) * len(of_each)
    return _launches(tuple(rates), of_each, slices, window_secs, starts, seed)


@functools.lru_cache(maxsize=64)
def _launches(
    rates: tuple[float, ...],
    secs_of: tuple[tuple[float, ...], ...],
    slices: int,
    window_secs: float,
    colds: tuple[tuple[float, float], ...],
    seed: int,
) -> Launched:
    at_full = math.fsum(
        rate * (secs[-1] / len(secs) + cold * cold_secs)
        for rate, secs, (cold, cold_secs) in zip(rates, secs_of, colds, strict=True)
    )
    if at_full >= slices:
        return Launched(tuple(_endless for _ in rates), at_full / slices, math.nan)
    came, luck = _arrivals(rates, seed)
    is_cold = [of < part for of, (part, _) in zip(luck, colds, strict=True)]
    brings = [of * secs for of, (_, secs) in zip(is_cold, colds, strict=True)]
    ends, counts = _served(
        [each.tolist() for each in came], secs_of, slices, [each.tolist() for each in brings]
    )
    last_at = max(float(each[-1]) for each in came if len(each))
    begun_at = last_at * _WARM_UP / _ARRIVALS
    latencies = []
    for at, end_of, count_of, cold, (_, cold_secs) in zip(
        came, ends, counts, is_cold, colds, strict=True
    ):
        taken = np.repeat(end_of, count_of) - at
        warm, late = taken[(at > begun_at) & ~cold], taken[(at > begun_at) & cold]
        latencies.append(_latency_of(warm, late, cold_secs, window_secs))
    worked = math.fsum(
        secs[count - 1]
        for secs, count_of in zip(secs_of, counts, strict=True)
        for count in count_of
    )
    worked += math.fsum(float(np.sum(each)) for each in brings)
    return Launched(
        tuple(latencies), worked / (last_at * slices), _ARRIVALS / sum(map(len, counts))
    )


def _endless(part: float, cold: float = 0.0) -> float:
    return math.inf


def _latency_of(warm: Floats, late: Floats, cold_secs: float, window_secs: float) -> Latency:
    """Return the latencies of a group.

    Args:
        warm, late: seconds of requests whose weights were there, and of those that were cold.
        cold_secs: of a cold start, where hardly any came.
    """
    if not len(late):
        late = warm + cold_secs
    if not len(warm):
        warm = late
    warm, late = np.sort(warm), np.sort(late)
    both = np.concatenate([warm, late])
    order = np.argsort(both, kind="stable")

    def latency(part: float, cold: float = 0.0) -> float:
        if not len(warm):
            return math.inf
        if not cold:
            return float(warm[min(len(warm) - 1, int(part * len(warm)))]) + window_secs
        weights = np.repeat([(1 - cold) / len(warm), cold / len(late)], [len(warm), len(late)])
        nth = int(np.searchsorted(np.cumsum(weights[order]), part, side="right"))
        return float(both[order[min(len(both) - 1, nth)]]) + window_secs

    return latency


def _served(
    came: Sequence[list[float]],
    secs_of: Sequence[Sequence[float]],
    slices: int,
    brings: Sequence[list[float]],
) -> tuple[list[list[float]], list[list[int]]]:
    """Return when each launch of each group ends, and how many requests it has.

    Whoever has waited for longest is next, and as many of its group as there are and have room.

    Args:
        came: when the requests of each group came, in order.
        brings: by how many seconds each of them makes its launch longer.
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
        end = start + secs_of[group][after - nth - 1] + sum(brings[group][nth:after])
        heapq.heapreplace(free, end)
        ends[group].append(end)
        counts[group].append(after - nth)
        heads[group], at[group] = line[after], after
    return ends, counts


def _arrivals(rates: Sequence[float], seed: int) -> tuple[list[Floats], list[Floats]]:
    """Return when the requests of each group come, in order, and a number from 0 to 1 of each."""
    moments, marks, luck = _drawn(seed)
    edges = np.cumsum(rates)
    group_of = np.searchsorted(edges[:-1], marks * edges[-1], side="right")
    groups = range(len(rates))
    return (
        [moments[group_of == group] / edges[-1] for group in groups],
        [luck[group_of == group] for group in groups],
    )


@functools.cache
def _drawn(seed: int) -> tuple[Floats, Floats, Floats]:
    """Return when requests come of which there is one a second, and two numbers of each by chance.

    By the first it is of a group, by the second a cold start. Each queue that is run has the same
    ones, so that two differ by what serves them alone.
    """
    rng = random.Random(seed)
    gaps = [rng.expovariate(1.0) for _ in range(_ARRIVALS)]
    marks, luck = (np.array([rng.random() for _ in range(_ARRIVALS)]) for _ in range(2))
    return np.cumsum(gaps), marks, luck
