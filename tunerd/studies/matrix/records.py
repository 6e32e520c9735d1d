"""The lines of a matrix's done.jsonl: what has ended, each as a value of its kind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from tunerd.records import typed
from tunerd.studies.matrix.levels import UNKNOWN, Cost
from tunerd.vocabulary import CapProof, Failure, Measurement, to_json
from tunerd.vocabulary.outcome import Verification


@dataclass(frozen=True)
class LevelDone:
    """A share was searched for. Of the first one kept there is a whole `tunerd tune`.

    `trials` are those of the search that ended; older tunerds counted default schedules as well.
    """

    pct: int
    learns_from: tuple[int, ...]
    trials: int
    cost: Cost
    artifact_cost: Cost = UNKNOWN  # the part of it for the whole model


@dataclass(frozen=True)
class ContestDone:
    """The finalists of a task were measured in turns at a share."""

    run_at: int
    task_id: str
    winner: str  # candidate ids
    default: str
    results: dict[str, Measurement | Failure]
    proof: CapProof
    at: float

    @property
    def times(self) -> dict[str, tuple[float, ...]]:
        """The samples of those that were measured."""
        return {c: r.run_secs for c, r in self.results.items() if isinstance(r, Measurement)}


@dataclass(frozen=True)
class ArtifactDone:
    """A share's model, or that of the default schedules, was compiled and verified."""

    tuned_at: int
    verification: Verification


@dataclass(frozen=True, kw_only=True)
class ModelTimes(Measurement):
    """A whole model in a cell."""

    tuned_at: int


@dataclass(frozen=True)
class CellDone:
    """Every model was run at a share, in a round."""

    round: int
    run_at: int
    results: tuple[ModelTimes, ...]
    proof: CapProof
    at: float


StageName = Literal["finalists", "artifacts", "rounds", "models"]


@dataclass(frozen=True)
class StageDone:
    """A stage of all shares has ended, or was interrupted; "models" older tunerds said for two."""

    stage: StageName
    cost: Cost


Done = LevelDone | ContestDone | ArtifactDone | CellDone | StageDone
_KINDS: dict[str, type[Done]] = {
    "level": LevelDone,
    "contest": ContestDone,
    "artifact": ArtifactDone,
    "cell": CellDone,
    "cost": StageDone,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class _Named:
    kind: str


def line_of(done: Done) -> str:
    """Return what has ended as a line of JSON."""
    return json.dumps({"kind": _NAMES[type(done)], **to_json(done)}, separators=(",", ":"))


def done_of(line: str) -> Done:
    """Return what a line of JSON says; ValueError where it says nothing that can end."""
    name = typed.from_json(_Named, line).kind
    if name not in _KINDS:
        raise ValueError(f"nothing of the kind {name[:40]!r} ends in a matrix")
    done: Done = typed.from_json(_KINDS[name], line)
    return done
