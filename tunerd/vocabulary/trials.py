"""A trial: a candidate, its build, how it ends, and the record of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tunerd.vocabulary.measurement import Measurement
from tunerd.vocabulary.model import Task, TensorSpec


class Origin(StrEnum):
    """Where a candidate comes from."""

    DEFAULT = "default"  # DLight's schedule on CUDA, TVM's own lowering on llvm
    SEARCH = "search"


@dataclass(frozen=True)
class Candidate:
    """One schedule of one task. The default has an empty trace."""

    task_id: str
    candidate_id: str  # 16 hex digits of the sha256 of task_id and trace_json
    origin: Origin
    trace_json: str = field(repr=False, default="")  # TVM's Trace.as_json(), dumped without spaces


@dataclass(frozen=True)
class Lesson:
    """What another run measured of one task: it teaches the search, and is no record of this run.

    Its times come from another share or device. They are comparable among themselves alone.
    """

    source: int  # number of the run among those that a warm start takes, from 1
    task: Task  # as that run had it
    results: tuple[tuple[str, float | None], ...]  # trace_json, and seconds of a call or failed
    sms: int | None = None  # of its share of a GPU

    @property
    def key(self) -> str:
        """What tells its times from those of this run and of others."""
        return f"{self.task.task_id}@{self.source}"


@dataclass(frozen=True)
class Build:
    """A candidate compiled to a shared library that a slice loads without a compiler.

    The library exports one function, `main`, that takes the task's arguments in order.
    """

    candidate: Candidate
    library: bytes = field(repr=False)
    library_sha256: str
    build_secs: float
    args: tuple[TensorSpec, ...]  # as the library takes them; a layout rewrite may change weights
    weight_args: tuple[int, ...]
    compiler: str  # "llvm", "nvrtc" or "nvrtc-fallback"
    # Weights in a layout of the library's own: the argument, and its axes in the order in which,
    # read as one, they are the weights as the task has them.
    rewritten: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Stage(StrEnum):
    """Where a trial failed."""

    PROPOSE = "propose"
    BUILD = "build"
    LOAD = "load"
    RUN = "run"
    VERIFY = "verify"


class Kind(StrEnum):
    """How a trial failed. COLLATERAL and INTERRUPTED end nothing: the trial is run again."""

    COMPILE = "compile"
    TIMEOUT = "timeout"
    CRASH = "crash"  # of its process, or of the GPU's context
    REFUSED = "refused"  # it does not run, as with too many threads; nothing else is worse for it
    WRONG_ANSWER = "wrong-answer"
    OUT_OF_MEMORY = "out-of-memory"
    COLLATERAL = "collateral"
    INTERRUPTED = "interrupted"

    @property
    def ends_trial(self) -> bool:
        return self not in (Kind.COLLATERAL, Kind.INTERRUPTED)

    @property
    def is_fault(self) -> bool:
        """Whether it takes its process down, and on a GPU those of the other slices."""
        return self in (Kind.CRASH, Kind.TIMEOUT)


@dataclass(frozen=True)
class Failure:
    """Why a trial has no number."""

    stage: Stage
    kind: Kind
    message: str  # the last lines, at most 2,000 characters


class TrialState(StrEnum):
    PROPOSED = "proposed"
    RUNNING = "running"
    MEASURED = "measured"
    FAILED = "failed"


@dataclass(frozen=True)
class Record:
    """One trial as the store keeps it. Times are seconds since the epoch."""

    trial_id: int
    candidate: Candidate
    state: TrialState
    result: Measurement | Failure | None  # None while it has not ended
    proposed_at: float
    started_at: float | None = None
    ended_at: float | None = None
    slice_id: str | None = None
    build_secs: float | None = None
    library_sha256: str | None = None
    attempts: int = 0  # how often it was started

    @property
    def run_secs(self) -> float | None:
        """Median seconds of a call, or None where the trial has no measurement."""
        return self.result.median_secs if isinstance(self.result, Measurement) else None
