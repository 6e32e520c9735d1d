"""What people are shown at the end of a run: a page, a table, a JSON document."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HistoryPoint:
    """How good the best schedules known at one moment of a run were.

    `weighted_best_secs` is the sum over all tasks of calls per inference times the best median
    so far; None while a task has no number yet. `trials` counts those that had ended.
    """

    elapsed_secs: float
    weighted_best_secs: float | None
    trials: int
