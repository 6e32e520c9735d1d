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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tunerd.artifacts import loading
from tunerd.artifacts.segments import Cut, Instrumented, SegmentedModel
from tunerd.colocation import artifacts
from tunerd.colocation.groups import (
    ForSeveral,
    add_tenants,
    load_for_several,
    tried_tenants,
)
from tunerd.colocation.places import cpu_cut
from tunerd.colocation.places.base import Fault, Loaded, Place, Told
from tunerd.colocation.places.seat_thread import SeatThread
from tunerd.colocation.plan import Member, Proof
from tunerd.colocation.work import Group, Lane, Seat
from tunerd.system import cores, host
from tunerd.system.text import numbers_text
from tunerd.vocabulary import Arrays

_CLOSE_SECS = 5.0
_TRIES = 3  # of each number of requests; the fastest counts


class _Seat:
    """A loaded member and its thread. Everything of TVM's happens in that thread."""

    def __init__(
        self,
        member: Member,
        lane: Lane,
        open_model: Callable[[Path], Instrumented],
        cut: Cut | None,
    ) -> None:
        self.member, self.lane, self.cut = member, lane, cut
        self._open_model = open_model
        self.thread = SeatThread(f"{member.name}@{lane.name}")
        self.model = self.thread.loaded(self._loaded)

    def _loaded(self) -> SegmentedModel:
        # TVM's pool is one per calling thread, on cores that this thread may use.
        os.sched_setaffinity(0, self.lane.cores)
        model = self._open_model(self.member.artifact)
        inputs = artifacts.sample_inputs(self.member.artifact)
        return SegmentedModel(model, inputs, math.inf if self.cut is None else self.cut)


class _GroupSeat:
    """Members that are loaded as one, and their thread."""

    def __init__(
        self,
        group: Group,
        members: Sequence[Member],
        lane: Lane,
        open_model: Callable[[Path], ForSeveral],
    ) -> None:
        self.group, self.members, self.lane = group, members, lane
        self.tenants: dict[str, str] = {}  # by member, as the model calls them
        self.launch_secs: dict[int, float] = {}
        self._open_model = open_model
        self.thread = SeatThread(f"{group.name}@{lane.name}")
        self._model = self.thread.loaded(self._loaded)

    def _loaded(self) -> ForSeveral:
        os.sched_setaffinity(0, self.lane.cores)
        model = self._open_model(self.group.kernels)
        self.tenants = add_tenants(model, self.group, self.members)
        names = tried_tenants(self.group, self.tenants)
        inputs = artifacts.sample_inputs(self.group.kernels)
        for count in model.counts:
            requests = [(names[nth % len(names)], inputs) for nth in range(count)]
            model.run(requests)
            self.launch_secs[count] = min(self._tried(model, requests) for _ in range(_TRIES))
        return model

    def _tried(self, model: ForSeveral, requests: Sequence[tuple[str, Arrays]]) -> float:
        since = time.monotonic()
        model.run(requests)
        return time.monotonic() - since

    @property
    def brought(self) -> int:
        return self._model.brought

    def run(self, requests: Sequence[tuple[str, Arrays]]) -> tuple[Arrays, ...]:
        return tuple(self._model.run([(self.tenants[name], given) for name, given in requests]))


class InProcessPlace(Place):
    kind: ClassVar[str] = "in-process"

    def __init__(
        self,
        open_model: Callable[[Path], Instrumented] = loading.load,
        open_for_several: Callable[[Path], ForSeveral] = load_for_several,
    ) -> None:
        self._open_model, self._open_for_several = open_model, open_for_several
        self._seats: dict[Seat, _Seat | _GroupSeat] = {}

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        return cpu_cut.cut(lanes)

    def capacity_bytes(self) -> int:
        return cores.memory_bytes()

    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        return seats * artifacts.needed_memory(member.artifact).alone_bytes

    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        made = _Seat(member, lane, self._open_model, cut)
        self._seats[Seat(member.name, lane.name)] = made
        return Loaded(made.model.segment_secs, self._proof(lane), ends=made.model.ends)

    def needed_together_bytes(self, group: Group, seats: int) -> int:
        needed = artifacts.needed_memory(
            group.kernels, len(group.members), most_bytes=group.weights_bytes
        )
        return seats * needed.alone_bytes

    def load_group(self, group: Group, members: Sequence[Member], lane: Lane) -> Loaded:
        made = _GroupSeat(group, members, lane, self._open_for_several)
        self._seats[Seat(group.name, lane.name)] = made
        least = min(made.launch_secs)
        return Loaded((made.launch_secs[least],), self._proof(lane), made.launch_secs)

    def start_together(
        self, seat: Seat, requests: Sequence[tuple[str, Arrays]], told: Told
    ) -> None:
        held = self._seats[seat]
        assert isinstance(held, _GroupSeat)
        held.thread.start(
            0,
            1,
            lambda _: held.run(requests),
            lambda error: Fault(f"{type(error).__name__}: {error}", (seat,)),
            told,
        )

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        held = self._seats[seat]
        assert isinstance(held, _Seat)
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
        if isinstance(old, _GroupSeat):
            return self.load_group(old.group, old.members, old.lane)
        return self.load(old.member, old.lane, cut=old.cut)

    def brought(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for seat, held in self._seats.items():
            if isinstance(held, _GroupSeat):
                found[seat.member] = found.get(seat.member, 0) + held.brought
        return found

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
            which=numbers_text(lane.cores),
        )
