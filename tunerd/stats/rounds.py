"""What several rounds of a measurement say, each with a value of its own -> a mean, an interval.

What a process got for its life, and what a clock or a neighbour did meanwhile, differ between
rounds and not within one. A round is therefore one value, however many samples it has, and the
interval is Student's t over rounds (Georges et al., OOPSLA 2007, section 3.2). A percentile
bootstrap of few rounds is too narrow: it reaches no further than the least and the largest of them,
and of three rounds all lie on one side of the truth in a quarter of cases.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95


def mean_of(
    logs: npt.NDArray[np.float64], *, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return the mean of one value for each round and its interval, which for one round is all.

    Args:
        logs: logarithms of times or ratios, of shape (rounds,): noise multiplies.
    """
    from scipy import special

    mean = float(logs.mean())
    if logs.size < 2:
        return mean, -math.inf, math.inf
    quantile = float(special.stdtrit(logs.size - 1, 0.5 + confidence / 2))
    half = quantile * float(logs.std(ddof=1)) / math.sqrt(logs.size)
    return mean, mean - half, mean + half


def exp(value: float) -> float:
    """Return e to the power of a value, and infinity where that is too large a number."""
    return math.exp(value) if value < 700 else math.inf
