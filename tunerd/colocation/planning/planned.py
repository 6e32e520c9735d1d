"""All that was found of a mix, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunerd.colocation.plan import Plan
from tunerd.colocation.planning.answer import Answer
from tunerd.colocation.planning.curves import Curves
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.pairs import Pairs
from tunerd.colocation.planning.proof import Proof

PLAN, ANSWER, PAGE = "plan.yaml", "answer.json", "report.html"


@dataclass(frozen=True)
class PlannedMix:
    """What was found, and the folder that keeps it.

    plan: None where nothing fits, or not enough is known. proof: None where it was not run.
    """

    mix: Mix
    folder: Path
    answer: Answer
    plan: Plan | None
    proof: Proof | None
    curves: Curves
    pairs: Pairs
    no_estimate: str  # why pairs are not estimated, "" where they are
    notes: tuple[str, ...] = ()  # of the team's store
    left_out: tuple[str, ...] = ()  # shares that are not tried, and why
    lacking_secs: float = 0.0  # about how long all takes that is not measured yet, and a proof

    @property
    def report(self) -> Path:
        return self.folder / PAGE
