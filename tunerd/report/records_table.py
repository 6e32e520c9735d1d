"""The tasks of a run as its records have them, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tunerd.records.summary import TaskSummary
from tunerd.system.text import one_line, secs_text


def task_table(tasks: Sequence[TaskSummary]) -> Table:
    """Return the tasks of a run, for rich to print."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("task", overflow="fold")
    for heading in ("calls", "open", "measured", "failed", "default", "best in search"):
        table.add_column(heading, justify="right", no_wrap=True)
    for task in tasks:
        numbers = (task.weight, task.open, task.measured, task.failed)
        table.add_row(
            Text(one_line(task.name)),
            *(Text(f"{number:,}") for number in numbers),
            Text(secs_text(task.default_secs)),
            Text(secs_text(task.best_secs)),
        )
    return table
