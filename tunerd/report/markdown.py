"""A report as Markdown for a pull request: a verdict, small tables, the rest folded away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tunerd.report.comparison import NamedRun, against_first, task_rows
from tunerd.report.comparison_page import kernel_grid, runs_grid, title_text
from tunerd.report.facts_section import version_pairs
from tunerd.report.figures import headline, obtained_texts, share_asked
from tunerd.report.library_text import library_bars
from tunerd.report.markdown_text import code, folded, grid, text
from tunerd.report.precision_text import precision_sentences, storage_sentences
from tunerd.report.run_sections import latency_bars
from tunerd.report.run_view import RunView
from tunerd.report.task_section import task_grid, tasks_text
from tunerd.report.view import Grid
from tunerd.system.text import UNKNOWN, count_text, duration_text

SHOWN_TASKS = 100  # a comment on GitHub holds 65,536 characters


def run_markdown(view: RunView) -> str:
    """Return a run's verdict, its latencies, and its tasks folded away."""
    parts = [
        _verdict(view),
        _latency_table(view),
        "\n".join(f"- {text(said)}" for said in view.outcome.remarks) if view.outcome else "",
        "\n".join(text(f"{bar.text}.") for bar in library_bars(view.tasks)),
        _failures(view),
        _precision(view),
        folded(tasks_text(view), _task_table(view), left=len(view.tasks) - SHOWN_TASKS),
        _provenance(view),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparison_markdown(runs: Sequence[NamedRun]) -> str:
    """Return runs beside the first, what is not comparable, and their kernels folded away."""
    others = against_first(runs)
    remarks = [
        f"- {code(other.run.label)}: {label} {text('; '.join(said))}"
        for other in others
        for label, said in (("not comparable,", other.obstacles), ("differs in", other.remarks))
        if said
    ]
    kernels = task_rows(runs)
    heads = ("Run", "Asked", "Obtained", "Default", "Tuned", "Default over tuned")
    parts = [
        f"**{text(title_text(runs))}**",
        grid(runs_grid(runs, others).only(*heads, "First over this")),
        "\n".join(remarks),
        folded(
            f"Best of {count_text(len(kernels), 'kernel')}, default in parentheses",
            grid(kernel_grid(runs, kernels[:SHOWN_TASKS])),
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
    bars = latency_bars(view.outcome.latencies) if view.outcome else None
    if bars is None:
        return ""
    rows = [(bar.name, bar.value, bar.small) for bar in bars.bars]
    return grid(Grid(("Model", "Median", "95% interval"), rows, range(1, 3)))


def _precision(view: RunView) -> str:
    said = [f"Precision {sentence}" for sentence in precision_sentences(view.settings)]
    if view.outcome is not None:
        said += storage_sentences(view.outcome.model)
    return "\n".join(f"- {text(sentence)}" for sentence in said)


def _failures(view: RunView) -> str:
    if not view.failures:
        return ""
    kinds = ", ".join(f"{kind.trials:,} {text(kind.name)}" for kind in view.failures)
    return f"Failed trials: {kinds}."


def _task_table(view: RunView) -> str:
    tasks = task_grid(view.tasks, view.undecided)
    heads = ("Task", "Share of time", "Calls", "Default", "Best", "Ratio", "Trials", "Winner")
    shown = dataclasses.replace(tasks, rows=tasks.rows[:SHOWN_TASKS]).only(*heads)
    return grid(shown)


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
