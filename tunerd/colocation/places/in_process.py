"""Members in threads of this process, each seat with cores of its own.

One address space: the least memory and no copy between processes, and nothing that keeps a fault
that ends a process from ending all. What a member raises is a fault of its own. A thread cannot be
ended, so what exceeds its time is left behind: its answer is dropped, and its cores stay busy until
it ends by itself, or comes to the end of a segment; the processes place does better there.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from tunerd.artifacts import loading
from tunerd.artifacts.segments import Instrumented, Pauses, SegmentedModel
from tunerd.colocation import artifacts
from tunerd.colocation.places import cpu_cut
from tunerd.colocation.places.base import Fault, Loaded, Place, Told
from tunerd.colocation.places.seat_thread import SeatThread
from tunerd.colocation.plan import Member, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.system import cores, host
from tunerd.vocabulary import Arrays

_TRIES = 3  # of a seat that was just loaded; the fastest counts
_CLOSE_SECS = 5.0


class _Seat:
    """A loaded member and its thread. Everything of TVM's happens in that thread."""

    def __init__(
        self,
        member: Member,
        lane: Lane,
        open_model: Callable[[Path], Instrumented],
        segment_secs: float | None,
    ) -> None:
        self.member, self.lane = member, lane
        self.limit_secs = segment_secs
        self.segments = 1
        self._open_model = open_model
        self.thread = SeatThread(f"{member.name}@{lane.name}")
        self._model: Instrumented | None = None
        self._in_segments: SegmentedModel | None = None

    def load(self) -> tuple[float, ...]:
        """Load and try the model; return the seconds of each of its segments."""
        found = self.thread.call(self._load)
        self.segments = len(found)
        return found

    def run(self, inputs: Arrays, pauses: Pauses) -> Arrays:
        assert self._model is not None
        return self._in_segments(inputs, pauses) if self._in_segments else self._model(inputs)

    def _load(self) -> tuple[float, ...]:
        # TVM's pool is one per calling thread, on cores that this thread may use.
        os.sched_setaffinity(0, self.lane.cores)
        self._model = model = self._open_model(self.member.artifact)
        inputs = artifacts.sample_inputs(self.member.artifact)
        if self.limit_secs is not None:
            self._in_segments = SegmentedModel(model, inputs, self.limit_secs)
            return self._in_segments.segment_secs
        secs = math.inf
        for _ in range(_TRIES):
            since = time.monotonic()
            model(inputs)
            secs = min(secs, time.monotonic() - since)
        return (secs,)


class InProcessPlace(Place):
    kind: ClassVar[str] = "in-process"

    def __init__(self, open_model: Callable[[Path], Instrumented] = loading.load) -> None:
        self._open_model = open_model
        self._seats: dict[Seat, _Seat] = {}

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        return cpu_cut.cut(lanes)

    def capacity_bytes(self) -> int:
        return cores.memory_bytes()

    def needed_bytes(self, member: Member, seats: int) -> int:
        needed = artifacts.needed_memory(member.artifact)
        return seats * (needed.shared_bytes + needed.each_bytes)

    def load(self, member: Member, lane: Lane, *, segment_secs: float | None) -> Loaded:
        seat = _Seat(member, lane, self._open_model, segment_secs)
        secs = seat.load()
        self._seats[Seat(member.name, lane.name)] = seat
        return Loaded(secs, self._proof(lane))

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        held = self._seats[seat]
        held.thread.start(
            segment,
            held.segments,
            lambda pauses: held.run(inputs, pauses),
            lambda error: Fault(f"{type(error).__name__}: {error}", (seat,)),
            told,
        )

    def pause(self, seat: Seat) -> None:
        self._seats[seat].thread.pause()

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        self._seats[seat].thread.leave()
        return (seat,)

    def reload(self, seat: Seat) -> Loaded:
        old = self._seats[seat]
        old.thread.leave()
        return self.load(old.member, old.lane, segment_secs=old.limit_secs)

    def close(self) -> None:
        seats, self._seats = self._seats, {}
        for seat in seats.values():
            seat.thread.close(_CLOSE_SECS)

    def _proof(self, lane: Lane) -> Proof:
        return Proof(
            lane=lane.name,
            device=host.facts().cpu_model,
            units=len(lane.cores),
            mechanism="affinity",
        )
