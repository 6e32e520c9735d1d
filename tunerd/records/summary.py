"""A run in a few numbers per task, from what the search measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunerd.records.facts import RunFacts
from tunerd.records.store import Store
from tunerd.vocabulary import TrialState


@dataclass(frozen=True)
class TaskSummary:
    """One task. The search's medians are noisy: they say where a run is, not what it won."""

    task_id: str
    name: str
    weight: int
    open: int  # trials of the search, proposed or running
    measured: int  # this and the next of the search as well
    failed: int
    default_secs: float | None
    best_secs: float | None


@dataclass(frozen=True)
class RunSummary:
    """A run: what it is of, its tasks, and how many trials are in which state."""

    facts: RunFacts
    tasks: tuple[TaskSummary, ...]
    trials: Mapping[TrialState, int]  # of the search
    default_schedules: Mapping[TrialState, int]


def summarize_run(store: Store) -> RunSummary:
    """Return a summary of a run, also while it is alive."""
    return RunSummary(
        store.facts(),
        tuple(summarize(store)),
        store.counts(is_default=False),
        store.counts(is_default=True),
    )


def summarize(store: Store) -> list[TaskSummary]:
    """Return a summary of each task, in the order of the tasks."""
    summaries = []
    for task in store.tasks():
        counts = store.counts(task.task_id, is_default=False)
        default = store.best(task.task_id, is_default=True)
        best = store.best(task.task_id)
        summaries.append(
            TaskSummary(
                task_id=task.task_id,
                name=task.name,
                weight=task.weight,
                open=counts[TrialState.PROPOSED] + counts[TrialState.RUNNING],
                measured=counts[TrialState.MEASURED],
                failed=counts[TrialState.FAILED],
                default_secs=default.run_secs if default else None,
                best_secs=best.run_secs if best else None,
            )
        )
    return summaries
