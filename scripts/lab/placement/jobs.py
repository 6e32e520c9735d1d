"""A trace of jobs from a seed, and what is measured of its kinds before: the shape, not the data.

Arrivals in bursts and durations over orders of magnitude are what Jeon et al. found in Philly
("Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads", ATC 2019). The
distributions taken for that here, and all of their parameters, are ours: bursts of a geometric
size at the moments of a Poisson process, and log-normal durations.
"""

from __future__ import annotations

import math
import random
from itertools import combinations_with_replacement

from lab.placement.simulation import Truth, slowdown
from tunerd.colocation.placement.values import Device, Job
from tunerd.colocation.planning.estimates import SlowdownModel
from tunerd.colocation.planning.pairs import Pair, Pairs, Side
from tunerd.vocabulary.verdict import Interval

GIB = 1 << 30
UNITS = 132  # SMs of an H100
DEVICES = tuple(Device(f"gpu-{nth}", 80 * GIB, UNITS) for nth in range(4))
JOBS = 60
BURST = 4  # jobs, in the mean
BETWEEN_SECS, WITHIN_SECS = 900.0, 20.0  # of bursts and of jobs of a burst, in the mean
MEDIAN_SECS, SIGMA = 900.0, 1.2  # of durations
LEAST_SECS, MOST_SECS = 60.0, 4 * 3600.0
WRONG_PART = 0.15  # of the jobs hold more than was said, by a factor
WRONG_LOW, WRONG_HIGH = 1.2, 1.8
SHOWS_LOW_SECS, SHOWS_HIGH_SECS = 20.0, 55.0  # until a job holds all of its memory
MEASURED_PAIRS = 20  # of the 28 of the kinds that were ever measured
_NOISE = 0.01  # of a measured slowdown

# The parts of a device's units and bandwidth that a kind keeps busy alone, and GiB. Made up.
KINDS = {
    "small convolutions": (0.30, 0.25, 6),
    "large convolutions": (0.65, 0.55, 22),
    "mobile": (0.20, 0.30, 5),
    "encoder": (0.75, 0.45, 28),
    "decoder": (0.55, 0.80, 40),
    "detector": (0.45, 0.40, 16),
    "tuning run": (0.35, 0.20, 8),
    "recommender": (0.15, 0.70, 34),
}
UNSEEN = "recommender"  # of it no pair was measured, and it lies outside of those that were


def trace(seed: int, *, count: int = JOBS, between_secs: float = BETWEEN_SECS) -> list[Truth]:
    """Return jobs in the order of arrival; the first comes at 0."""
    draw = random.Random(seed)
    jobs: list[Truth] = []
    burst_at = 0.0
    while len(jobs) < count:
        at = burst_at
        while len(jobs) < count:
            jobs.append(_job(draw, len(jobs), at))
            if draw.random() < 1 / BURST:
                break
            at += draw.expovariate(1 / WITHIN_SECS)
        burst_at = at + draw.expovariate(1 / between_secs)
    return jobs


def _job(draw: random.Random, number: int, at: float) -> Truth:
    kind = draw.choice(list(KINDS))
    secs = draw.lognormvariate(math.log(MEDIAN_SECS), SIGMA)
    is_wrong = draw.random() < WRONG_PART
    factor = draw.uniform(WRONG_LOW, WRONG_HIGH) if is_wrong else draw.uniform(0.8, 1.0)
    truth = of_kind(kind)
    return Truth(
        Job(f"{number:02d} {kind}", truth.job.memory_bytes, truth.job.units, truth.job.side),
        at,
        min(max(secs, LEAST_SECS), MOST_SECS),
        int(truth.memory_bytes * factor),
        draw.uniform(SHOWS_LOW_SECS, SHOWS_HIGH_SECS),
        truth.compute,
        truth.bandwidth,
    )


def of_kind(kind: str) -> Truth:
    compute, bandwidth, gib = KINDS[kind]
    side = Side(kind, kind, 100, {"compute": compute, "bandwidth": bandwidth})
    job = Job(kind, gib * GIB, compute * UNITS, side)
    return Truth(job, 0.0, 1.0, gib * GIB, 0.0, compute, bandwidth)


def measured(seed: int) -> Pairs:
    """Return what is known of slowdowns: some pairs with noise, and the model that they teach."""
    draw = random.Random(seed)
    known = [of_kind(kind) for kind in KINDS if kind != UNSEEN]
    chosen = draw.sample(list(combinations_with_replacement(known, 2)), MEASURED_PAIRS)
    pairs = []
    for one, two in chosen:
        for of, beside in [(one, two)] if one is two else [(one, two), (two, one)]:
            value = slowdown(of, [beside]) * math.exp(draw.gauss(0.0, _NOISE))
            assert of.job.side is not None
            assert beside.job.side is not None
            interval = Interval(value, value * (1 - _NOISE), value * (1 + _NOISE))
            pairs.append(Pair(of.job.side, beside.job.side, "simulated", interval, "simulated"))
    return Pairs(pairs, "simulated", model=SlowdownModel(pairs))
