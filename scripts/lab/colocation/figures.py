"""Samples that were taken in turns -> rates, ratios with intervals, and answers. No GPU, no clock.

A turn samples every contender once, in an order that is turned round each time; two contenders
are compared turn by turn, so that what drifts, as clocks do, hits both.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from tunerd.stats.interval import CONFIDENCE, RESAMPLES, percentiles
from tunerd.vocabulary.verdict import Interval

Samples = Mapping[str, Sequence[float]]  # of each contender one a turn


def ratio(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median of the turns' ratios with its interval, by redrawing turns.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    Interval(value=2.0, low=2.0, high=2.0)
    """
    pairs = np.asarray(above, dtype=float) / np.asarray(below, dtype=float)
    rows = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    low, high = percentiles(np.median(pairs[rows], axis=1), CONFIDENCE)
    return Interval(float(np.median(pairs)), low, high)


def ratio_text(found: Interval) -> str:
    """Return a ratio with its interval in short.

    >>> ratio_text(Interval(1.5, 1.4, 1.612))
    '1.50 (1.40 to 1.61)'
    """
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def best(samples: Samples, labels: Sequence[str]) -> str:
    """Return which of some contenders has the highest median."""
    return max(labels, key=lambda label: statistics.median(samples[label]))


def within(ends: Sequence[tuple[float, int]], first: float, last: float) -> float:
    """Return how much was done per second between two moments.

    ends: moments at which something had ended, in order, each with how much had been done in all.
    Between two of them it counts as done evenly. Raises ValueError where they do not span the
    moments.

    >>> within([(0.0, 0), (1.0, 10), (2.0, 30)], 0.5, 1.5)
    15.0
    """
    moments = [at for at, _ in ends]
    if len(moments) < 2 or moments[0] > first or moments[-1] < last:
        raise ValueError("it was not busy from the first to the last moment")
    done = np.interp([first, last], moments, [count for _, count in ends])
    return float((done[1] - done[0]) / (last - first))


def p99_ms(latencies_us: Sequence[float]) -> float | None:
    """Return the 99th percentile in milliseconds; None with fewer than 500 samples."""
    return float(np.percentile(latencies_us, 99)) / 1e3 if len(latencies_us) >= 500 else None
