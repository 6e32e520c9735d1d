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

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """Run a queue with bulk service.

    Args:
        rates: requests per second of each group.
        secs_of: of each group what launches of 1, 2, ... requests take; its length is the most.
        slices: that serve all groups, each one launch at a time.
        window_secs: for which a launch that is not full may wait; added to each latency.
    """
    groups = range(len(rates))
    latencies: list[list[float]] = [[] for _ in groups]
    at_full = math.fsum(rates[g] * secs_of[g][-1] / len(secs_of[g]) for g in groups)
    if at_full >= slices:
        return Launched(tuple((lambda part: math.inf) for _ in groups), at_full / slices, math.nan)
    rng = random.Random(seed)
    total, now = math.fsum(rates), 0.0
    free = [0.0] * slices
    waiting: list[deque[float]] = [deque() for _ in groups]
    arrivals: list[tuple[float, int]] = []
    for _ in range(_ARRIVALS):
        now += rng.expovariate(total)
        arrivals.append((now, rng.choices(groups, rates)[0]))
    worked = 0.0
    done = launched = 0
    coming = 0
    while done < len(arrivals):
        start = heapq.heappop(free)
        if not any(waiting):
            start = max(start, arrivals[coming][0])
        while coming < len(arrivals) and arrivals[coming][0] <= start:
            waiting[arrivals[coming][1]].append(arrivals[coming][0])
            coming += 1
        group = min((g for g in groups if waiting[g]), key=lambda g: waiting[g][0])
        taken = min(len(waiting[group]), len(secs_of[group]))
        secs = secs_of[group][taken - 1]
        for _ in range(taken):
            latencies[group].append(start + secs - waiting[group].popleft())
        worked, done, launched = worked + secs, done + taken, launched + 1
        heapq.heappush(free, start + secs)
    ordered = [sorted(each[_WARM_UP // len(rates) :]) or [math.inf] for each in latencies]

    def quantile_of(values: list[float]) -> Callable[[float], float]:
        return lambda part: values[min(len(values) - 1, int(part * len(values)))] + window_secs

    return Launched(
        tuple(map(quantile_of, ordered)), worked / (now * slices), len(arrivals) / launched
    )
