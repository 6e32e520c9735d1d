"""Samples -> an interval of how much slower one is, when neighbouring samples resemble each other.

Run times of one session are no independent draws: a clock or a neighbour stays for many samples
(of 60 samples of a model on a shared core, the correlation of one with the next was 0.8). A
bootstrap of single samples then gives intervals that are too narrow. Here whole stretches of a
session are drawn: the circular block bootstrap (Politis and Romano, 1992, after Kunsch, 1989), with
stretches of the square root of the number of samples. Of what was sampled in turns, both sides are
drawn with the same stretches, so that what slowed both cancels. Sessions are drawn apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

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
from tunerd.vocabulary.verdict import Interval


@dataclass(frozen=True)
class Session:
    """Medians of one side in redrawn sessions, as logarithms: of the samples, and of a control's.

    `control` is None where there are too few samples of one.
    """

    secs: float  # median of the samples
    medians: Floats
    control_secs: float | None
    control: Floats | None


def session(run_secs: Sequence[float], control_secs: Sequence[float], *, seed: int) -> Session:
    """Redraw a session of samples and of a control that were taken in turns."""
    samples, control = checked_times(run_secs), checked_times(control_secs)
    has_control = control.size >= MIN_SAMPLES
    return Session(
        secs=float(np.median(samples)),
        medians=_log_medians(samples, seed),
        control_secs=float(np.median(control)) if has_control else None,
        control=_log_medians(control, seed) if has_control else None,
    )


def interval(ratio: float, log_ratios: Floats, *, confidence: float) -> Interval:
    """Return the percentile interval of redrawn ratios, never without the ratio itself."""
    low, high = map(math.exp, percentiles(log_ratios, confidence))
    return Interval(ratio, min(low, ratio), max(high, ratio))


def median_interval(run_secs: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Return the median of one session's samples with its interval; of few, with their range."""
    samples = checked_times(run_secs)
    median = float(np.median(samples))
    if samples.size < MIN_SAMPLES:
        return Interval(median, float(samples.min()), float(samples.max()))
    return interval(median, _log_medians(samples, 0), confidence=confidence)


def _log_medians(samples: Floats, seed: int) -> Floats:
    drawn = np.sort(samples[_rows(samples.size, seed)], axis=1)  # a third of np.median's time
    middle = samples.size // 2
    upper, lower = drawn[:, middle], drawn[:, middle if samples.size % 2 else middle - 1]
    return np.asarray(np.log(0.5 * (lower + upper)))


@functools.lru_cache(maxsize=8)
def _rows(size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return redrawn indices: stretches that run on from the last sample to the first.

    They depend on size and seed alone, so that sides of one size are drawn together.
    """
    length = max(1, round(math.sqrt(size)))
    rng = np.random.default_rng([seed, size])
    starts = rng.integers(0, size, size=(RESAMPLES, math.ceil(size / length), 1))
    rows = (starts + np.arange(length)) % size
    return np.asarray(rows.reshape(RESAMPLES, -1)[:, :size])
