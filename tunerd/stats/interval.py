"""Samples of one side -> the interval of their median, and what the other intervals are made with.

The values themselves, `Interval` and `Verdict`, are in `tunerd.vocabulary.verdict`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tunerd.vocabulary.verdict import Interval

CONFIDENCE = 0.95
MIN_SAMPLES = 5  # of a side: fewer tell nothing
RESAMPLES = 4000

Floats = npt.NDArray[np.float64]


def median_interval(samples: Sequence[float]) -> Interval | None:
    """Return the median of samples with its interval; None where there are none.

    It runs between two order statistics, and assumes no distribution: below the k-th of n samples
    the median lies with the probability of fewer than k heads in n tosses (Conover, Practical
    Nonparametric Statistics, section 3.2). With fewer than six samples it is everything.
    """
    ordered = sorted(samples)
    size = len(ordered)
    if not size:
        return None
    below = 0.0
    rank = 0
    while rank < size:
        below += math.comb(size, rank) * 0.5**size
        if below > (1 - CONFIDENCE) / 2:
            break
        rank += 1
    low, high = (ordered[rank - 1], ordered[size - rank]) if rank else (-math.inf, math.inf)
    return Interval(statistics.median(ordered), low, high)


def checked_times(secs: Sequence[float], name: str = "a session") -> Floats:
    """Return samples as an array; ValueError where one is not positive and finite."""
    samples = np.asarray(secs, dtype=np.float64)
    if not np.all(np.isfinite(samples)) or np.any(samples <= 0.0):
        raise ValueError(f"{name} holds a time that is not positive and finite: {list(secs)[:8]}")
    return samples


def percentiles(values: Floats, confidence: float) -> tuple[float, float]:
    """Return the two between which redrawn values lie with a confidence."""
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)
