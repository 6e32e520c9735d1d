"""How far the search could be trusted, on the page, on the terminal and in the JSON document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunerd.report.view import Cell, Grid, Section, caption, left_out
from tunerd.stats.ranking import NEAR, TOP_K, Fidelity, TaskFidelity, fidelity
from tunerd.system.text import UNKNOWN, count_text, percent_text, significant
from tunerd.vocabulary import to_json
from tunerd.vocabulary.outcome import TaskOutcome

_NEAR = f"within {NEAR:.0%} of the fastest"
_HEADS = (
    "Task",
    "Candidates",
    "Kendall\N{RIGHT SINGLE QUOTATION MARK}s tau-b",
    "Slowest over fastest",
    f"Tau-b {_NEAR}",
    f"Recall of the best {TOP_K}",
    "Chosen over fastest",
)
_SHOWN_TASKS = 50
_FEW = 6  # candidates: fewer are the best of the search, hardly apart, and tell little


def fidelity_section(outcomes: Iterable[TaskOutcome]) -> Section | None:
    """Return the agreement of the search with the finals by task; None where nothing can tell."""
    found = fidelity(outcomes)
    if not found.told:
        return None
    told = [t for t in found.tasks if t.tau is not None]
    about = (
        "Candidates of the search that were measured again in the finals. Tau-b is 1 where both "
        "put them in the same order and 0 where the orders have nothing in common. What is chosen "
        "over the fastest is told by half of the samples, of a choice by the others."
    )
    return Section(
        "How the search ranked",
        (
            Grid(_HEADS, [_row(t) for t in told[:_SHOWN_TASKS]], named=True),
            left_out(len(told) - _SHOWN_TASKS, "task"),
            caption(about),
        ),
        f"{fidelity_text(found)}.",
    )


def fidelity_text(found: Fidelity) -> str:
    """Return the figures over the tasks as a sentence without its full stop."""
    if found.median_tau is None or found.median_candidates is None:
        return "Too few candidates were measured again to judge the search's ranking"
    text = (
        f"The search ranked with a tau-b of {_number(found.median_tau)}, the median of "
        f"{count_text(found.told, 'task')} with {found.median_candidates:g} candidates each"
    )
    if found.median_tau_near is not None:
        text += f" ({_number(found.median_tau_near)} among those {_NEAR})"
    if found.mean_recall is not None:
        text += f", and found {percent_text(found.mean_recall)} of the best {TOP_K} on average"
    if found.worst_excess is not None:
        text += f"; what it chooses is at most {percent_text(found.worst_excess)} over the fastest"
    if found.median_candidates < _FEW:
        text += "; so few candidates are the best alone: give --fidelity 10 for a real test"
    return text


def fidelity_json(outcomes: Iterable[TaskOutcome]) -> dict[str, Any]:
    """Return the same for json.dumps."""
    found: dict[str, Any] = to_json(fidelity(outcomes))
    return found | {"top_k": TOP_K}


def _row(task: TaskFidelity) -> tuple[str | Cell, ...]:
    return (
        Cell(task.name, is_code=True),
        str(task.candidates),
        _number(task.tau),
        _number(task.span),
        _number(task.tau_near),
        percent_text(task.recall),
        percent_text(task.excess),
    )


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else significant(value, 2)
