"""Records -> what a report draws: the best latency over time, and what failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tunerd.report import HistoryPoint
from tunerd.vocabulary import Failure, Origin, Record, Task

_SESSION_GAP_SECS = 120.0  # a pause this long between trials is one between sessions


def history_of(
    tasks: Sequence[Task], records: Iterable[Record], started_at: float
) -> list[HistoryPoint]:
    """Return the weighted best latency after each trial that improved it, and after the last.

    Pauses between the sessions of a run do not count as time.
    """
    ended = sorted((r for r in records if r.ended_at is not None), key=lambda r: r.ended_at or 0.0)
    weights = {t.task_id: t.weight for t in tasks}
    best: dict[str, float] = {}
    points: list[HistoryPoint] = []
    trials, elapsed, last_at = 0, 0.0, started_at
    failed_defaults: set[str] = set()
    for record in ended:
        at = record.ended_at or last_at
        step = max(0.0, at - last_at)
        elapsed += step if step < _SESSION_GAP_SECS else 0.0
        last_at = at
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


def failures_of(records: Iterable[Record]) -> list[tuple[str, int, str]]:
    """Return (stage and kind, how often, the last message), the most frequent first."""
    found: dict[str, tuple[int, str]] = {}
    for record in records:
        if isinstance(record.result, Failure):
            name = f"{record.result.stage}: {record.result.kind}"
            count, _ = found.get(name, (0, ""))
            found[name] = (count + 1, record.result.message)
    return sorted(((n, c, m) for n, (c, m) in found.items()), key=lambda row: -row[1])
