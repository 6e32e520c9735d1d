"""Two sessions' samples -> faster, same, slower, or cannot tell.

The question is one of a margin: is `new` slower than `base` by more than `fail_above`? SLOWER says
that the interval of new / base lies above the margin, SAME and FASTER that it lies below
(non-inferiority by interval inclusion: Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987).
Everything else is CANNOT_TELL. With a confidence of 95%, where the true slowdown is just the
margin, SLOWER is said in at most 2.5% of comparisons, and so is SAME or FASTER; where there is no
slowdown, SLOWER is far rarer.

Samples of two nights were not taken in turns. Between them the machine may have changed (a clock,
a temperature, a neighbour, another virtual machine), and an interval of the samples knows nothing
of that: repeating on the level on which the variation is, would be the cure (Kalibera and Jones,
ISMM 2013), and is what measuring both now does. For stored samples there is a negative control
(Lipsitch, Tchetgen Tchetgen and Cohen, Epidemiology 21, 2010): both runs timed the default
schedules, the same code in both, in turns with the tuned model. Whatever the control did between
the nights was the machine. But how much of it hit the tuned model, which may be bound by something
else, is not known: none (the ratio as measured) or as much as the control (the ratio corrected by
it, a difference in differences of logarithms). So the gate makes both intervals and says only what
holds by both, which needs no correction of the confidence (intersection-union test: Berger,
Technometrics 24, 1982). Where the control itself changed by more than the margin, beyond doubt, a
third one counts, too, in which the machine hit the tuned model twice as hard as the control: only
what is larger than such a night is said, and mostly that is CANNOT_TELL. Stored samples are of one
process on each side, and no interval of them holds what the next paragraph is about.

Measured now, in turns, in several fresh processes, there is an interval per process, because the
placement of code and data in memory differs between processes and stays within one (Mytkowicz et
al., ASPLOS 2009). Again what is said holds in each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from tunerd.stats.blocks import interval, session
from tunerd.stats.interval import CONFIDENCE, MIN_SAMPLES
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

_RAW, _CORRECTED, _TWICE = "as measured", "corrected", "corrected twice"
_BASE, _NEW = 1, 2  # seeds: sessions are drawn apart


@dataclass(frozen=True)
class Timing:
    """Samples of one call each in seconds, and of a control that was timed in turns with them."""

    run_secs: tuple[float, ...]
    control_secs: tuple[float, ...] = ()


@dataclass(frozen=True)
class View:
    """One way to look at the samples: "as measured", "corrected", "process 1"."""

    name: str
    change: Interval


@dataclass(frozen=True)
class Judgement:
    """`new` against `base`: ratios are new / base, so above 1 is slower."""

    verdict: SpeedVerdict
    why: str  # "" or what kept it from telling
    base_secs: float  # medians
    new_secs: float
    change: Interval  # holds the intervals of all views
    views: tuple[View, ...]
    control: Interval | None = None  # what the default schedules, the same code, did


def judge(
    base: Timing, new: Timing, *, fail_above: float, confidence: float = CONFIDENCE
) -> Judgement:
    """Judge samples of two sessions; `fail_above` is a fraction: 0.05 allows 5% more time.

    Raises ValueError for no samples, and for times that are not positive and finite.
    """
    if few := _too_few([base.run_secs, new.run_secs]):
        return few
    one = session(base.run_secs, base.control_secs, seed=_BASE)
    other = session(new.run_secs, new.control_secs, seed=_NEW)
    ratio, log_ratios = other.secs / one.secs, other.medians - one.medians
    views = [View(_RAW, interval(ratio, log_ratios, confidence=confidence))]
    control, moved = None, False
    if (
        one.control is not None
        and other.control is not None
        and one.control_secs
        and other.control_secs
    ):
        drift, log_drifts = other.control_secs / one.control_secs, other.control - one.control
        control = interval(drift, log_drifts, confidence=confidence)
        moved = _has_moved(control, fail_above)
        for times, name in enumerate((_CORRECTED, _TWICE) if moved else (_CORRECTED,), 1):
            corrected = interval(
                ratio / drift**times, log_ratios - times * log_drifts, confidence=confidence
            )
            views.append(View(name, corrected))
    change = functools.reduce(Interval.hull, (view.change for view in views))
    verdict, why = _verdict(change, fail_above)
    if verdict is Verdict.CANNOT_TELL and control is not None and moved:
        why += (
            f"; between the sessions the default schedules changed by {control.value - 1:+.1%}, so "
            "the machine was not the same: measure both now with --measure"
        )
    return Judgement(verdict, why, one.secs, other.secs, change, tuple(views), control)


def judge_rounds(
    rounds: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    fail_above: float,
    confidence: float = CONFIDENCE,
) -> Judgement:
    """Judge samples of (base, new) that were taken in turns, a round for each process."""
    if few := _too_few([samples for pair in rounds for samples in pair]):
        return few
    views = []
    for number, (base_secs, new_secs) in enumerate(rounds, 1):
        # One seed for both: of sides with as many samples the same ones are drawn.
        one = session(base_secs, (), seed=number)
        other = session(new_secs, (), seed=number)
        found = interval(other.secs / one.secs, other.medians - one.medians, confidence=confidence)
        views.append(View(f"process {number}", found))
    hull = functools.reduce(Interval.hull, (view.change for view in views))
    change = Interval(median(view.change.value for view in views), hull.low, hull.high)
    verdict, why = _verdict(change, fail_above)
    base_median, new_median = (median(s for pair in rounds for s in pair[i]) for i in (0, 1))
    return Judgement(verdict, why, base_median, new_median, change, tuple(views))


def _verdict(change: Interval, fail_above: float) -> tuple[SpeedVerdict, str]:
    margin = 1.0 + fail_above
    if change.low > margin:
        return Verdict.SLOWER, ""
    if change.high < 1.0:
        return Verdict.FASTER, ""
    if change.high <= margin:
        return Verdict.SAME, ""
    return Verdict.CANNOT_TELL, (
        f"the change lies between {change.low - 1:+.1%} and {change.high - 1:+.1%}, so neither "
        f"surely above nor surely below the {fail_above:+.1%} that are allowed"
    )


def _has_moved(control: Interval, fail_above: float) -> bool:
    margin = math.log1p(fail_above)
    return math.log(control.low) > margin or math.log(control.high) < -margin


def _too_few(sides: Sequence[Sequence[float]]) -> Judgement | None:
    """Return what can be said of fewer samples than make an interval, None where there are more."""
    fewest = min(map(len, sides))
    if fewest == 0:
        raise ValueError("a side has no samples")
    if fewest >= MIN_SAMPLES:
        return None
    base = [s for side in sides[::2] for s in side]
    new = [s for side in sides[1::2] for s in side]
    ratio = float(np.median(new) / np.median(base))
    widest = Interval(ratio, min(new) / max(base), max(new) / min(base))
    why = f"there are {fewest} samples, and fewer than {MIN_SAMPLES} tell nothing"
    return Judgement(
        Verdict.CANNOT_TELL,
        why,
        float(np.median(base)),
        float(np.median(new)),
        widest,
        (View(_RAW, widest),),
    )
