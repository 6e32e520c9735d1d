"""Large inputs in parts, on a GPU that copies in the order of queueing, when a test says so."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.lib.waiting import until
from tests.unit.test_captured import OK, Answer, Driver, Status, Tensor
from tunerd.artifacts import captured, parts, staging
from tunerd.artifacts.captured import Recorder, StagedModel, StagedSegments
from tunerd.artifacts.staging import PinnedArrays
from tunerd.colocation import artifacts
from tunerd.colocation.places import completions as completions_module
from tunerd.colocation.places import tracks
from tunerd.colocation.places.base import Done, Fault
from tunerd.colocation.places.completions import Completions, Entry
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

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


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


# --- what holds ----------------------------------------------------------------------------------


def test_copies_are_cut_into_parts_of_the_same_bytes(world: World) -> None:
    made = parts.Parts(world.gpu, world.gpu.short).of(
        [(100, 200, 3), (300, 400, 17), (500, 600, 2)]
    )
    assert [part.copies for part in made] == [
        [(100, 200, 3), (300, 400, 5)],
        [(305, 405, 8)],
        [(313, 413, 4), (500, 600, 2)],
    ]
    assert made[0].event == made[2].event != made[1].event
    assert [parts.go_in_parts(size) for size in (2 * PART_BYTES, 2 * PART_BYTES + 1)] == [
        False,
        True,
    ]


def test_two_parts_are_in_flight_and_the_graph_is_queued_with_the_last(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE)
    world.start("large", seat, LARGE, 3)
    for ended in range(LARGE_PARTS):
        left = LARGE_PARTS - ended
        assert len(world.gpu.copies) == min(left, 2)
        assert bool(world.gpu.launched) == (left <= 2)
        assert world.look() is not None
        assert len(world.gpu.copies) == min(left, 2)
        assert not world.told
        assert world.gpu.end_copy().stream == BRING
        assert world.look() is not None or left == 1
    world.finish()
    assert world.answers() == [("large", 6)]
    assert len(world.gpu.launched) == 1


def test_a_copy_of_another_lane_goes_before_the_rest_of_the_parts(world: World) -> None:
    large, _ = world.seat("large", world.track(), LARGE)
    small, _ = world.seat("small", world.track(), SMALL)
    world.start("large", large, LARGE, 3)
    world.start("small", small, SMALL, 4)
    streams = []
    while world.look() is not None:
        if world.gpu.copies:
            streams.append(world.gpu.end_copy().stream)
    assert streams == [BRING, BRING, 2, BRING, BRING, BRING]
    assert world.answers() == [("small", 8), ("large", 6)]


def test_launches_of_a_lane_stay_in_order_whoever_they_are_of(world: World) -> None:
    track = world.track()
    large, _ = world.seat("large", track, LARGE)
    small, _ = world.seat("small", track, SMALL)
    for number, (name, seat, floats) in enumerate(
        [("large", large, LARGE), ("small", small, SMALL), ("large", large, LARGE)], 1
    ):
        world.start(name, seat, floats, number)
    assert not world.gpu.launched
    assert {copy.stream for copy in world.gpu.copies} == {BRING}
    world.start("small", small, SMALL, 4)
    world.finish()
    assert world.answers() == [("large", 2), ("small", 4), ("large", 6), ("small", 8)]
    assert not track.waiting
    assert not track.under_way


def test_a_launch_is_brought_beside_the_one_that_runs(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE)
    world.gpu.holds_graphs = True
    world.start("first", seat, LARGE, 1)
    world.start("second", seat, LARGE, 2)
    while world.gpu.copies:
        world.gpu.end_copy()
        world.look()
    assert len(world.gpu.launched) == 2
    world.gpu.holds_graphs = False
    world.gpu.go_on()
    world.finish()
    assert world.answers() == [("first", 2), ("second", 4)]


def test_inputs_in_no_pinned_memory_are_written_there_by_a_thread_while_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, usual, threads = threading.Event(), PinnedArrays.write, list[str]()

    def write(arrays: PinnedArrays, given: Any) -> None:
        if arrays["x"].size == LARGE:
            threads.append(threading.current_thread().name)
            may_write.wait()
        usual(arrays, given)

    track = world.track()
    large, _ = world.seat("large", track, LARGE)
    small, _ = world.seat("small", world.track(), SMALL)
    monkeypatch.setattr(PinnedArrays, "write", write)
    world.start("first", large, LARGE, 1)
    while not world.gpu.launched:
        world.gpu.end_copy()
        world.look()
    assert not threads
    # While the last parts of the one before are in flight.
    world.start_with("large", large, given(LARGE, 3))
    while world.gpu.copies:
        world.gpu.end_copy()
        world.look()
    until(lambda: bool(threads))
    world.start("small", small, SMALL, 4)
    world.finish_until("small")
    assert ("small", 8) in world.answers()
    assert not world.gpu.copies
    may_write.set()
    world.finish_until("large")
    assert world.answers()[-1] == ("large", 6)
    assert threading.current_thread().name not in threads


def test_small_inputs_are_queued_as_they_were(world: World) -> None:
    track = world.track()
    seat, model = world.seat("small", track, SMALL)
    world.seat("large", track, LARGE)
    lines = len(world.completions._lines)
    for value in (1, 2):
        world.start("small", seat, SMALL, value)
    each = [("record", 1), ("copy", 1), ("launch", 1), ("record", 1)]
    assert world.gpu.calls == each * 2
    assert len(world.completions._lines) == lines
    assert [made()._parts for made in model.made] == [None, None]
    world.finish()
    assert world.answers() == [("small", 2), ("small", 4)]


def test_the_time_of_a_launch_begins_when_it_has_its_lane(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE)
    world.start("alone", seat, LARGE, 1)
    assert world.gpu.calls[:2] == [("record", track.stream), ("copy", BRING)]
    world.gpu.holds_graphs = True
    world.start("behind", seat, LARGE, 2)
    while world.gpu.copies:
        world.gpu.end_copy()
        world.look()
    world.gpu.holds_graphs = False
    world.gpu.go_on()
    world.finish()
    secs = [answer.secs for _, answer in world.told if isinstance(answer, Done)]
    assert secs[0] > secs[1] > 0  # the copies are in the first one alone
    begins = [call for call in world.gpu.calls if call in (("wait", 1), ("record", 1))]
    assert begins == [("record", 1), ("wait", 1), ("record", 1), ("wait", 1)] + [("record", 1)] * 2


def test_what_is_expected_of_a_launch_begins_when_it_is_queued(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE)
    vars(seat)["_secs"] = 1000.0
    world.start("alone", seat, LARGE, 1)
    assert not track.line.entries
    while not track.line.entries:
        world.gpu.end_copy()
        world.look()
    (entry,) = track.line.entries
    assert 0 < entry.secs < 1000  # the copies have gone by
    vars(seat)["_secs"] = 1000.0
    world.start("behind", seat, LARGE, 1)
    while len(track.line.entries) < 2:
        world.gpu.end_copy()
        world.look()
    assert track.line.entries[1].secs == 1000


def test_where_the_driver_refuses_a_part_the_request_alone_is_told_once(world: World) -> None:
    track = world.track()
    seat, model = world.seat("large", track, LARGE)
    world.gpu.refused_copies = {world.gpu._copies_queued + 3}
    world.start("large", seat, LARGE, 1)
    world.start("next", seat, LARGE, 2)
    world.gpu.end_copy()
    world.look()
    ((name, fault),) = world.told
    assert (name, isinstance(fault, Fault)) == ("large", True)
    gc.collect()
    assert all(made() is not None for made in model.made)  # a part of it may still be written
    world.told.clear()
    world.finish()
    assert world.answers() == [("next", 4)]
    assert len(world.gpu.launched) == 1
    assert len(vars(seat)["_free"]) == 1


def test_what_a_part_has_met_is_told_once_and_no_graph_follows(world: World) -> None:
    track = world.track()
    seat, model = world.seat("large", track, LARGE)
    world.start("large", seat, LARGE, 1)
    world.gpu.bad_events = {int(event) for event in model.made[0]()._parts._events}
    world.gpu.end_copy()
    world.finish()
    ((_, fault),) = world.told
    assert isinstance(fault, Fault)
    assert "ILLEGAL_ADDRESS" in fault.reason
    assert not world.gpu.launched
    assert len(vars(seat)["_free"]) == 1


def test_a_launch_that_is_queued_tells_by_itself_what_its_parts_have_met(world: World) -> None:
    track = world.track()
    seat, model = world.seat("large", track, LARGE)
    world.start("large", seat, LARGE, 1)
    while not world.gpu.launched:
        world.gpu.end_copy()
        world.look()
    staged = model.made[0]()
    world.gpu.bad_events = {*map(int, staged._parts._events), staged._marked._last}
    world.finish()
    assert [type(answer) for _, answer in world.told] == [Fault]


@pytest.mark.parametrize("ended_parts", [0, 1, 2])
def test_nothing_follows_on_a_lane_that_was_left(world: World, ended_parts: int) -> None:
    track = world.track()
    large, model = world.seat("large", track, LARGE)
    small, _ = world.seat("small", track, SMALL)
    idle, _ = world.seat("idle", track, SMALL)
    world.start("large", large, LARGE, 1)
    world.start("small", small, SMALL, 2)
    for _ in range(ended_parts):
        world.gpu.end_copy()
        world.look()
    queued = list(world.gpu.calls)
    assert {*large.leave()} == {large, small}
    assert not idle.is_lost
    again = large.anew()
    del large, small
    gc.collect()
    assert model.made[0]() is not None  # what is in flight writes there
    assert world.look() is not None
    assert world.gpu.calls == queued
    world.finish()
    assert world.gpu.calls == queued
    assert not world.told
    gc.collect()
    assert model.made[0]() is None
    again.load()
    world.start("again", again, LARGE, 3)
    world.start("idle", idle, SMALL, 4)
    world.finish()
    assert world.answers() == [("again", 6), ("idle", 8)]


def test_who_closes_waits_for_what_is_brought(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE)
    assert world.look() is None
    world.start("large", seat, LARGE, 1)
    while not world.told:
        assert world.look() is not None or world.told
        if world.gpu.copies:
            world.gpu.end_copy()
    world.finish()
    assert world.look() is None


def test_lanes_that_bring_at_once_have_two_parts_in_flight_each(world: World) -> None:
    seats = [world.seat(name, world.track(), LARGE)[0] for name in "ab"]
    for value, seat in enumerate(seats, 1):
        world.start("ab"[value - 1], seat, LARGE, value)
    assert len(world.gpu.copies) == 4
    world.gpu.end_copy()
    world.look()
    assert len(world.gpu.copies) == 4
    world.finish()
    assert sorted(world.answers()) == [("a", 2), ("b", 4)]


def test_a_member_in_segments_has_its_inputs_brought_before_the_first(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE, in_segments=True)
    small, _ = world.seat("small", track, SMALL, in_segments=True)
    for value in (1, 2):
        world.told.clear()
        world.start("large", seat, LARGE, value)
        world.start("small", small, SMALL, 5)
        assert not world.gpu.launched
        assert len(world.gpu.copies) == 2
        world.finish()
        assert sorted(world.answers()) == [("large", 2 * value), ("small", 10)]
        assert len(world.gpu.launched) == 4
        world.gpu.launched.clear()


def test_a_segment_that_follows_goes_behind_what_is_being_brought(world: World) -> None:
    track = world.track()
    large, _ = world.seat("large", track, LARGE)
    pieces, _ = world.seat("pieces", track, SMALL, in_segments=True)
    world.gpu.holds_graphs = True
    world.start("pieces", pieces, SMALL, 5)
    world.start("large", large, LARGE, 1)
    world.gpu.holds_graphs = False
    while len(world.gpu.copies) > 2:
        world.gpu.end_copy()
    world.gpu.end_copy()  # of the first segment, which ends
    world.look()
    assert len(world.gpu.launched) == 1
    assert len(track.waiting) == 2
    world.finish()
    assert world.answers() == [("large", 2), ("pieces", 10)]


def test_work_that_an_end_adds_to_a_line_that_was_looked_at_is_not_forgotten() -> None:
    completions = Completions()
    first, second = completions.line(), completions.line()
    done = SimpleNamespace(is_done=lambda: True)
    more = Entry(done, 0.0, lambda error: None)
    completions.add(second, Entry(done, 0.0, lambda error: completions.add(first, more)))
    assert completions.look() == 0.0
    assert completions.look() is None
