"""The table of tasks on the page: what each ends with, and why some stay at their default."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report import svg
from tunerd.report.components import ratio_cell, row
from tunerd.report.figures import TaskShare, by_share
from tunerd.report.library_text import library_bars, library_text
from tunerd.report.markup import Child, Markup, element
from tunerd.report.run_view import RunView
from tunerd.system.text import UNKNOWN, count_text, percent_text, ratio_texts, secs_text
from tunerd.vocabulary.outcome import Comparison, TaskOutcome

SHOWN_TASKS = 25
_STYLES = {
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


def task_section(view: RunView) -> Markup:
    """Return the tasks, the heaviest first; those after the 25th fold away."""
    heading = element("h2", "Tasks")
    shares = by_share(view.tasks)
    if not shares:
        words = "The model has no task that can be tuned."
        if view.outcome is None:
            words = "The run ended before the model was cut into tasks."
        return element("section", heading, element("p", words, class_="lead"))
    lead = element("p", tasks_text(view), class_="lead")
    bars = [element("p", f"{bar.text}.") for bar in library_bars(view.tasks)]
    compared = [c for s in shares if (c := s.task.comparison) is not None]
    scale = svg.ratio_scale([end for c in compared for end in (c.ratio_low, c.ratio_high)])
    shown, folded = shares[:SHOWN_TASKS], shares[SHOWN_TASKS:]
    return element(
        "section", heading, lead, *bars, _table(shown, scale, view), _folded(folded, scale, view),
        class_="tasks",
    )  # fmt: skip


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


def _folded(
    shares: Sequence[TaskShare], scale: tuple[float, float], view: RunView
) -> Markup | None:
    if not shares:
        return None
    left = percent_text(sum(s.share or 0.0 for s in shares))
    return element(
        "details",
        element("summary", f"and {len(shares)} more, {left} of the time"),
        _table(shares, scale, view),
    )


def _table(shares: Sequence[TaskShare], scale: tuple[float, float], view: RunView) -> Markup:
    heads = (element("th", head, class_=style, scope="col") for head, style in _STYLES.items())
    return element(
        "table",
        element("thead", element("tr", *heads)),
        element("tbody", *(_row(share, scale, view) for share in shares)),
    )


def _row(entry: TaskShare, scale: tuple[float, float], view: RunView) -> Markup:
    task = entry.task
    cells: tuple[Child, ...] = (
        element("code", task.name),
        _share(entry.share),
        f"{task.weight:,}",
        secs_text(task.default_secs),
        secs_text(task.best_secs),
        ratio_cell(task.comparison),
        _mark(task.comparison, scale),
        _trials(task),
        _winner(task, is_decided=task.task_id not in view.undecided),
    )
    return row(_STYLES, cells, styles=_STYLES, class_=None if task.is_tuned else "stays")


def _share(share: float | None) -> Markup:
    text = element("span", percent_text(share))
    return text if share is None else element("div", text, svg.share_bar(share))


def _mark(compared: Comparison | None, scale: tuple[float, float]) -> Child:
    if compared is None or UNKNOWN in ratio_texts(compared.interval):
        return None
    return svg.ratio_mark(compared, scale=scale)


def _trials(task: TaskOutcome) -> Child:
    if task.taken:
        return element("div", "from the store", element("small", f"run {task.taken.run[:8]}"))
    failed = element("small", f"{task.failed:,} failed") if task.failed else None
    return element("div", f"{task.trials:,}", failed)


def _winner(task: TaskOutcome, *, is_decided: bool) -> Markup:
    if not is_decided:
        return element("div", "undecided", element("small", task.note))
    said = "; ".join(filter(None, (task.note, library_text(task))))
    note = element("small", said) if said else None
    if task.is_tuned:
        return element("div", element("code", task.winner.candidate_id), note)
    return element("div", "default", note)
