"""A trial: a candidate, its build, how it ends, and the record of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from tunerd.vocabulary.measurement import Measurement
from tunerd.vocabulary.model import FP32, Layout, Task, TensorSpec

DEFAULT_SOURCE = "default"  # DLight's schedule on CUDA, TVM's own lowering on llvm
METASCHEDULE = "metaschedule"
TRITON = "triton"
VNNI = "vnni"  # AVX-512's products of 8 bits
FMA = "fma"  # products of fp32 in a CPU's vectors
CUBLASLT = "cublaslt"
CUDNN = "cudnn"
# Sources whose kernels need a library where they run: on request alone.
LIBRARIES = (CUBLASLT, CUDNN)
_NAMELESS = (DEFAULT_SOURCE, METASCHEDULE)  # sources whose ids are older than the others


@dataclass(frozen=True)
class Candidate:
    """One way to compute one task, as its source makes it from a recipe."""

    task_id: str
    candidate_id: str  # as `candidate_id` makes it
    source: str  # name of the candidate source
    recipe: str = field(repr=False, default="")  # opaque to all but its source; "": the default

    @classmethod
    def of_recipe(cls, task_id: str, recipe: str, *, source: str) -> Self:
        """Return the candidate that a source makes of a task by a recipe."""
        return cls(task_id, candidate_id(task_id, recipe, source=source), source, recipe)

    @property
    def is_default(self) -> bool:
        return self.source == DEFAULT_SOURCE

    @property
    def origin(self) -> str:
        """What documents said of a candidate before there were several sources."""
        return origin_of(self.source)

    IN_JSON = ("origin",)


def candidate_id(task_id: str, recipe: str, *, source: str = METASCHEDULE) -> str:
    """Return the id of a candidate: 16 hex digits that follow from what it is."""
    parts = (task_id, recipe) if source in _NAMELESS else (task_id, source, recipe)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def default_candidate(task: Task) -> Candidate:
    """Return the task's default schedule as a candidate."""
    return Candidate.of_recipe(task.task_id, "", source=DEFAULT_SOURCE)


def origin_of(source: str) -> str:
    """Return the word of older documents and exports for a source: "default" or "search"."""
    return "default" if source == DEFAULT_SOURCE else "search"


def source_of(origin: str) -> str:
    """Return the source of a candidate that was written before there were several."""
    if origin not in ("default", "search"):
        raise ValueError(f"a candidate comes from 'default' or 'search', not {origin[:40]!r}")
    return DEFAULT_SOURCE if origin == "default" else METASCHEDULE


@dataclass(frozen=True)
class LibraryCall:
    """A call of a library that compiled code makes."""

    library: str  # of LIBRARIES
    text: str  # that the library's part of tunerd reads; runners are sent it


@dataclass(frozen=True)
class Build:
    """A candidate compiled to a shared library that a slice loads without a compiler.

    The library exports one function, `main`, that takes the task's arguments in order; of several
    models, those of `in_lanes`.
    """

    candidate: Candidate
    library: bytes = field(repr=False)
    library_sha256: str
    build_secs: float
    # As the library takes them: weights may have another layout than the task's, or another type.
    args: tuple[TensorSpec, ...]
    weight_args: tuple[int, ...]
    compiler: str  # "llvm", "nvrtc", "nvrtc-fallback", Triton and its version, or a library
    layouts: tuple[tuple[int, Layout], ...] = ()  # of arguments: of weights in one of its own
    # What `main` takes after its arguments: memory that starts as zeros and that nobody reads.
    scratch: tuple[TensorSpec, ...] = ()
    precision: str = FP32  # of the task
    tenants: int = 1  # of the task
    calls: tuple[LibraryCall, ...] = ()  # that it makes


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
