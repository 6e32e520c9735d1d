"""Records -> what a report draws: the best latency over time, the device, and what failed."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from tunerd.vocabulary import Conditions, Failure, Measurement, Record, Task

_PAUSE_SECS = 120.0  # between trials of merged runs, whose sessions stayed with those


@dataclass(frozen=True)
class HistoryPoint:
    """How good the best schedules known at one moment of a run were.

    `weighted_best_secs` is the sum over all tasks of calls per inference times the best median
    so far; None while a task has no number yet. `trials` counts those that had ended.
    """

    elapsed_secs: float
    weighted_best_secs: float | None
    trials: int


@dataclass(frozen=True)
class ConditionPoint:
    """The device of one slice while one of its trials ran."""

    elapsed_secs: float
    slice_id: str
    conditions: Conditions


@dataclass(frozen=True)
class FailureKind:
    """Trials that failed in one stage in one way, and what the last of them said."""

    name: str  # "build: compile"
    trials: int
    message: str  # of the last one
    trial_id: int  # the last one


@dataclass(frozen=True)
class _Stretch:
    """A time in which the run was worked at. Seconds since the epoch."""

    began_at: float
    ended_at: float
    before_secs: float  # of the stretches before


class RunTime:
    """Moments -> how long the run had been worked at, without the pauses between its sessions."""

    def __init__(self, stretches: Iterable[tuple[float, float]]) -> None:
        self._stretches: list[_Stretch] = []
        before = 0.0
        for began_at, ended_at in stretches:
            self._stretches.append(_Stretch(began_at, ended_at, before))
            before += ended_at - began_at
        self._begins = [s.began_at for s in self._stretches]

    @classmethod
    def of(cls, opened_at: Iterable[float], noted_at: Iterable[float]) -> Self:
        """Return the time of sessions, each from its begin to the last that was noted in it.

        What was noted before the first one is of runs that were merged: there a long pause divides.
        A store may hold moments that are no numbers; they say nothing.
        """
        begins = sorted(filter(math.isfinite, opened_at))
        noted = sorted(filter(math.isfinite, noted_at))
        first = bisect_left(noted, begins[0]) if begins else len(noted)
        stretches = _divided(noted[:first])
        for begin, next_begin in pairwise([*begins, math.inf]):
            last = bisect_left(noted, next_begin)
            stretches.append((begin, max(begin, noted[last - 1]) if last else begin))
        return cls(stretches)

    def secs_at(self, at: float) -> float:
        """Return the seconds until a moment; one in a pause is the end of what was before."""
        number = bisect_right(self._begins, at) - 1
        if number < 0:
            return 0.0
        stretch = self._stretches[number]
        return stretch.before_secs + min(at, stretch.ended_at) - stretch.began_at


def _divided(noted: Sequence[float]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for at in noted:
        if found and at - found[-1][1] < _PAUSE_SECS:
            found[-1] = (found[-1][0], at)
        else:
            found.append((at, at))
    return found


def history_of(
    tasks: Sequence[Task], records: Iterable[Record], run_time: RunTime
) -> list[HistoryPoint]:
    """Return the weighted best latency after each trial that improved it, and after the last."""
    weights = {t.task_id: t.weight for t in tasks}
    best: dict[str, float] = {}
    points: list[HistoryPoint] = []
    trials, elapsed = 0, 0.0
    failed_defaults: set[str] = set()
    for elapsed, record in _timed(records, run_time):
        task_id, secs = record.candidate.task_id, record.run_secs
        trials += not record.candidate.is_default
        if secs is None:
            if record.candidate.is_default:
                failed_defaults.add(task_id)
            continue
        if secs < best.get(task_id, float("inf")):
            best[task_id] = secs
            known = best.keys() | failed_defaults
            total = (
                sum(weights[t] * s for t, s in best.items() if t in weights)
                if known >= weights.keys()
                else None
            )
            points.append(HistoryPoint(elapsed, total, trials))
    if points:
        points.append(HistoryPoint(elapsed, points[-1].weighted_best_secs, trials))
    return points


def conditions_of(records: Iterable[Record], run_time: RunTime) -> list[ConditionPoint]:
    """Return what is known of the device during each measured trial of which anything is."""
    found = []
    for elapsed, record in _timed(records, run_time):
        if isinstance(record.result, Measurement):
            seen = record.result.conditions
            known = (seen.sm_clock_mhz, seen.temperature_c, seen.power_w, seen.strangers)
            if known != (None,) * len(known) or seen.is_disturbed:
                found.append(ConditionPoint(elapsed, record.result.slice_id, _finite(seen)))
    return found


def failures_of(records: Iterable[Record]) -> list[FailureKind]:
    """Return the stages and kinds of failures, the most frequent first."""
    found: dict[str, FailureKind] = {}
    for record in records:
        if isinstance(record.result, Failure):
            name = f"{record.result.stage}: {record.result.kind}"
            count = found[name].trials + 1 if name in found else 1
            found[name] = FailureKind(name, count, record.result.message, record.trial_id)
    return sorted(found.values(), key=lambda kind: -kind.trials)


def _timed(records: Iterable[Record], run_time: RunTime) -> Iterator[tuple[float, Record]]:
    """Yield the trials that ended, in that order, each after how much time of the run."""
    ended = [(r.ended_at, r) for r in records if r.ended_at is not None]
    for at, record in sorted(ended, key=lambda pair: pair[0]):
        yield run_time.secs_at(at), record


def _finite(seen: Conditions) -> Conditions:
    """Return conditions with a power that is a number or None: a store may hold any float."""
    power = seen.power_w
    if power is None or 0 <= power < float("inf"):
        return seen
    return dataclasses.replace(seen, power_w=None)
