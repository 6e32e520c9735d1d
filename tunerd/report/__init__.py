"""What people are shown at the end of a run: a page, a table, Markdown, a JSON document.

A run folder's store -> Story -> page | markdown | document, of one run or of several.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.vocabulary import Conditions


@dataclass(frozen=True)
class HistoryPoint:
    """How good the best schedules known at one moment of a run were.

    `weighted_best_secs` is the sum over all tasks of calls per inference times the best median
    so far; None while a task has no number yet. `trials` counts those that had ended.
    """

    elapsed_secs: float
    weighted_best_secs: float | None
    trials: int


@dataclass(frozen=True)
class ConditionPoint:
    """The device of one slice while one of its trials ran."""

    elapsed_secs: float
    slice_id: str
    conditions: Conditions


@dataclass(frozen=True)
class FailureKind:
    """Trials that failed in one stage in one way, and what the last of them said."""

    name: str  # "build: compile"
    trials: int
    message: str  # of the last one
    trial_id: int  # the last one
