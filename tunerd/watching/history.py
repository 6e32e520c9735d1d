"""Records -> what a report draws: the best latency over time, the device, and what failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from tunerd.report import ConditionPoint, FailureKind, HistoryPoint
from tunerd.vocabulary import Conditions, Failure, Measurement, Origin, Record, Task

_SESSION_GAP_SECS = 120.0  # a pause this long between trials is one between sessions


def history_of(
    tasks: Sequence[Task], records: Iterable[Record], started_at: float
) -> list[HistoryPoint]:
    """Return the weighted best latency after each trial that improved it, and after the last.

    Pauses between the sessions of a run do not count as time.
    """
    weights = {t.task_id: t.weight for t in tasks}
    best: dict[str, float] = {}
    points: list[HistoryPoint] = []
    trials, elapsed = 0, 0.0
    failed_defaults: set[str] = set()
    for elapsed, record in _timed(records, started_at):
        task_id, secs = record.candidate.task_id, record.run_secs
        trials += record.candidate.origin is Origin.SEARCH
        if secs is None:
            if record.candidate.origin is Origin.DEFAULT:
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


def conditions_of(records: Iterable[Record], started_at: float) -> list[ConditionPoint]:
    """Return what is known of the device during each measured trial of which anything is."""
    found = []
    for elapsed, record in _timed(records, started_at):
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


def _timed(records: Iterable[Record], started_at: float) -> Iterator[tuple[float, Record]]:
    """Yield the trials that ended, in that order, each after how much time of the run."""
    ended = sorted((r for r in records if r.ended_at is not None), key=lambda r: r.ended_at or 0.0)
    elapsed, last_at = 0.0, started_at
    for record in ended:
        at = record.ended_at or last_at
        step = max(0.0, at - last_at)
        elapsed += step if step < _SESSION_GAP_SECS else 0.0
        last_at = at
        yield elapsed, record


def _finite(seen: Conditions) -> Conditions:
    """Return conditions with a power that is a number or None: a store may hold any float."""
    power = seen.power_w
    if power is None or 0 <= power < float("inf"):
        return seen
    return dataclasses.replace(seen, power_w=None)
