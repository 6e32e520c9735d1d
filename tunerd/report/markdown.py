"""A report as Markdown for a pull request: a verdict, small tables, the rest folded away."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report.comparison import NamedRun, against_first, task_rows
from tunerd.report.comparison_page import title_text
from tunerd.report.facts_section import version_pairs
from tunerd.report.figures import LATENCY_NAMES, by_share, headline, median_of, ordered, share_asked
from tunerd.report.library_text import library_bars, library_text
from tunerd.report.markdown_text import MOST_CHARS, code, folded, table, text
from tunerd.report.precision_text import precision_sentences
from tunerd.report.run_view import RunView
from tunerd.report.slice_section import obtained_texts
from tunerd.system.text import (
    TIMES,
    UNKNOWN,
    count_text,
    duration_text,
    is_known,
    percent_text,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.vocabulary.outcome import Comparison, TaskOutcome
from tunerd.vocabulary.verdict import Verdict

SHOWN_TASKS = 100  # a comment on GitHub holds 65,536 characters


def run_markdown(view: RunView) -> str:
    """Return a run's verdict, its latencies, and its tasks folded away."""
    parts = [
        _verdict(view),
        _latency_table(view),
        "\n".join(text(f"{bar.text}.") for bar in library_bars(view.tasks)),
        _failures(view),
        "\n".join(f"- {text(said)}" for said in precision_sentences(view.settings)),
        folded(_tasks_title(view), _task_table(view)),
        _provenance(view),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparison_markdown(runs: Sequence[NamedRun]) -> str:
    """Return runs beside the first, what is not comparable, and their kernels folded away."""
    others = against_first(runs)
    beside = {id(other.run): other for other in others}
    rows = []
    for run in runs:
        outcome = run.view.outcome
        compared = outcome.end_to_end if outcome else None
        other = beside.get(id(run))
        first = "the first"
        if other is not None:
            first = _ratio(other.comparison) if other.comparison else "not comparable"
        rows.append(
            (
                code(run.label),
                text(share_asked(run.view.settings)),
                "<br>".join(text(t) for t in obtained_texts(run.view)) or UNKNOWN,
                secs_text(compared.base_secs if compared else None),
                secs_text(compared.new_secs if compared else None),
                _ratio(compared),
                first,
            )
        )
    heads = ("Run", "Asked", "Obtained", "Default", "Tuned", "Default / tuned", "First / this")
    remarks = [
        f"- {code(other.run.label)}: {label} {text('; '.join(said))}"
        for other in others
        for label, said in (("not comparable,", other.obstacles), ("differs in", other.remarks))
        if said
    ]
    kernels = task_rows(runs)
    kernel_rows = [
        (code(row.name), *(_best(task, run) for task, run in zip(row.tasks, runs, strict=True)))
        for row in kernels[:SHOWN_TASKS]
    ]
    kernel_heads = ("Task", *(code(run.label) for run in runs))
    summary = f"Best of {count_text(len(kernels), 'kernel')}, default in parentheses"
    parts = [
        f"**{text(title_text(runs))}**",
        table(heads, rows, numbers=range(3, 7)),
        "\n".join(remarks),
        folded(
            summary,
            table(kernel_heads, kernel_rows, numbers=range(1, len(kernel_heads))),
            left=len(kernels) - SHOWN_TASKS,
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# --- pieces ------------------------------------------------------------------------------------


def _verdict(view: RunView) -> str:
    verdict = headline(view)
    what = f"{code(view.name)} at {text(share_asked(view.settings))}"
    small = f"\n\n<sub>{text(verdict.small)}</sub>" if verdict.small else ""
    return f"**{what}: {text(verdict.claim)}** {text(verdict.grounds)}{small}"


def _latency_table(view: RunView) -> str:
    rows = []
    for latency in ordered(view.outcome.latencies) if view.outcome else ():
        seen = median_of(latency)
        is_bounded = seen is not None and is_known(seen.high)
        interval = secs_range_text(seen.low, seen.high) if seen and is_bounded else UNKNOWN
        name = LATENCY_NAMES.get(latency.name)
        median = secs_text(seen.value if seen else None)
        rows.append((name or code(latency.name), median, interval))
    return table(("Model", "Median", "95% interval"), rows, numbers=range(1, 3)) if rows else ""


def _failures(view: RunView) -> str:
    if not view.failures:
        return ""
    kinds = ", ".join(f"{kind.trials:,} {text(kind.name)}" for kind in view.failures)
    return f"Failed trials: {kinds}."


def _tasks_title(view: RunView) -> str:
    tuned = sum(t.is_tuned for t in view.tasks)
    return f"{tuned} of {count_text(len(view.tasks), 'task')} use a tuned schedule"


def _task_table(view: RunView) -> str:
    shares = by_share(view.tasks)
    rows = [
        (
            code(share.task.name),
            percent_text(share.share),
            f"{share.task.weight:,}",
            secs_text(share.task.default_secs),
            secs_text(share.task.best_secs),
            _ratio(share.task.comparison),
            f"{share.task.trials:,}",
            _winner(share.task, view),
        )
        for share in shares[:SHOWN_TASKS]
    ]
    heads = ("Task", "Share", "Calls", "Default", "Best", "Ratio", "Trials", "Ships")
    shown = table(heads, rows, numbers=range(1, 7))
    rest = len(shares) - SHOWN_TASKS
    return f"{shown}\n\nand {rest:,} more" if rest > 0 else shown


def _winner(task: TaskOutcome, view: RunView) -> str:
    if task.task_id in view.undecided:
        return "undecided"
    said = "; ".join(filter(None, ("" if task.is_tuned else task.note, library_text(task))))
    ships = "tuned" if task.is_tuned else "default"
    return f"{ships}: {text(said[:MOST_CHARS])}" if said else ships


def _ratio(compared: Comparison | None) -> str:
    if compared is None:
        return UNKNOWN
    ratio, interval = ratio_texts(compared.interval)
    if compared.verdict is Verdict.CANNOT_TELL:
        return f"cannot tell ({interval})"
    return f"{ratio}{TIMES} ({interval})"


def _best(task: TaskOutcome | None, run: NamedRun) -> str:
    if task is None:
        return UNKNOWN
    mark = "?" if task.task_id in run.view.undecided else ""
    return f"{secs_text(task.best_secs)}{mark} ({secs_text(task.default_secs)})"


def _provenance(view: RunView) -> str:
    known = dict(version_pairs(view))
    versions = [str(known[name]) for name in ("Compiler", "Driver") if known.get(name)]
    words = [
        *obtained_texts(view),
        count_text(view.trials, "trial"),
        duration_text(view.tuning_secs),
        f"tunerd {known.get('tunerd', UNKNOWN)}",
        *versions,
    ]
    return f"<sub>{text('; '.join(words))}</sub>"
