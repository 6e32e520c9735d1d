"""One page about several runs: the same model at other shares or on other nights, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report import html
from tunerd.report.comparison import AgainstFirst, NamedRun, TaskRow, against_first, task_rows
from tunerd.report.facts_section import version_pairs
from tunerd.report.figures import headline, obtained_texts, share_asked
from tunerd.report.plot import MOST_LINES, histories_plot
from tunerd.report.run_sections import latency_bars
from tunerd.report.task_section import ratio_cell
from tunerd.report.view import Cell, Fold, Grid, Pairs, Plot, Section, View, caption
from tunerd.system.text import UNKNOWN, count_text, duration_text, moment_text, secs_text
from tunerd.vocabulary.outcome import TaskOutcome

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
_RUN_STYLES = {"Run": "run"}


def comparison_page(runs: Sequence[NamedRun]) -> str:
    """Return the page about two runs or more; each is shown beside the first."""
    others = against_first(runs)
    sections = (
        Section("Runs", [runs_grid(runs, others)]),
        _comparable_section(runs[0], others),
        _latency_section(runs),
        _history_section(runs),
        _tasks_section(runs),
        _versions_section(runs),
    )
    return html.page(View(title_text(runs), sections))


def title_text(runs: Sequence[NamedRun]) -> str:
    """Return `3 runs of resnet50`; without a name where the models differ."""
    names = {run.view.name for run in runs}
    of = f" of {names.pop()}" if len(names) == 1 else ""
    return f"{count_text(len(runs), 'run')}{of}"


def runs_grid(runs: Sequence[NamedRun], others: Sequence[AgainstFirst]) -> Grid:
    beside = {id(other.run): other for other in others}
    rows = [_run_row(run, beside.get(id(run))) for run in runs]
    return Grid(_RUN_HEADS, rows, range(3, 9), class_="runs", styles=_RUN_STYLES)


def _run_row(run: NamedRun, beside: AgainstFirst | None) -> tuple[str | Cell, ...]:
    view, outcome = run.view, run.view.outcome
    compared = outcome.end_to_end if outcome else None
    # A verdict of its own, where the numbers alone would not say it: wrong, without an end.
    verdict, said = headline(view), ""
    if outcome is None or view.is_stale or verdict.tone == "bad":
        said = verdict.claim if outcome is None or not view.is_stale else "stale"
    first: str | Cell = "the first"
    if beside is not None:
        first = ratio_cell(beside.comparison) if beside.comparison else "not comparable"
    return (
        Cell(run.label, ", ".join(filter(None, (moment_text(view.began_at), said))), is_code=True),
        share_asked(view.settings),
        "; ".join(obtained_texts(view)) or UNKNOWN,
        secs_text(compared.base_secs if compared else None),
        secs_text(compared.new_secs if compared else None),
        ratio_cell(compared),
        first,
        f"{view.trials:,}",
        duration_text(view.tuning_secs),
    )


def _comparable_section(first: NamedRun, others: Sequence[AgainstFirst]) -> Section:
    rows = []
    for other in others:
        said = [f"Not comparable: {'; '.join(other.obstacles)}."] if other.obstacles else []
        said += [f"Also different: {'; '.join(other.remarks)}."] if other.remarks else []
        rows.append((other.run.label, said or ["Comparable: the same in all that matters."]))
    lead = (
        "Beside the first run. Latencies are compared where model, precision, device, obtained "
        "share, kind of slice and driver are the same. Default over tuned was timed in turns "
        "within each run, and holds in any case."
    )
    return Section("What can be compared", [Pairs(rows)], lead)


def _latency_section(runs: Sequence[NamedRun]) -> Section:
    timed = [(run, run.view.outcome.latencies) for run in runs if run.view.outcome]
    bars = []
    for run, latencies in timed:
        # Of one model: bars of a small one beside those of a large one would say nothing.
        of_model = [la for other, of in timed if _digest(other) == _digest(run) for la in of]
        bars.append(latency_bars(latencies, title=run.label, beside=of_model))
    if not any(bars):
        return Section("Before and after", lead="No run has an end-to-end latency.")
    about = (
        "One inference, end to end; runs of one model share a scale. Bars are medians, ticks are "
        "samples, brackets hold the median with 95%."
    )
    return Section("Before and after", (*bars, caption(about)))


def _digest(run: NamedRun) -> str:
    return run.view.facts.model_digest


def _history_section(runs: Sequence[NamedRun]) -> Section:
    title = "Best latency over time"
    shown = runs[:MOST_LINES]
    plot = histories_plot({run.label: run.view.history for run in shown})
    if plot is None:
        return Section(title, lead="No run has a search to show.")
    about = "From measurements of the search, each run from its own beginning."
    if len(runs) > len(shown):
        about += f" Drawn are the first {len(shown)} runs."
    return Section(title, (Plot(plot, names=[run.label for run in shown]), caption(about)))


def _tasks_section(runs: Sequence[NamedRun]) -> Section:
    rows = task_rows(runs)
    common = sum(all(each.tasks) for each in rows)
    lead = (
        f"{count_text(len(rows), 'kernel')}, {common:,} of them in all runs: the best of each run "
        "and, smaller, its default and trials."
    )
    folded = rows[SHOWN_TASKS:]
    more = Fold(f"and {len(folded)} more", [kernel_grid(runs, folded)]) if folded else None
    return Section("Tasks", (kernel_grid(runs, rows[:SHOWN_TASKS]), more), lead)


def kernel_grid(runs: Sequence[NamedRun], rows: Sequence[TaskRow]) -> Grid:
    """Return the best of each kernel in each run."""
    cells = [
        (Cell(of.name, is_code=True), *(_best(*each) for each in zip(of.tasks, runs, strict=True)))
        for of in rows
    ]
    heads = ("Task", *(run.label for run in runs))
    numbers = range(1, len(heads))
    return Grid(heads, cells, numbers, class_="kernels", styles={"Task": "task"})


def _best(task: TaskOutcome | None, run: NamedRun) -> str | Cell:
    if task is None:
        return UNKNOWN
    undecided = task.task_id in run.view.undecided
    state = "undecided, " if undecided else "" if task.is_tuned else "stays at its default, "
    trials = count_text(task.trials, "trial")
    return Cell(
        secs_text(task.best_secs), f"{state}default {secs_text(task.default_secs)}, {trials}"
    )


def _versions_section(runs: Sequence[NamedRun]) -> Section:
    return Section(
        "Versions and machines",
        [
            Fold(
                run.label,
                [Pairs([*version_pairs(run.view), ("Folder", str(run.folder))], "pairs facts")],
            )
            for run in runs
        ],
    )
