"""Members in threads of this process, each seat with cores of its own.

One address space: the least memory and no copy between processes, and nothing that keeps a fault
that ends a process from ending all. What a member raises is a fault of its own. A thread cannot be
ended, so what exceeds its time is left behind: its answer is dropped, and its cores stay busy until
it ends by itself, or comes to the end of a segment; the processes place does better there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from tunerd.artifacts import loading
from tunerd.artifacts.segments import Instrumented, SegmentedModel
from tunerd.colocation import artifacts
from tunerd.colocation.places import cpu_cut
from tunerd.colocation.places.base import Fault, Loaded, Place, Told
from tunerd.colocation.places.seat_thread import SeatThread
from tunerd.colocation.plan import Member, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.system import cores, host
from tunerd.vocabulary import Arrays

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
        self.member, self.lane, self.segment_secs = member, lane, segment_secs
        self._open_model = open_model
        self.thread = SeatThread(f"{member.name}@{lane.name}")
        self.model = self.thread.call(self._loaded)

    def _loaded(self) -> SegmentedModel:
        # TVM's pool is one per calling thread, on cores that this thread may use.
        os.sched_setaffinity(0, self.lane.cores)
        model = self._open_model(self.member.artifact)
        inputs = artifacts.sample_inputs(self.member.artifact)
        return SegmentedModel(model, inputs, self.segment_secs or math.inf)


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
        made = _Seat(member, lane, self._open_model, segment_secs)
        self._seats[Seat(member.name, lane.name)] = made
        return Loaded(made.model.segment_secs, self._proof(lane))

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        held = self._seats[seat]
        held.thread.start(
            segment,
            len(held.model.segment_secs),
            lambda pauses: held.model(inputs, pauses),
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
        return self.load(old.member, old.lane, segment_secs=old.segment_secs)

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
