"""A GPU that copies in the order of queueing, when a test says so, and seats on it."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.lib.fake_driver import OK, Answer, Driver, Status, Tensor
from tests.lib.waiting import until
from tunerd.artifacts import captured, parts, staging
from tunerd.artifacts.captured import Recorder, StagedModel, StagedSegments
from tunerd.artifacts.staging import PinnedArrays
from tunerd.colocation import artifacts
from tunerd.colocation.places import completions as completions_module
from tunerd.colocation.places import tracks
from tunerd.colocation.places.base import Done, Fault
from tunerd.colocation.places.completions import Completions
from tunerd.colocation.places.cuda_seats import SegmentedSeat, WholeSeat
from tunerd.colocation.places.tracks import CudaSeat, Track
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Lane
from tunerd.system.cuda_driver import ShortCalls
from tunerd.vocabulary import Arrays, TensorSpec

PART_BYTES = 8
SMALL, LARGE = 1, 10  # floats: a copy, and five parts
LARGE_PARTS = LARGE * 4 // PART_BYTES
CAPTURE, BRING = 90, 91  # streams


# --- a GPU ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Queued:
    """Something on a stream. What is no copy is carried out when it is the stream's turn."""

    stream: int
    run: Callable[[], object]
    is_copy: bool = False  # which a test ends
    may_run: Callable[[], bool] = lambda: True
    is_done: bool = False
    at: int = 0


