"""Percentiles of latencies, where there are samples enough to tell them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 95, 99)
BEYOND = 5  # samples that lie beyond a percentile, or it is not told


def samples_needed(percentile: float) -> int:
    """Return how many samples a percentile takes, so that BEYOND of them lie beyond it.

    >>> [samples_needed(p) for p in PERCENTILES]
    [10, 100, 500]
    """
    return math.ceil(BEYOND * 100 / (100 - percentile))


def percentiles_of(samples: Sequence[float]) -> tuple[float | None, ...]:
    """Return those of PERCENTILES; None where there are too few samples for one."""
    return tuple(
        float(np.percentile(samples, p)) if len(samples) >= samples_needed(p) else None
        for p in PERCENTILES
    )
