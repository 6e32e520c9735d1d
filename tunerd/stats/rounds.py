"""What several rounds of a measurement say, each with a value of its own -> a mean, an interval.

What a process got for its life, and what a clock or a neighbour did meanwhile, differ between
rounds and not within one. A round is therefore one value, however many samples it has, and the
interval is Student's t over rounds (Georges et al., OOPSLA 2007, section 3.2). A percentile
bootstrap of few rounds is too narrow: it reaches no further than the least and the largest of them,
and of three rounds all lie on one side of the truth in a quarter of cases.

The interval of an extreme is made of those of the ratios that it is taken over: of a minimum over n
ratios the least of their lower ends, and the least of their upper ends at n times the confidence
(Bonferroni); of a maximum likewise. It covers the true extreme in 95% of cases or more, whichever
ratio that is. `family`: of so many such intervals at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunerd.stats.interval import CONFIDENCE, Floats
from tunerd.vocabulary.verdict import Interval


def mean_over_rounds(logs: Floats, *, family: int = 1) -> Interval:
    """Return the geometric mean of one value for each round; of one round the interval is all.

    Args:
        logs: logarithms of times or ratios, of shape (rounds,): noise multiplies.
    """
    found = _mean(logs, family)
    return Interval(*map(_exp, (found.value, found.low, found.high)))


def difference_over_rounds(differences: Floats, *, family: int = 1) -> Interval:
    """Return the mean of one difference for each round; of one round the interval is all."""
    return _mean(differences, family)


def least_over_rounds(logs: Sequence[Floats]) -> Interval:
    """Return the least of some ratios, one at least."""
    each = [mean_over_rounds(x) for x in logs]
    high = min(mean_over_rounds(x, family=len(logs)).high for x in logs)
    return Interval(min(i.value for i in each), min(i.low for i in each), high)


def largest_over_rounds(logs: Sequence[Floats], *, family: int = 1) -> Interval:
    """Return the largest of one and some ratios."""
    each = [mean_over_rounds(x, family=family * len(logs)) for x in logs]
    highs = (mean_over_rounds(x, family=family).high for x in logs)
    value, low = max((1.0, *(i.value for i in each))), max((1.0, *(i.low for i in each)))
    return Interval(value, low, max((1.0, *highs)))


def least_quotient(above: Sequence[Interval], below: Interval) -> Interval:
    """Return the least of some ratios over another; all are intervals of one family."""
    return Interval(
        min(i.value for i in above) / below.value,
        min(i.low for i in above) / below.high,
        min(i.high for i in above) / below.low,
    )


def _mean(values: Floats, family: int) -> Interval:
    from scipy import special

    mean = float(values.mean())
    if values.size < 2:
        return Interval(mean, -math.inf, math.inf)
    confidence = 1 - (1 - CONFIDENCE) / family
    quantile = float(special.stdtrit(values.size - 1, 0.5 + confidence / 2))
    half = quantile * float(values.std(ddof=1)) / math.sqrt(values.size)
    return Interval(mean, mean - half, mean + half)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