class QueuedGpu(Driver):
    """Copies to the device end one by one, in the order in which they were queued."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.streams: dict[int, deque[Queued]] = defaultdict(deque)
        self.copies: deque[Queued] = deque()  # to the device, which have not ended
        self.fetches: deque[Queued] = deque()  # to the host
        self.holds_fetches = False  # else they end by themselves
        self.last_record: dict[int, Queued] = {}  # by event
        self.launched: list[int] = []  # graphs that were queued
        self.refused_copies: set[int] = set()  # by their numbers
        self.refuses_fetches = False
        self.bad_events: set[int] = set()
        self.holds_graphs = False
        self._now = self._copies_queued = 0
        self.short = ShortCalls(Status, QueuedCalls(self))

    def cuEventSynchronize(self, event: int) -> Answer:
        while self.copies:
            self.end_copy()
        while self.fetches:
            self.end_fetch()
        return (OK,)

    def queue(self, stream: int, run: Callable[[], object], **more: Any) -> Queued:
        made = Queued(stream, run, **more)
        self.streams[stream].append(made)
        self.go_on()
        return made

    def go_on(self) -> None:
        """Carry out all that waits for no copy."""
        while True:
            heads = [queued[0] for queued in self.streams.values() if queued]
            ready = [head for head in heads if not head.is_copy and head.may_run()]
            if not ready:
                return
            for head in ready:
                self._carry_out(head)

    def end_copy(self) -> Queued:
        """Carry out the copy that was queued first, of those whose streams have come to them."""
        return self._end_first(self.copies)

    def end_fetch(self) -> Queued:
        """Carry out the first to the host in the same way."""
        return self._end_first(self.fetches)

    def _end_first(self, copies: deque[Queued]) -> Queued:
        copy = next(c for c in copies if self.streams[c.stream][0] is c)
        copies.remove(copy)
        self._carry_out(copy)
        self.go_on()
        return copy

    def _carry_out(self, head: Queued) -> None:
        self._now += 1
        self.streams[head.stream].popleft()
        head.run()
        head.is_done, head.at = True, self._now


class QueuedCalls:
    """The driver's functions that a launch calls, as ctypes finds them."""

    def __init__(self, gpu: QueuedGpu) -> None:
        self._gpu = gpu
        for name in ("EventRecord", "EventQuery", "EventElapsedTime", "GraphLaunch"):
            setattr(self, f"cu{name}", functools.partial(getattr(self, name)))
        self.cuStreamWaitEvent = functools.partial(self.StreamWaitEvent)
        self.cuMemcpyHtoDAsync_v2 = functools.partial(self.MemcpyHtoDAsync)
        self.cuMemcpyDtoHAsync_v2 = functools.partial(self.MemcpyDtoHAsync)

    def EventRecord(self, event: int, stream: int) -> int:
        self._gpu.calls.append(("record", stream))
        self._gpu.last_record[event] = self._gpu.queue(stream, lambda: None)
        return OK.value

    def EventQuery(self, event: int) -> int:
        if event in self._gpu.bad_events:
            return Status.CUDA_ERROR_ILLEGAL_ADDRESS.value
        is_done = self._gpu.last_record[event].is_done
        return (OK if is_done else Status.CUDA_ERROR_NOT_READY).value

    def EventElapsedTime(self, found: Any, begin: int, end: int) -> int:
        found._obj.value = self._gpu.last_record[end].at - self._gpu.last_record[begin].at
        return OK.value

    def StreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        self._gpu.calls.append(("wait", stream))
        record = self._gpu.last_record[event]
        self._gpu.queue(stream, lambda: None, may_run=lambda: record.is_done)
        return OK.value

    def MemcpyHtoDAsync(self, there: int, here: int, size: int, stream: int) -> int:
        gpu = self._gpu
        gpu.calls.append(("copy", stream))
        gpu._copies_queued += 1
        if gpu._copies_queued in gpu.refused_copies:
            return Status.CUDA_ERROR_ILLEGAL_ADDRESS.value
        move = functools.partial(ctypes.memmove, there, here, size)
        gpu.copies.append(gpu.queue(stream, move, is_copy=True))
        return OK.value

    def MemcpyDtoHAsync(self, here: int, there: int, size: int, stream: int) -> int:
        gpu = self._gpu
        gpu.calls.append(("fetch", stream))
        if gpu.refuses_fetches:
            return Status.CUDA_ERROR_ILLEGAL_ADDRESS.value
        move = functools.partial(ctypes.memmove, here, there, size)
        made = gpu.queue(stream, move, is_copy=gpu.holds_fetches)
        if made.is_copy:
            gpu.fetches.append(made)
        return OK.value

    def GraphLaunch(self, graph: int, stream: int) -> int:
        gpu = self._gpu
        gpu.calls.append(("launch", stream))
        gpu.launched.append(graph)

        def run() -> None:
            for node in gpu.graphs[graph - 1]:
                node()

        gpu.queue(stream, run, may_run=lambda: not gpu.holds_graphs)
        return OK.value


# --- models on it --------------------------------------------------------------------------------


class Doubling:
    """A recorder of a model with so many floats as its input: y = 2x."""

    def __init__(self, gpu: QueuedGpu, floats: int) -> None:
        self.driver, self.stream, self.short = gpu, CAPTURE, gpu.short
        self.input_specs = (TensorSpec("x", (floats,), "float32"),)
        self.output_specs = (TensorSpec("y", (floats,), "float32"),)
        self.inputs = self.more_inputs()

    entered = Recorder.entered

    def executable(self, graph: Any) -> int:
        return self.driver.ready(graph)

    def more_inputs(self) -> dict[str, Any]:
        return {s.name: Tensor(s.shape, s.dtype) for s in self.input_specs}

    def recorded(self, after: Callable[[dict[str, Any]], None], before: Callable[[], None]) -> Any:
        outputs = {s.name: Tensor(s.shape, s.dtype) for s in self.output_specs}
        x, y = self.inputs["x"].array, outputs["y"].array
        self.driver.captured = []
        before()
        self.driver.captured.append(lambda: np.multiply(x, 2, out=y))
        after(outputs)
        return self.driver.captured, outputs


