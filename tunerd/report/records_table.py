"""The tasks of a run as its records have them, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tunerd.records.summary import TaskSummary
from tunerd.report.grid import Grid
from tunerd.system.text import secs_text

_HEADS = ("task", "calls", "open", "measured", "failed", "default", "best in search")


def task_table(tasks: Sequence[TaskSummary]) -> Table:
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
    return Grid(_HEADS, rows, numbers=range(1, 7)).terminal()
