"""Members on streams of one GPU, in this process: each seat a CUDA graph with buffers of its own.

A member is loaded once, its weights are shared by its seats. The hardware divides the GPU among
the streams of lanes of the whole; a lane of less is a green context with SMs of its own. A kernel
cannot be ended but with the process, and an error that leaves the context dead takes all seats with
it: only a new process goes on then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tunerd.artifacts import loading
from tunerd.artifacts.segments import Pauses, Recorded, SegmentedCapture
from tunerd.colocation import artifacts
from tunerd.colocation.places.base import Fault, Loaded, Place, Told
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.colocation.places.green_contexts import GreenContexts, Part
from tunerd.colocation.places.seat_thread import SeatThread
from tunerd.colocation.plan import Member, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.errors import HostError, InfrastructureError
from tunerd.vocabulary import Arrays

_TRIES = 5  # of a seat that was just loaded: the clocks of an idle GPU rise; the fastest counts
_CLOSE_SECS = 5.0


class Captured(Recorded, Protocol):
    """What a seat launches: a CapturedModel."""

    def launch(self) -> None: ...


class InSegments(Protocol):
    """A capture that may pause: a SegmentedCapture."""

    segment_secs: tuple[float, ...]

    def __call__(self, inputs: Arrays, pauses: Pauses, /) -> Arrays: ...


class CudaModel(Protocol):
    """What a member is loaded as: a LoadedModel for a GPU."""

    def captured(self, stream: Any = None) -> Captured: ...


class Contexts(Protocol):
    """What cuts the GPU: GreenContexts."""

    def cut(self, names_and_pcts: Sequence[tuple[str, int]]) -> tuple[Part, ...]: ...
    def stream(self, part: Part) -> int: ...
    def close(self) -> None: ...


class _Seat:
    """A graph of a member, and the thread that launches it and waits for it."""

    def __init__(
        self,
        member: Member,
        lane: Lane,
        model: CudaModel,
        stream: Callable[[], int | None],
        cut: Callable[[Captured, Arrays], InSegments] | None,
    ) -> None:
        self.member, self.lane, self.model, self.stream, self.cut = member, lane, model, stream, cut
        self.segments = 1
        self.thread = SeatThread(f"{member.name}@{lane.name}")
        self._graph: Captured | None = None
        self._in_segments: InSegments | None = None

    def load(self) -> tuple[float, ...]:
        """Capture the graph and try it; return the seconds of each segment, of one with copies."""
        found = self.thread.call(self._load)
        self.segments = len(found)
        return found

    def run(self, inputs: Arrays, pauses: Pauses) -> Arrays:
        if self._in_segments is not None:
            return self._in_segments(inputs, pauses)
        assert self._graph is not None
        self._graph.write(inputs)
        self._graph.launch()
        return self._graph.read()

    def _load(self) -> tuple[float, ...]:
        self._graph = self.model.captured(self.stream())
        inputs = artifacts.sample_inputs(self.member.artifact)
        secs = math.inf
        for _ in range(_TRIES):
            since = time.monotonic()
            self._graph.write(inputs)
            self._graph.launch()
            self._graph.read()
            secs = min(secs, time.monotonic() - since)
        if self.cut is None:
            return (secs,)
        self._in_segments = self.cut(self._graph, inputs)
        return self._in_segments.segment_secs


class CudaStreamsPlace(Place):
    kind: ClassVar[str] = "in-process"

    def __init__(
        self,
        gpu: GpuContext | None = None,
        open_model: Callable[[Path], CudaModel] = loading.load,
        make_contexts: Callable[[], Contexts] = GreenContexts,
        make_segments: Callable[[Captured, Arrays, float], InSegments] = SegmentedCapture,
    ) -> None:
        self._gpu = gpu or GpuContext()
        self._open_model = open_model
        self._make_contexts, self._make_segments = make_contexts, make_segments
        self._contexts: Contexts | None = None
        self._parts: dict[str, Part] = {}
        self._models: dict[str, CudaModel] = {}
        self._seats: dict[Seat, _Seat] = {}
        self._resident: dict[Seat, int] = {}
        self.gpu_uuid = self._gpu.uuid

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        if named := [lane for lane in lanes if lane.cores]:
            raise HostError(f"{named[0].name} is to have cores, and this place is a GPU: name none")
        if parts := [(lane.name, lane.pct) for lane in lanes if lane.pct < 100]:
            self._gpu.make_current()
            self._contexts = self._make_contexts()
            made = self._contexts.cut(parts)
            self._parts = dict(zip((name for name, _ in parts), made, strict=True))
        return tuple(lanes)

    def capacity_bytes(self) -> int:
        return self._gpu.free_bytes()

    def needed_bytes(self, member: Member, seats: int) -> int:
        needed = artifacts.needed_memory(member.artifact)
        return needed.shared_bytes + seats * needed.each_bytes

    def load(self, member: Member, lane: Lane, *, segment_secs: float | None) -> Loaded:
        before = self._gpu.free_bytes()
        if member.name not in self._models:
            self._models[member.name] = self._open_model(member.artifact)
        stream = self._stream_of(self._parts.get(lane.name))
        cut = self._cutting(segment_secs)
        made = _Seat(member, lane, self._models[member.name], stream, cut)
        secs = made.load()
        seat = Seat(member.name, lane.name)
        self._seats[seat] = made
        self._resident[seat] = max(0, before - self._gpu.free_bytes())
        return Loaded(secs, self._proof(lane))

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        held = self._seats[seat]

        def fault_of(error: Exception) -> Fault:
            lost = tuple(self._seats) if self._gpu.is_dead() else (seat,)
            return Fault(f"{type(error).__name__}: {error}", lost)

        held.thread.start(
            segment, held.segments, lambda pauses: held.run(inputs, pauses), fault_of, told
        )

    def pause(self, seat: Seat) -> None:
        self._seats[seat].thread.pause()

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        self._seats[seat].thread.leave()
        return (seat,)

    def reload(self, seat: Seat) -> Loaded:
        if self._gpu.is_dead():
            raise InfrastructureError(
                "the CUDA context of this process is dead, as a fault leaves it; start the process "
                "again"
            )
        old = self._seats[seat]
        old.thread.leave()
        new = _Seat(old.member, old.lane, old.model, old.stream, old.cut)
        secs = new.load()
        self._seats[seat] = new
        return Loaded(secs, self._proof(old.lane))

    def memory_bytes(self) -> Mapping[Seat, int]:
        """Return what the GPU's free memory fell by when each seat was loaded.

        A member's first seat has its weights; memory that the allocator had left counts nowhere.
        """
        return dict(self._resident)

    def close(self) -> None:
        seats, self._seats = self._seats, {}
        for held in seats.values():
            held.thread.close(_CLOSE_SECS)
        self._models.clear()
        if self._contexts:
            self._contexts.close()

    def _proof(self, lane: Lane) -> Proof:
        part = self._parts.get(lane.name)
        return Proof(
            lane=lane.name,
            device=self._gpu.name,
            units=part.sm_count if part else self._gpu.sm_count,
            mechanism="green context" if part else "stream",
        )

    def _cutting(self, limit_secs: float | None) -> Callable[[Captured, Arrays], InSegments] | None:
        if limit_secs is None:
            return None
        return lambda captured, inputs: self._make_segments(captured, inputs, limit_secs)

    def _stream_of(self, part: Part | None) -> Callable[[], int | None]:
        contexts = self._contexts
        if part is None or contexts is None:
            return lambda: None  # a graph on the whole GPU has a stream of its own
        return lambda: contexts.stream(part)