class Model:
    """Notes what was made of it."""

    def __init__(self, gpu: QueuedGpu, floats: int) -> None:
        self._gpu, self._floats = gpu, floats
        self.made: list[Any] = []

    def staged(self, stream: int, count: int = 1) -> Any:
        recorder: Any = Doubling(self._gpu, self._floats)
        made = [StagedModel(recorder, is_ahead=True) for _ in range(count)]
        self.made += map(weakref.ref, made)
        return made

    def staged_segments(self, stream: int, limits: Any) -> Any:
        recorder: Any = Doubling(self._gpu, self._floats)
        return StagedSegments(recorder, limits)


class TwoPieces:
    """Of a graph, the first of which is all but its last node."""

    def __init__(self, gpu: QueuedGpu, graph: list[Any], stream: int, limits: Any) -> None:
        self.ends, self.segment_secs = (len(graph) - 1, len(graph)), (1e-3, 1e-3)
        self.graphs = [gpu.ready(graph[:-1]), gpu.ready(graph[-1:])]


class World:
    """Lanes on one GPU, whose completions are looked at when a test says so."""

    def __init__(self) -> None:
        self.gpu, self.completions = QueuedGpu(), Completions()
        self.told: list[tuple[str, Done | Fault]] = []
        self._made_streams = 0

    def track(self) -> Track:
        return Track(self._stream, CAPTURE, BRING, self.completions)

    def seat(
        self, name: str, track: Track, floats: int, *, in_segments: bool = False
    ) -> tuple[CudaSeat, Model]:
        model: Any = Model(self.gpu, floats)
        member = Member(name=name, artifact=Path(str(floats)))
        lane = Lane("lane", 100, (name,))
        seat: CudaSeat = (
            SegmentedSeat(member, lane, model, track, 1e-3)
            if in_segments
            else WholeSeat(member, lane, model, track, 2)
        )
        seat.load()
        self.gpu.calls.clear()
        self.gpu.launched.clear()
        return seat, model

    def start(self, name: str, seat: CudaSeat, floats: int, value: float) -> None:
        """Start it with inputs that are in pinned memory."""
        pinned = PinnedArrays(self.gpu, [TensorSpec("x", (floats,), "float32")])
        pinned["x"][...] = value
        self.start_with(name, seat, pinned)

    def start_with(self, name: str, seat: CudaSeat, inputs: Arrays) -> None:
        told = functools.partial(self._note, name)
        seat.start(0, inputs, lambda error: Fault(str(error), ()), told)

    def look(self) -> float | None:
        return self.completions.look()

    def finish(self) -> None:
        """Let all end."""
        while self.look() is not None:
            if self.gpu.copies:
                self.gpu.end_copy()
            if self.gpu.fetches:
                self.gpu.end_fetch()

    def finish_until(self, name: str) -> None:
        """Let all go on until somebody was told."""

        def is_told() -> bool:
            self.look()
            if self.gpu.copies:
                self.gpu.end_copy()
            return any(told == name for told, _ in self.told)

        until(is_told, every=0)

    def answers(self) -> list[tuple[str, float]]:
        """Return who was told and the first value of the outputs."""
        found = []
        for name, answer in self.told:
            assert isinstance(answer, Done)
            assert answer.outputs is not None
            assert len({*answer.outputs["y"].tolist()}) == 1
            found.append((name, float(answer.outputs["y"][0])))
        return found

    def _note(self, name: str, answer: Done | Fault) -> None:
        self.told.append((name, answer))

    def _stream(self) -> int:
        self._made_streams += 1
        return self._made_streams


def given(floats: int, value: float) -> Arrays:
    return {"x": np.full(floats, value, "float32")}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    seconds = iter(range(1 << 30))  # what is expected is due at each look
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(completions_module, "time", clock)
    monkeypatch.setattr(tracks, "time", clock)
    monkeypatch.setattr(parts, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(staging, "_LARGE_BYTES", 2 * PART_BYTES)
    monkeypatch.setattr(captured, "GraphPieces", TwoPieces)
    monkeypatch.setattr(artifacts, "sample_inputs", lambda path: given(int(path.name), 1))
    return World()
