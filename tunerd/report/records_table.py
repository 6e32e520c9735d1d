"""A run and its tasks as its records have them: for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.records.summary import RunSummary, TaskSummary
from tunerd.report import terminal
from tunerd.report.view import Grid
from tunerd.system.text import one_line, secs_text
from tunerd.vocabulary import TrialState, to_json

_HEADS = ("task", "calls", "open", "measured", "failed", "default", "best in search")


def summary_json(run: RunSummary) -> dict[str, Any]:
    """Return a run for json.dumps, without its host and its settings."""
    value: dict[str, Any] = run.facts.to_json()
    del value["host"], value["settings"]
    for name in ("trials", "default_schedules"):
        value[name] = {state.value: count for state, count in getattr(run, name).items()}
    return value | {"tasks": to_json(run.tasks)}


def summary_page(run: RunSummary) -> RenderableType:
    """Return a run for rich to print."""
    facts = run.facts
    head = f"{one_line(facts.model_name)}: {facts.pct}% of {one_line(facts.device)}"
    return Group(
        Text(f"{head}, {facts.slice_kind} slices", style="bold"),
        task_table(run.tasks),
        Text(f"trials: {_states_text(run.trials)}"),
        Text(f"default schedules: {_states_text(run.default_schedules)}"),
    )


def task_table(tasks: Sequence[TaskSummary]) -> RenderableType:
    """Return the tasks of a run, for rich to print."""
    rows = [
        (
            task.name,
            *(f"{n:,}" for n in (task.weight, task.open, task.measured, task.failed)),
            secs_text(task.default_secs),
            secs_text(task.best_secs),
        )
        for task in tasks
    ]
    return terminal.table(Grid(_HEADS, rows, range(1, 7)))


def _states_text(counts: Mapping[TrialState, int]) -> str:
    said = ", ".join(f"{count:,} {state.value}" for state, count in counts.items() if count)
    return said or "none"
