"""What a candidate source is told of trials, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.vocabulary.model import Task
from tunerd.vocabulary.trials import METASCHEDULE, Candidate


@dataclass(frozen=True)
class Result:
    """How a trial of this run ended: seconds of a call, or None where it failed."""

    candidate: Candidate
    run_secs: float | None


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One result of any task, as a source's cost model learns it; None where the trial failed."""

    task_id: str
    candidate_id: str
    features: bytes  # as the source gave them with the candidate
    run_secs: float | None


@dataclass(frozen=True)
class TransferredResults:
    """What another run measured of one task: it teaches a source, and is not part of this run.

    Its times come from another share or device. They are comparable among themselves alone.
    """

    run: int  # number of the run among those that a warm start takes, from 1
    task: Task  # as that run had it
    results: tuple[tuple[str, float | None], ...]  # recipe, and seconds of a call or failed
    sms: int | None = None  # of its share of a GPU
    source: str = METASCHEDULE  # whose recipes they are

    @property
    def key(self) -> str:
        """What tells its times from those of this run and of others."""
        return f"{self.task.task_id}@{self.run}"


@dataclass(frozen=True)
class Proposal:
    """What a source answers. No candidates and `exhausted`: it has nothing more to propose."""

    candidates: tuple[Candidate, ...]
    exhausted: bool
    message: str
    search_secs: float
    features: tuple[bytes, ...] = ()  # of each candidate, for its training row
