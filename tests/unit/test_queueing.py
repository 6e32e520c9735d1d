"""How long requests wait in a queue, by formula and as it is run."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from tunerd.colocation.planning.queueing import Stream, launches, wait_of


def simulated(streams: list[Stream], part: float, *, seed: int = 1) -> float:
    """Return what `part` of the requests wait at most, of a queue that is run."""
    rng = random.Random(seed)
    total = sum(s.rate for s in streams)
    now = free = 0.0
    waits = []
    for _ in range(100_000):
        now += rng.expovariate(total)
        secs = rng.choices(streams, [s.rate for s in streams])[0].secs
        waits.append(max(0.0, free - now))
        free = max(free, now) + secs
    return float(np.quantile(waits, part))


@pytest.mark.parametrize(
    "streams",
    [
        [Stream(30, 0.01)],
        [Stream(60, 0.01)],
        [Stream(90, 0.01)],
        [Stream(20, 0.01), Stream(300, 0.001)],
        [Stream(5, 0.1), Stream(30, 0.01)],
    ],
)
def test_a_waiting_time_is_that_of_the_queue(streams: list[Stream]) -> None:
    wait = wait_of(streams)
    longest = max(s.secs for s in streams)
    for part in (0.9, 0.95, 0.99):
        assert wait.quantile(part) == pytest.approx(
            simulated(streams, part), rel=0.1, abs=0.15 * longest
        )


def test_an_idle_lane_has_no_wait_and_one_that_is_overloaded_no_end_of_it() -> None:
    assert wait_of([Stream(0.001, 0.01)]).quantile(0.99) == 0
    assert wait_of([Stream(101, 0.01)]).quantile(0.5) == math.inf


def test_launches_of_one_request_are_the_queue_of_a_lane() -> None:
    ran = launches([60], [[0.01]], slices=1)
    assert ran.busy == pytest.approx(0.6, rel=0.05)
    assert ran.latency[0](0.99) == pytest.approx(
        wait_of([Stream(60, 0.01)]).quantile(0.99) + 0.01, rel=0.15
    )


def test_launches_of_several_serve_what_one_after_another_cannot() -> None:
    secs = [0.010, 0.011, 0.012, 0.013]
    assert launches([200], [secs[:1]], slices=1).latency[0](0.5) == math.inf
    ran = launches([200], [secs], slices=1)
    assert 1 < ran.tenants < 4
    assert ran.latency[0](0.99) < 4 * secs[-1]
    assert launches([200], [secs], slices=2).latency[0](0.99) < ran.latency[0](0.99)


def test_launches_of_two_groups_are_the_queue_of_their_slices() -> None:
    """As a queue is run that looks at everyone who waits, for each slice that is free."""
    rates, secs_of, slices = [120.0, 30.0], [[0.010, 0.014, 0.014], [0.020]], 2
    rng, now, arrivals = random.Random(5), 0.0, []
    for _ in range(60_000):
        now += rng.expovariate(sum(rates))
        arrivals.append((now, rng.choices((0, 1), rates)[0]))
    free, latencies = [0.0] * slices, {0: list[float](), 1: list[float]()}
    waiting, coming = {0: list[float](), 1: list[float]()}, 0
    while coming < len(arrivals) or any(waiting.values()):
        start = min(free)
        free.remove(start)
        if not any(waiting.values()):
            start = max(start, arrivals[coming][0])
        while coming < len(arrivals) and arrivals[coming][0] <= start:
            waiting[arrivals[coming][1]].append(arrivals[coming][0])
            coming += 1
        group = min((g for g in waiting if waiting[g]), key=lambda g: waiting[g][0])
        taken = waiting[group][: len(secs_of[group])]
        del waiting[group][: len(taken)]
        end = start + secs_of[group][len(taken) - 1]
        latencies[group] += [end - at for at in taken]
        free.append(end)
    ran = launches(rates, secs_of, slices=slices)
    for group, part in itertools.product(latencies, (0.5, 0.9, 0.99)):
        expected = float(np.quantile(latencies[group], part))
        assert ran.latency[group](part) == pytest.approx(expected, rel=0.1)


def test_a_model_that_is_seldom_asked_has_a_latency_beside_a_busy_one() -> None:
    ran = launches([2000.0, 2.0], [[0.0002], [0.001]], slices=1)
    assert 0.001 <= ran.latency[1](0.99) < 0.01
