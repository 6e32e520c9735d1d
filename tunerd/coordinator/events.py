"""What happened, and what to do about it: the words between the session and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Failure,
    Measurement,
    Result,
    Task,
    TrainingRow,
)

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerJoined:
    worker_id: str
    role: str  # "tuner" or "slice"
    lane: str | None = None
    device: str | None = None  # what a slice is a share of; None: it has one of its own
    faults_alone: bool = False  # a slice whose fault ends no other of its device


@dataclass(frozen=True)
class WorkerLost:
    worker_id: str
    message: str


@dataclass(frozen=True)
class Proposed:
    worker_id: str
    task_id: str
    candidates: tuple[Candidate, ...]
    exhausted: bool
    message: str = ""
    features: tuple[bytes, ...] = ()  # of each candidate, for its training row


@dataclass(frozen=True)
class BuildsEnded:
    worker_id: str
    results: tuple[tuple[Candidate, Build | Failure], ...]


@dataclass(frozen=True)
class MeasurementsEnded:
    worker_id: str
    results: tuple[tuple[Candidate, Measurement | Failure], ...]


@dataclass(frozen=True)
class BaselineChecked:
    worker_id: str
    result: Measurement | Failure
    busy_secs: float  # of the slice


@dataclass(frozen=True)
class Tick:
    elapsed_secs: float


@dataclass(frozen=True)
class StopRequested:
    reason: str


Event = (
    WorkerJoined
    | WorkerLost
    | Proposed
    | BuildsEnded
    | MeasurementsEnded
    | BaselineChecked
    | Tick
    | StopRequested
)

# --- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Propose:
    worker_id: str
    task: Task
    count: int
    results: tuple[Result, ...]
    exclude: tuple[str, ...]
    rows: tuple[TrainingRow, ...] = ()
    source: str = METASCHEDULE  # that proposes


@dataclass(frozen=True)
class BuildThem:
    worker_id: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Measure:
    worker_id: str
    builds: tuple[Build, ...]
    neighbours: int  # other slices of the device at work
    best_secs: tuple[float | None, ...]  # of each build's task so far, in any slice
    is_alone: bool = False  # on its device, to its end


@dataclass(frozen=True)
class CheckBaseline:
    worker_id: str
    build: Build  # of a default schedule that was measured; no trial
    neighbours: int


@dataclass(frozen=True)
class StoreProposed:
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class StoreBuilt:
    builds: tuple[Build, ...]


@dataclass(frozen=True)
class StoreEnded:
    results: tuple[tuple[Candidate, Measurement | Failure], ...]


@dataclass(frozen=True)
class StoreBaselineCheck:
    task_id: str
    measurement: Measurement
    busy_secs: float


@dataclass(frozen=True)
class Hurry:
    reason: str  # why tuners that work are to end soon, or to be taken for lost


@dataclass(frozen=True)
class Finish:
    reason: str


Work = Propose | BuildThem | Measure | CheckBaseline  # what a worker does until an event ends it
Instruction = Work | StoreProposed | StoreBuilt | StoreEnded | StoreBaselineCheck | Hurry | Finish
