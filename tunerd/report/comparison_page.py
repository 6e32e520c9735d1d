"""One page about several runs: the same model at other shares or on other nights, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report.comparison import AgainstFirst, NamedRun, TaskRow, against_first, task_rows
from tunerd.report.components import caption, pairs, ratio_cell, row, section, table
from tunerd.report.facts_section import version_pairs
from tunerd.report.figures import headline, median_of, share_asked
from tunerd.report.latency_section import bar_row, bar_scale
from tunerd.report.layout import page
from tunerd.report.markup import Child, Markup, element
from tunerd.report.plot import MOST_LINES, histories_plot, legend
from tunerd.report.slice_section import obtained_texts
from tunerd.system.text import (
    UNKNOWN,
    count_text,
    duration_text,
    moment_text,
    secs_text,
)
from tunerd.vocabulary.outcome import Latency
from tunerd.vocabulary.verdict import Interval

SHOWN_TASKS = 25
_RUN_HEADS = (
    "Run",
    "Asked",
    "Obtained",
    "Default",
    "Tuned",
    "Default over tuned",
    "First over this",
    "Trials",
    "Time",
)
_RUN_STYLES = {"Run": "run", "Default": "short", "Tuned": "short", "Trials": "short"}


def comparison_page(runs: Sequence[NamedRun]) -> str:
    """Return the page about two runs or more; each is shown beside the first."""
    others = against_first(runs)
    title = title_text(runs)
    return page(
        title,
        _runs_section(runs, others),
        _comparable_section(runs[0], others),
        _latency_section(runs),
        _history_section(runs),
        _tasks_section(runs),
        _versions_section(runs),
        head=element("header", element("h1", element("bdi", title)), class_="neutral"),
    )


def title_text(runs: Sequence[NamedRun]) -> str:
    """Return `3 runs of resnet50`; without a name where the models differ."""
    names = {run.view.name for run in runs}
    of = f" of {names.pop()}" if len(names) == 1 else ""
    return f"{count_text(len(runs), 'run')}{of}"


def _runs_section(runs: Sequence[NamedRun], others: Sequence[AgainstFirst]) -> Markup:
    beside = {id(other.run): other for other in others}
    rows = [
        row(_RUN_HEADS, _run_cells(run, beside.get(id(run))), styles=_RUN_STYLES) for run in runs
    ]
    return section("Runs", table(_RUN_HEADS, rows, "runs"))


def _run_cells(run: NamedRun, beside: AgainstFirst | None) -> tuple[Child, ...]:
    view, outcome = run.view, run.view.outcome
    compared = outcome.end_to_end if outcome else None
    # A verdict of its own, where the numbers alone would not say it: wrong, without an end.
    verdict = headline(view)
    said = None
    if outcome is None or view.is_stale or verdict.tone == "bad":
        said = element("small", verdict.claim if outcome is None or not view.is_stale else "stale")
    return (
        element(
            "div", element("bdi", run.label), element("small", moment_text(view.began_at)), said
        ),
        share_asked(view.settings),
        element("div", *(element("div", element("bdi", t)) for t in obtained_texts(view))),
        secs_text(compared.base_secs if compared else None),
        secs_text(compared.new_secs if compared else None),
        ratio_cell(compared),
        _beside_cell(beside),
        f"{view.trials:,}",
        duration_text(view.tuning_secs),
    )


def _beside_cell(beside: AgainstFirst | None) -> Child:
    if beside is None:
        return "the first"
    return ratio_cell(beside.comparison) if beside.comparison else "not comparable"


def _comparable_section(first: NamedRun, others: Sequence[AgainstFirst]) -> Markup:
    rows: list[Markup] = []
    for other in others:
        said: list[Child] = []
        if other.obstacles:
            said.append(element("div", f"Not comparable: {'; '.join(other.obstacles)}."))
        if other.remarks:
            said.append(element("div", f"Also different: {'; '.join(other.remarks)}."))
        if not said:
            said.append(element("div", "Comparable: the same in all that matters."))
        rows.append(
            element("div", element("dt", element("bdi", other.run.label)), element("dd", *said))
        )
    lead = (
        "Beside the first run. Latencies are compared where model, device, obtained share, kind "
        "of slice and driver are the same. Default over tuned was timed in turns within each run, "
        "and holds in any case."
    )
    return section("What can be compared", element("dl", *rows, class_="pairs"), lead=lead)


def _latency_section(runs: Sequence[NamedRun]) -> Markup:
    groups: list[tuple[NamedRun, list[tuple[Latency, Interval]]]] = []
    for run in runs:
        latencies = run.view.outcome.latencies if run.view.outcome else ()
        known = [(la, s) for la in latencies if (s := median_of(la)) is not None]
        if known:
            groups.append((run, known))
    if not groups:
        return section("Before and after", lead="No run has an end-to-end latency.")
    rows = []
    for run, known in groups:
        # Of one model: bars of a small one beside those of a large one would say nothing.
        of_model = [k for r, k in groups if _digest(r) == _digest(run)]
        scale = bar_scale([pair for each in of_model for pair in each])
        rows.append(element("h3", element("bdi", run.label)))
        rows += [bar_row(latency, seen, scale) for latency, seen in known]
    about = (
        "One inference, end to end; runs of one model share a scale. Bars are medians, ticks are "
        "samples, brackets hold the median with 95%."
    )
    return section("Before and after", element("div", *rows, class_="bars"), caption(about))


def _digest(run: NamedRun) -> str:
    return run.view.facts.model_digest


def _history_section(runs: Sequence[NamedRun]) -> Markup:
    title = "Best latency over time"
    shown = runs[:MOST_LINES]
    plot = histories_plot({run.label: run.view.history for run in shown})
    if plot is None:
        return section(title, lead="No run has a search to show.")
    about = "From measurements of the search, each run from its own beginning."
    if len(runs) > len(shown):
        about += f" Drawn are the first {len(shown)} runs."
    return section(title, legend([run.label for run in shown]), plot, caption(about))


def _tasks_section(runs: Sequence[NamedRun]) -> Markup:
    rows = task_rows(runs)
    common = sum(all(each.tasks) for each in rows)
    lead = (
        f"{count_text(len(rows), 'kernel')}, {common:,} of them in all runs: the best of each run "
        "and, smaller, its default and trials."
    )
    shown, folded = rows[:SHOWN_TASKS], rows[SHOWN_TASKS:]
    more = element(
        "details",
        element("summary", f"and {len(folded)} more"),
        _task_table(runs, folded),
    )
    return section("Tasks", _task_table(runs, shown), more if folded else None, lead=lead)


def _task_table(runs: Sequence[NamedRun], rows: Sequence[TaskRow]) -> Markup:
    heads = ("Task", *(run.label for run in runs))
    return table(heads, [_task_row(each, runs) for each in rows], "kernels")


def _task_row(of: TaskRow, runs: Sequence[NamedRun]) -> Markup:
    cells = []
    for task, run in zip(of.tasks, runs, strict=True):
        shown: Child = UNKNOWN
        if task is not None:
            undecided = task.task_id in run.view.undecided
            state = (
                "undecided, " if undecided else "" if task.is_tuned else "stays at its default, "
            )
            shown = element(
                "div",
                secs_text(task.best_secs),
                element(
                    "small",
                    f"{state}default {secs_text(task.default_secs)}, "
                    f"{count_text(task.trials, 'trial')}",
                ),
            )
        cells.append(element("td", shown, data_label=run.label))
    return element("tr", element("td", element("code", of.name), class_="task"), *cells)


def _versions_section(runs: Sequence[NamedRun]) -> Markup:
    parts = [
        element(
            "details",
            element("summary", element("bdi", run.label)),
            pairs([*version_pairs(run.view), ("Folder", str(run.folder))], "pairs facts"),
        )
        for run in runs
    ]
    return section("Versions and machines", *parts)
