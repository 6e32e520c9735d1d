"""A GPU of which only the times are simulated: one engine for copies a direction, and streams.

What runs on it is what runs on a GPU: the engine's place, its tracks and the staged models of
tunerd.artifacts, down to the driver's calls. Only the driver is another one. It carries out what is
queued on a stream in order; copies take turns, those of one direction by the time at which their
stream had come to them; and a graph has its stream for so long, whatever the others do, as in
shares of their own: for longer in a smaller one than it was made for. No bytes are moved by what
the GPU does, whose copies take nothing of the host. What the host copies it copies. Calls of the
driver return at once.
"""

from __future__ import annotations

import enum
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.colocation.simulated import Calls, SimulatedGpu
from tunerd.artifacts.captured import Recorder, StagedModel
from tunerd.artifacts.segments import Cut
from tunerd.colocation import artifacts
from tunerd.colocation.places.base import Place
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.green_contexts import Part
from tunerd.colocation.places.staged import InPieces
from tunerd.system.cuda_driver import ShortCalls
from tunerd.vocabulary import TensorSpec

# Of an H200: 38.5 MB took 726 us, and 602 KB alone 26 us (tunerd/artifacts/parts.py).
COPY_SECS, BYTES_PER_SEC = 10e-6, 53e9


class Status(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600


OK = Status.CUDA_SUCCESS
_Answer = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class _Queued:
    """Something on a stream. ends_at: infinite until it has begun."""

    number: int
    queued_at: float
    secs: float = 0.0
    engine: str = ""  # which it needs for itself
    after: _Queued | None = None  # which has to have ended
    ends_at: float = math.inf


class CaptureMode(enum.Enum):
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class TimedDriver:
    """The driver's calls that staged models make."""

    CUresult, CUstreamCaptureMode = Status, CaptureMode

    def __init__(self) -> None:
        self.short = ShortCalls(Status, _Library(self))
        self.graphs: list[list[tuple[str, float]]] = []  # what each does: an engine, seconds
        self.pct_of: dict[int, int] = {}  # of the device, by stream
        self.captured: list[tuple[str, float]] = []
        self._streams: dict[int, deque[_Queued]] = {}
        self._free_at: dict[int | str, float] = {}  # of streams and engines
        self._records: dict[int, _Queued] = {}  # by event, the last one
        self._events = self._numbers = 0
        self._memory: dict[int, Any] = {}

    def queue(self, stream: int, secs: float = 0.0, **more: Any) -> _Queued:
        self._numbers += 1
        made = _Queued(self._numbers, time.monotonic(), secs, **more)
        self._streams.setdefault(stream, deque()).append(made)
        return made

    def copy(self, engine: str, size: int, stream: int) -> None:
        self.queue(stream, copy_secs(size), engine=engine)

    def record(self, event: int, stream: int) -> None:
        self._records[event] = self.queue(stream)

    def wait(self, stream: int, event: int) -> None:
        self.queue(stream, after=self._records.get(event))

    def launch(self, graph: int, stream: int) -> None:
        for engine, amount in self.graphs[graph - 1]:
            secs = amount if engine else amount / self.pct_of.get(stream, 100)
            self.queue(stream, secs, engine=engine)

    def ended_at(self, event: int) -> float:
        """Return when an event was or will be, as far as that is known now."""
        self._go_on(time.monotonic())
        return self._records[event].ends_at

    def _go_on(self, now: float) -> None:
        """Carry out what has begun until now, in the order of beginning."""
        while self._streams:
            begins_at, _, _, stream = min(map(self._turn, self._streams))
            if begins_at > now:
                return
            head = self._streams[stream].popleft()
            if not self._streams[stream]:
                del self._streams[stream]
            head.ends_at = begins_at + head.secs
            self._free_at[stream] = head.ends_at
            if head.engine:
                self._free_at[head.engine] = head.ends_at

    def _turn(self, stream: int) -> tuple[float, float, int, int]:
        """Return when the first of a stream can begin, and what decides between two of them."""
        head = self._streams[stream][0]
        ready_at = max(self._free_at.get(stream, 0.0), head.queued_at)
        if head.after is not None:
            ready_at = max(ready_at, head.after.ends_at)
        return max(ready_at, self._free_at.get(head.engine, 0.0)), ready_at, head.number, stream

    # --- as cuda.bindings has them -------------------------------------------------------------

    def cuMemHostAlloc(self, size: int, flags: int) -> _Answer:
        made = np.ones(size, np.uint8)  # all of its pages are there
        self._memory[made.ctypes.data] = made
        return OK, made.ctypes.data

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> _Answer:
        return OK, mode

    def cuMemFreeHost(self, address: int) -> _Answer:
        del self._memory[address]
        return (OK,)

    def cuCtxGetCurrent(self) -> _Answer:
        return OK, 1

    def cuCtxPushCurrent(self, context: int) -> _Answer:
        return (OK,)

    def cuCtxPopCurrent(self) -> _Answer:
        return OK, 1

    def cuStreamGetCtx(self, stream: int) -> _Answer:
        return OK, 1

    def cuEventCreate(self, flags: int) -> _Answer:
        self._events += 1
        return OK, self._events

    def cuEventDestroy(self, event: int) -> _Answer:
        return (OK,)

    def cuEventSynchronize(self, event: int) -> _Answer:
        while self.ended_at(event) > time.monotonic():
            time.sleep(0)
        return (OK,)

    def cuMemcpyDtoHAsync(self, here: int, there: int, size: int, stream: int) -> _Answer:
        self.captured.append(("out", copy_secs(size)))
        return (OK,)

    def cuMemcpyDtoDAsync(self, to: int, there: int, size: int, stream: int) -> _Answer:
        return (OK,)

    def cuGraphDestroy(self, graph: object) -> _Answer:
        return (OK,)

    def cuGraphExecDestroy(self, graph: object) -> _Answer:
        return (OK,)


def copy_secs(size: int) -> float:
    return COPY_SECS + size / BYTES_PER_SEC


class _Library:
    """The driver's functions as ctypes finds them."""

    def __init__(self, driver: TimedDriver) -> None:
        self._driver = driver
        for name in ("EventRecord", "EventQuery", "EventElapsedTime", "GraphLaunch"):
            setattr(self, f"cu{name}", functools.partial(getattr(self, f"_{name}")))
        self.cuStreamWaitEvent = functools.partial(self._StreamWaitEvent)
        self.cuMemcpyHtoDAsync_v2 = functools.partial(self._MemcpyHtoDAsync)
        self.cuMemcpyDtoHAsync_v2 = functools.partial(self._MemcpyDtoHAsync)

    def _EventRecord(self, event: int, stream: int) -> int:
        self._driver.record(event, stream)
        return OK.value

    def _EventQuery(self, event: int) -> int:
        is_done = self._driver.ended_at(event) <= time.monotonic()
        return (OK if is_done else Status.CUDA_ERROR_NOT_READY).value

    def _EventElapsedTime(self, found: Any, begin: int, end: int) -> int:
        found._obj.value = 1e3 * (self._driver.ended_at(end) - self._driver.ended_at(begin))
        return OK.value

    def _StreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        self._driver.wait(stream, event)
        return OK.value

    def _MemcpyHtoDAsync(self, there: int, here: int, size: int, stream: int) -> int:
        self._driver.copy("in", size, stream)
        return OK.value

    def _MemcpyDtoHAsync(self, here: int, there: int, size: int, stream: int) -> int:
        self._driver.copy("out", size, stream)
        return OK.value

    def _GraphLaunch(self, graph: int, stream: int) -> int:
        self._driver.launch(graph, stream)
        return OK.value


class TimedGpu(SimulatedGpu):
    """A GPU with that driver."""

    def __init__(self) -> None:
        super().__init__(Calls(0.0, 0.0, 0.0))
        self.driver: Any = TimedDriver()
        self._driver = self.driver


class _Contexts:
    """Cuts it into shares, which are only as long as graphs take there."""

    def __init__(self, gpu: TimedGpu) -> None:
        self._gpu = gpu

    def cut(self, names_and_pcts: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
        return tuple(Part(name, pct, frozenset()) for name, pct in names_and_pcts)

    def stream(self, part: Part) -> int:
        made = self._gpu.stream()
        self._gpu.driver.pct_of[made] = part.sm_count
        return made

    def close(self) -> None: ...


class _Tensor:
    """What is on the device: an address that nobody reads."""

    def __init__(self, number: int) -> None:
        self._number = number

    def data_ptr(self) -> int:
        return self._number << 32


class _Recorder:
    """A Recorder whose graphs take so long on a hundredth of the device."""

    entered = Recorder.entered

    def __init__(self, gpu: TimedGpu, folder: Path, secs: float, stream: int) -> None:
        self.driver, self.short, self.stream = gpu.driver, gpu.driver.short, stream
        self.input_specs = artifacts.inputs_of(folder)
        self.output_specs = artifacts.outputs_of(folder)
        self._secs = secs
        self.inputs = self.more_inputs()

    def more_inputs(self) -> dict[str, Any]:
        return _tensors(self.input_specs)

    def recorded(self, after: Callable[[dict[str, Any]], None], before: Callable[[], None]) -> Any:
        self.driver.captured = [("", self._secs)]
        outputs = _tensors(self.output_specs)
        before()
        after(outputs)
        return self.driver.captured, outputs

    def executable(self, graph: Any) -> int:
        self.driver.graphs.append(graph)
        return len(self.driver.graphs)


def _tensors(specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    return {spec.name: _Tensor(number) for number, spec in enumerate(specs, 1)}


class TimedModel:
    """Runs whole only. secs: on a hundredth of the device."""

    def __init__(self, gpu: TimedGpu, folder: Path, secs: float) -> None:
        self._gpu, self._folder, self._secs = gpu, folder, secs

    def staged_segments(self, stream: int, limits: Cut) -> InPieces:
        raise NotImplementedError("members are whole here")

    def staged(self, stream: int, count: int = 1) -> tuple[StagedModel, ...]:
        recorder: Any = _Recorder(self._gpu, self._folder, self._secs, stream)
        return tuple(StagedModel(recorder, is_ahead=count > 1) for _ in range(count))


def timed_place(secs_and_pcts: Mapping[Path, tuple[float, int]]) -> Place:
    """Return a place whose artifacts take so long each on so much of the device."""
    gpu = TimedGpu()

    def open_model(path: Path) -> TimedModel:
        secs, pct = secs_and_pcts[path]
        return TimedModel(gpu, path, secs * pct)

    place = CudaStreamsPlace(gpu, open_model, lambda: _Contexts(gpu))
    vars(place)["kind"] = "simulated: a GPU of which the times are"
    return place
