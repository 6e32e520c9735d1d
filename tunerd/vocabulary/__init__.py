"""The values that cross a boundary between modules, in the order in which a run makes them.

    Model -> Task -> Candidate -> Build -> Measurement | Failure -> Record -> Outcome

Every value is a frozen dataclass with units in its names; `outcome` has the last. A trial is one
candidate of one task on its way through a run:

    proposed ----> running ----> measured
       |  ^           |
       |  |           +--------> failed      (stage, kind)
       |  +-- collateral, interrupted        (back to the queue, without blame)
       +-----------------------> failed      (in the build)

A failure is never a number: a trial ends measured or failed, once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np
    import onnx


# --- model and tasks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (elements per axis, all positive) and NumPy dtype name of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Model:
    """An ONNX model with every shape fixed, simplified; what the tasks are extracted from."""

    name: str
    digest: str  # sha256 of the weights and the graph with its shapes fixed, hex
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    proto: onnx.ModelProto = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()  # what import had to change, for the report


@dataclass(frozen=True)
class TargetSpec:
    """What code is generated for. `json` is TVM's own target description."""

    kind: str  # "llvm" or "cuda"
    json: str  # of the slice's host or GPU, never the builder's

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"


@dataclass(frozen=True)
class Task:
    """One distinct kernel of a model."""

    task_id: str  # 12 hex digits, the same for equal workloads of any model, in any process
    name: str
    weight: int  # calls per inference
    flops: float  # of one call; 0 where TVM cannot tell
    args: tuple[TensorSpec, ...]  # the function's arguments in order, outputs last
    weight_args: tuple[int, ...]  # which arguments hold constants of the model
    target: TargetSpec = field(repr=False)
    mod_json: str = field(repr=False)  # the unscheduled IRModule, as tvm.ir.save_json writes it


# --- search and build --------------------------------------------------------------------------


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


# --- slices and measurement --------------------------------------------------------------------


@dataclass(frozen=True)
class SliceSpec:
    """A share of a device, as planned. `environment` is exactly what its runner adds to its own."""

    slice_id: str  # "mps-0-1": kind, device index, position on the device
    kind: str  # "mps", "cpu", "whole", "simulated"
    pct: int  # of the device, 1..100
    device_index: int = 0
    gpu_uuid: str | None = None
    cores: tuple[int, ...] = ()  # for cpu slices: the cores that the runner is pinned to
    lane: str | None = None  # workers of one lane share cores: one of them works at a time
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CapProof:
    """What a slice obtained, read inside its client before the first measurement."""

    slice_id: str
    device: str  # GPU or CPU model
    sm_count: int  # SMs that the client sees; cores on CPUs
    device_sm_count: int  # SMs (or cores) of the whole device
    mechanism: str  # "mps", "affinity", "none", "simulated"
    attached: bool  # the client is in the MPS server's list; true where none is needed
    driver: str = ""
    compute_capability: str = ""  # "9.0"
    runner_pid: int = 0


@dataclass(frozen=True)
class Profile:
    """How to measure. Part of every record, because it changes the numbers.

    weights: "model", "cold" or "warm"; `profiles` says what they mean.
    model_bytes: that an inference of the model touches, about; 0 where nobody knows.
    hopeless_after, hopeless_over: what has so many samples gets no more, where each of them is so
        many times as long as all of its best rival's.
    """

    name: str
    weights: str = "model"
    model_bytes: int = 0
    min_samples: int = 3
    max_samples: int = 5
    min_sample_secs: float = 0.002  # a sample averages as many calls as fill this
    max_total_secs: float = 0.2  # stop sampling when this much time was spent
    cuda_graph: bool = True
    hopeless_after: int = 8
    hopeless_over: float = 2.0


SEARCH = Profile("search-v6", hopeless_after=2)
MODEL = Profile(
    "model-v1", min_samples=20, max_samples=60, min_sample_secs=0.05, max_total_secs=8.0
)


@dataclass(frozen=True)
class Conditions:
    """The device while a trial ran. None: not known here.

    `disturbed_by` says what made the trial slower than it is, "" where nothing was seen: processes
    or memory of others on the device, or clocks that heat or power held down.
    """

    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    neighbours: int | None = None  # other busy slices of the device
    strangers: int | None = None  # processes of others on the device
    disturbed_by: str = ""

    @property
    def is_disturbed(self) -> bool:
        return bool(self.disturbed_by)


@dataclass(frozen=True)
class Measurement:
    """Raw samples: each the mean time of one call, in seconds."""

    run_secs: tuple[float, ...]
    calls_per_sample: int
    profile: str
    slice_id: str
    sm_count: int
    conditions: Conditions = Conditions()

    def beside(self, neighbours: int) -> Self:
        """Say how many neighbours worked; a slice knows only how many there are."""
        return replace(self, conditions=replace(self.conditions, neighbours=neighbours))

    @property
    def median_secs(self) -> float:
        ordered = sorted(self.run_secs)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return 0.5 * (ordered[middle - 1] + ordered[middle])


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


class Activity(StrEnum):
    """What a worker does with its time."""

    SEARCH = "search"
    BUILD = "build"
    MEASURE = "measure"
    WAIT = "wait"  # it has work to do and lacks something: a core, a build
    IDLE = "idle"


@dataclass(frozen=True)
class Span:
    """A stretch of one worker's time, as the driver saw it. Seconds since the epoch."""

    worker: str  # "tuner-0-0", or a slice's id
    activity: Activity
    start: float
    end: float
    role: str = ""  # "tuner" or "slice"
    session: int = 1  # of the run, from 1
    items: int = 0  # candidates proposed, built or measured
    task_id: str = ""  # of a search
    busy_secs: float | None = None  # in the worker; the rest is Ray's way there and back
    cpu_secs: float | None = None  # of the worker's process, all its threads


class Phase(StrEnum):
    """What a session does, one after the other."""

    START = "start-up"  # until the search begins; the tuners may still be importing
    SEARCH = "search"
    FINALS = "finalists"
    MODEL = "whole model"  # compile, verify and time it


@dataclass(frozen=True)
class PhaseTime:
    """How long a session's phase took. Seconds since the epoch."""

    phase: Phase
    start: float
    end: float
    session: int = 1
    # Of all processes, by core that the driver may use; empty where the kernel does not tell.
    core_busy_secs: tuple[tuple[int, float], ...] = ()


def to_json(value: Any) -> Any:
    """Return `value` as what json.dumps takes: dataclasses become dicts, tuples lists.

    Protocol buffers and arrays are left out: a value is described, its bulk is not copied.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr
        }
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(v) for v in value]
    return value


def finite(document: Any) -> Any:
    """Return a JSON document with null for each number that is not finite: JSON has none."""
    if isinstance(document, dict):
        return {key: finite(each) for key, each in document.items()}
    if isinstance(document, list):
        return [finite(each) for each in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


Arrays = dict[str, "np.ndarray"]
