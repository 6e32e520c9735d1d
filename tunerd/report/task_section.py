"""The tasks of a run: what each takes by default and tuned, and how it came to that."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from markupsafe import Markup

from tunerd.report import svg
from tunerd.report.figures import by_share
from tunerd.report.library_text import library_bars, library_text
from tunerd.report.run_view import RunView
from tunerd.report.view import Cell, Fold, Grid, Section, Words
from tunerd.system.text import TIMES, UNKNOWN, count_text, percent_text, ratio_texts, secs_text
from tunerd.vocabulary.outcome import Comparison, TaskOutcome
from tunerd.vocabulary.verdict import Verdict

SHOWN_TASKS = 25
_TASK_STYLES = {
    "Task": "task",
    "Share of time": "share",
    "Calls": "number calls",
    "Default": "number latency",
    "Best": "number latency",
    "Ratio": "number ratio",
    "": "mark",
    "Trials": "number trials",
    "Winner": "winner",
}


def task_section(view: RunView) -> Section:
    """Return the tasks, the heaviest first; those after the 25th fold away."""
    grid = task_grid(view.tasks, view.undecided)
    if not grid.rows:
        words = "The model has no task that can be tuned."
        if view.outcome is None:
            words = "The run ended before the model was cut into tasks."
        return Section("Tasks", lead=words)
    rest = None
    if folded := grid.rows[SHOWN_TASKS:]:
        left = percent_text(sum(s.share or 0.0 for s in by_share(view.tasks)[SHOWN_TASKS:]))
        muted = [i - SHOWN_TASKS for i in range(SHOWN_TASKS, len(grid.rows)) if i in grid.muted]
        more = dataclasses.replace(grid, rows=folded, muted=muted)
        rest = Fold(f"and {len(folded)} more, {left} of the time", [more])
    bars = [Words(f"{bar.text}.") for bar in library_bars(view.tasks)]
    shown = dataclasses.replace(grid, rows=grid.rows[:SHOWN_TASKS])
    return Section("Tasks", (*bars, shown, rest), tasks_text(view), class_="tasks")


def tasks_text(view: RunView) -> str:
    """Return how many tasks are tuned, stay at the default and are undecided."""
    of = count_text(len(view.tasks), "task")
    tuned = sum(t.is_tuned for t in view.tasks)
    undecided = len(view.undecided)
    stays = len(view.tasks) - tuned - undecided
    words = f"{tuned} of {of} use a tuned schedule"
    if stays:
        words += f", {stays} stay{'s' if stays == 1 else ''} at the default"
    if not undecided:
        return f"{words}. The share is of the time as shipped."
    verb = "is" if undecided == 1 else "are"
    return f"{words}, {undecided} {verb} not decided. The share is of the best time known."


def task_grid(tasks: Sequence[TaskOutcome], undecided: Collection[str] = ()) -> Grid:
    """Return all tasks, the heaviest first; `undecided` are ids of those with no winner yet."""
    shares = by_share(tasks)
    compared = [c for s in shares if (c := s.task.comparison) is not None]
    scale = svg.ratio_scale([end for c in compared for end in (c.ratio_low, c.ratio_high)])
    rows = [
        (
            Cell(task.name, is_code=True),
            Cell(percent_text(share), drawn=None if share is None else svg.share_bar(share)),
            f"{task.weight:,}",
            secs_text(task.default_secs),
            secs_text(task.best_secs),
            ratio_cell(task.comparison, is_tuned=task.is_tuned),
            Cell(drawn=_mark(task.comparison, scale)),
            _trials(task),
            _winner(task, is_decided=task.task_id not in undecided),
        )
        for task, share in ((entry.task, entry.share) for entry in shares)
    ]
    muted = [i for i, entry in enumerate(shares) if not entry.task.is_tuned]
    return Grid(
        tuple(_TASK_STYLES), rows, range(1, 8), class_="ranked", styles=_TASK_STYLES, muted=muted
    )


def ratio_cell(compared: Comparison | None, *, is_tuned: bool = False) -> Cell:
    """Return a ratio over its interval, or that it cannot be told."""
    if compared is None:
        return Cell(UNKNOWN)
    ratio, interval = ratio_texts(compared.interval)
    if compared.verdict is Verdict.CANNOT_TELL:
        return Cell("cannot tell", interval, style="yellow")
    return Cell(f"{ratio}{TIMES}", interval, style="green" if is_tuned else "")


def _mark(compared: Comparison | None, scale: tuple[float, float]) -> Markup | None:
    if compared is None or UNKNOWN in ratio_texts(compared.interval):
        return None
    return svg.ratio_mark(compared, scale=scale)


def _trials(task: TaskOutcome) -> Cell:
    if task.taken:
        return Cell("from the store", f"run {task.taken.run[:8]}")
    return Cell(f"{task.trials:,}", f"{task.failed:,} failed" if task.failed else "")


def _winner(task: TaskOutcome, *, is_decided: bool) -> Cell:
    if not is_decided:
        return Cell("undecided", task.note)
    said = "; ".join(filter(None, (task.note, library_text(task))))
    if task.is_tuned:
        return Cell(task.winner.candidate_id, said, is_code=True)
    return Cell("default", said)
