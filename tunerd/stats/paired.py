"""The one place that says "faster" within a session: two sets of samples to a Comparison.

Between sessions, whose samples were not taken in turns, `tunerd.stats.gate` decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tunerd.stats.interval import (
    CONFIDENCE,
    MIN_SAMPLES,
    RESAMPLES,
    Floats,
    checked_times,
    percentiles,
)
from tunerd.vocabulary.outcome import Comparison
from tunerd.vocabulary.verdict import SpeedVerdict, Verdict

SAME_WITHIN = 0.01  # of a ratio of one
_FAR = 2.0  # times as long: what few samples tell


def compare(
    base_secs: Sequence[float],
    new_secs: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    of: int = 1,
    seed: int = 0,
) -> Comparison:
    """Say whether `new_secs` are faster than `base_secs`, by an interval and not by a point.

    The interval is the percentile bootstrap's (Efron and Tibshirani, 1993, chapter 13), of the
    ratio of the medians, base / new. BCa is not used: its acceleration comes from the jackknife,
    which is inconsistent for a median. The interval is taken of the ratio's logarithm, so that
    swapping the two sides gives exactly the reciprocal.

    Sets of equal length are resampled as pairs: such samples are taken interleaved, and what slows
    sample i of one (a clock, a neighbour) slows sample i of the other. That also is why single
    pairs are drawn, and no stretches: samples resemble their neighbours, but the ratios of pairs
    hardly do (`results/*/remeasured.json`), and of few pairs stretches make too narrow intervals.

    FASTER: the interval and the ratio are above one. SLOWER: both below. SAME: neither, and the
    interval lies within 1% of one. Otherwise CANNOT_TELL. With fewer than 5 samples on a side the
    interval is the widest that the samples allow, and CANNOT_TELL it is unless each of one side
    takes more than twice as long as each of the other, and that of so many samples is no chance
    (the exact permutation test): a base that takes 10 s is not sampled often.

    Args:
        of: how many candidates `new_secs` were chosen from, as the fastest by these samples. The
            best of many is fast by chance, too: the verdict's interval, not the one returned,
            leaves out `of` times less (Bonferroni), so that where all are as fast as the base one
            of them is called faster in 2.5% of cases at most.

    Raises ValueError for no samples, and for samples that are not positive and finite.
    """
    for secs, name in ((base_secs, "base_secs"), (new_secs, "new_secs")):
        if not len(secs):
            raise ValueError(f"{name} holds no samples; a comparison needs some on each side")
    base, new = checked_times(base_secs, "base_secs"), checked_times(new_secs, "new_secs")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1")
    base_median, new_median = float(np.median(base)), float(np.median(new))
    ratio = base_median / new_median
    if min(base.size, new.size) < MIN_SAMPLES:
        low, high = float(base.min() / new.max()), float(base.max() / new.min())
        verdict = _verdict_of_few(base, new, (1.0 - confidence) / of)
    else:
        log_ratios = _bootstrap_log_ratios(base, new, seed)
        low, high = map(math.exp, percentiles(log_ratios, confidence))
        verdict = _verdict(math.log(ratio), *percentiles(log_ratios, 1.0 - (1.0 - confidence) / of))
    return Comparison(
        verdict=verdict,
        base_secs=base_median,
        new_secs=new_median,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
    )


def fastest(
    base_secs: Sequence[float] | None, rivals: Mapping[str, Sequence[float]]
) -> tuple[str, Comparison | None]:
    """Return which rival has the least median, the first of equals, and how it compares to a base.

    It takes the base's place if the comparison says FASTER, or where there is none to compare with:
    the rule by which each task's winner is chosen.

    Args:
        rivals: the samples of each, one at least, by its id.
    """
    best = min(rivals, key=lambda name: statistics.median(rivals[name]))
    if base_secs is None:
        return best, None
    return best, compare(base_secs, rivals[best], of=len(rivals))


def _bootstrap_log_ratios(base: Floats, new: Floats, seed: int) -> Floats:
    base_rows = _resampled_rows(base.size, seed)
    # The rows depend on the length alone: the same for both sides where the lengths are equal,
    # which makes pairs, and the same after a swap where they are not.
    new_rows = base_rows if base.size == new.size else _resampled_rows(new.size, seed)
    base_medians: Floats = np.median(base[base_rows], axis=1)
    new_medians: Floats = np.median(new[new_rows], axis=1)
    return np.asarray(np.log(base_medians) - np.log(new_medians), dtype=np.float64)


def _resampled_rows(size: int, seed: int) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng([seed, size])
    return rng.integers(0, size, size=(RESAMPLES, size))


def _verdict_of_few(base: Floats, new: Floats, chance: float) -> SpeedVerdict:
    # Of two sets that are alike one lies wholly above the other in 2 of all ways to part them.
    if 2 / math.comb(base.size + new.size, new.size) > chance:
        return Verdict.CANNOT_TELL
    if base.min() > _FAR * new.max():
        return Verdict.FASTER
    return Verdict.SLOWER if new.min() > _FAR * base.max() else Verdict.CANNOT_TELL


def _verdict(log_ratio: float, log_low: float, log_high: float) -> SpeedVerdict:
    if log_low > 0.0 and log_ratio > 0.0:
        return Verdict.FASTER
    if log_high < 0.0 and log_ratio < 0.0:
        return Verdict.SLOWER
    if max(-log_low, log_high) <= math.log1p(SAME_WITHIN):
        return Verdict.SAME
    return Verdict.CANNOT_TELL
