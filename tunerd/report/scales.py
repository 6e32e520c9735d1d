"""Axes of plots: where a value lies on one, and which values get a label."""

from __future__ import annotations

import math
from dataclasses import dataclass

TIME_TICKS = (0.1, 0.3, 1, 5, 20, 60, 300, 1200, 3600, 18000, 72000, 360000)
_TIME_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 18000)
_TIME_LABELS = 5  # at most, between the ends of a linear axis
_LOG_TIME_FROM = 8.0  # times the start: before that a logarithmic axis has hardly a label


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, which differ; logarithmic ones are of positive values."""

    low: float
    high: float
    is_log: bool = False

    def part(self, value: float) -> float:
        """Return where `value` lies: 0 at the low end, 1 at the high end; clamped to both."""
        value = min(self.high, max(self.low, value))
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def time_scale(first_secs: float, last_secs: float) -> Scale:
    """Return an axis of a run's time, logarithmic where it spans much."""
    first = first_secs if first_secs > 0 else 1.0
    last = max(last_secs, first * 1.01)
    if last / first > _LOG_TIME_FROM:
        return Scale(first, last, is_log=True)
    return Scale(max(0.0, first_secs), last)


def time_ticks(scale: Scale) -> list[float]:
    if scale.is_log:
        return [t for t in TIME_TICKS if scale.low <= t <= scale.high]
    span = scale.high - scale.low
    step = next((s for s in _TIME_STEPS if span / s <= _TIME_LABELS), span / _TIME_LABELS)
    return [step * i for i in range(math.ceil(scale.low / step), math.floor(scale.high / step) + 1)]


def latency_scale(least: float, most: float, *, log_from: float) -> Scale:
    """Return an axis of latencies: from zero, or logarithmic where they span more than asked."""
    if least > 0 and most / least > log_from:
        return Scale(least / 1.2, most * 1.2, is_log=True)
    return Scale(0.0, most * 1.06)


def ticks(scale: Scale) -> list[float]:
    """Return round values on an axis, the low end of a linear one left out where it is zero."""
    low, high = scale.low, scale.high
    if scale.is_log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        mantissas = (1, 2, 5) if high / low < 100 else (1,)
        return [m * 10.0**p for p in powers for m in mantissas if low <= m * 10.0**p <= high]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = max(math.ceil(low / step), 1 if low == 0 else math.ceil(low / step))
    return [step * i for i in range(first, math.floor(high / step) + 1)]


def latency_tick_text(secs: float) -> str:
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if round(secs * scale, 6) < 1000:
            return f"{secs * scale:.6g} {unit}"
    return f"{secs:.6g} s"
