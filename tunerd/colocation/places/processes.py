"""Members in runner processes, one for each seat, as slices have them.

What ends one process leaves the others alone, and what exceeds its time is ended with it. Inputs
and outputs lie in memory that both sides have, and some bytes over a socket wake either. Where the
processes have a device in common, a fault may take more than one of them: who is seen to be gone is
lost, and the fault is a member's own where nothing else ran meanwhile, or its slice says so.
"""

from __future__ import annotations

import math
import signal
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from tunerd.artifacts.segments import Cut, Pauses
from tunerd.colocation import artifacts
from tunerd.colocation.places import cpu_cut
from tunerd.colocation.places.base import PROCESS_BYTES, Done, Fault, Loaded, Place, Told
from tunerd.colocation.places.seat_thread import SeatThread
from tunerd.colocation.plan import Member, PlaceKind, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.runner.client import ModelRunError
from tunerd.runner.seat_client import Cutting, SeatClient
from tunerd.slices.base import ProcessSlice
from tunerd.slices.cpu import CpuSlice
from tunerd.system import cores
from tunerd.system.processes import ProcessId
from tunerd.system.text import numbers_text
from tunerd.vocabulary import Arrays, CapProof, Kind, SliceSpec

_CLOSE_SECS = 5.0
_EVICTED = "it gave no answer in time"  # as slices say it of a runner that disturbs no other


class _Seat:
    """A runner in a slice of its own, and the thread that talks to it."""

    def __init__(self, member: Member, lane: Lane, made: ProcessSlice, cut: Cut | None) -> None:
        self.member, self.lane, self.slice, self.cut = member, lane, made, cut
        self.thread = SeatThread(f"{member.name}@{lane.name}")
        self.has_company = False  # since its last start
        self.client = SeatClient(made, lambda: not self.has_company)
        self.segments = 1
        self._is_evicted = False

    def load(self) -> tuple[CapProof, Cutting]:
        try:
            return self.thread.call(self._load)
        except BaseException:
            self.close()
            raise

    def _load(self) -> tuple[CapProof, Cutting]:
        path = self.member.artifact
        proof = self.client.prove()
        found = self.client.take(
            str(path),
            artifacts.sample_inputs(path),
            artifacts.outputs_of(path),
            math.inf if self.cut is None else self.cut,
        )
        self.segments, self.pid = len(found.secs), proof.runner_pid
        return proof, found

    def run(self, inputs: Arrays, pauses: Pauses) -> Arrays:
        self.client.write(inputs)
        segment: int | None = self.client.run(0)
        while segment is not None:
            pauses.pause(segment)
            segment = self.client.run(segment)
        return self.client.read()

    def evict(self) -> None:
        """Wait for it no longer; what ends the process may take a while, and is left to `close`."""
        self._is_evicted = True
        self.client.give_up()
        self.thread.leave()

    def close(self) -> None:
        self.thread.leave()
        if self._is_evicted:
            self.slice.fence(_EVICTED, is_alone=False)
        self.thread.close(_CLOSE_SECS)
        self.client.close()
        self.slice.close()


class RunnersPlace(Place):
    """Seats in processes; members say how a device is cut, and what makes a process of a lane."""

    kind: ClassVar[PlaceKind]
    loaders: ClassVar[int] = 16  # a fault takes all, and a start waits for much besides cores

    def __init__(self) -> None:
        self._seats: dict[Seat, _Seat] = {}
        self._running: set[Seat] = set()
        self._lock = threading.Lock()  # held while `_running` changes

    @abstractmethod
    def _slice_of(self, seat: Seat, lane: Lane) -> ProcessSlice:
        """Return what a process for a seat is started by."""

    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        needed = artifacts.needed_memory(member.artifact)
        return seats * (needed.alone_bytes + PROCESS_BYTES[self.kind])

    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        seat = Seat(member.name, lane.name)
        made = _Seat(member, lane, self._slice_of(seat, lane), cut)
        proved, found = made.load()
        self._seats[seat] = made
        proof = Proof(
            lane=lane.name,
            device=proved.device,
            units=proved.sm_count,
            mechanism=proved.mechanism,
            which=numbers_text(lane.cores),
        )
        return Loaded(found.secs, proof, ends=found.ends)

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        held = self._seats[seat]

        def heard(answer: Done | Fault) -> None:
            with self._lock:
                self._running.discard(seat)
            told(answer)

        with self._lock:
            held.has_company = bool(self._running)
            for other in self._running:
                self._seats[other].has_company = True
            self._running.add(seat)
        held.client.ask_to_pause(False)
        held.thread.start(
            segment,
            held.segments,
            lambda pauses: held.run(inputs, pauses),
            lambda error: self._fault(seat, error),
            heard,
        )

    def pause(self, seat: Seat) -> None:
        self._seats[seat].client.ask_to_pause(True)

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        self._seats[seat].evict()
        with self._lock:
            self._running.discard(seat)
        return (seat,)

    def reload(self, seat: Seat) -> Loaded:
        old = self._seats[seat]
        with self._lock:
            self._running.discard(seat)
        old.close()
        return self.load(old.member, old.lane, cut=old.cut)

    def close(self) -> None:
        seats, self._seats = self._seats, {}
        if seats:  # each takes a while to end by itself
            with ThreadPoolExecutor(len(seats)) as pool:
                list(pool.map(_Seat.close, seats.values()))

    def _fault(self, seat: Seat, error: BaseException) -> Fault:
        lost = (seat, *(s for s, held in self._seats.items() if s != seat and held.client.is_lost))
        if isinstance(error, ModelRunError):
            is_own = error.failure.kind is not Kind.COLLATERAL
            return Fault(error.failure.message, lost, is_own=is_own)
        return Fault(f"{type(error).__name__}: {error}", lost)


class ProcessesPlace(RunnersPlace):
    """Processes on cores of this machine."""

    kind: ClassVar[PlaceKind] = "processes"

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        return cpu_cut.cut(lanes)

    def capacity_bytes(self) -> int:
        return cores.memory_bytes()

    def memory_bytes(self) -> Mapping[Seat, int]:
        import psutil

        found = {}
        for seat, held in self._seats.items():
            try:
                found[seat] = int(psutil.Process(held.pid).memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self, member: str) -> None:
        held = [held for seat, held in list(self._seats.items()) if seat.member == member]
        for process in [ProcessId.of(each.pid) for each in held]:
            if process is not None:
                process.signal(signal.SIGKILL)

    def _slice_of(self, seat: Seat, lane: Lane) -> ProcessSlice:
        return CpuSlice(
            SliceSpec(
                slice_id=f"{seat.member}@{seat.lane}",
                kind="cpu",
                pct=lane.pct,
                cores=lane.cores,
                environment=(("OMP_NUM_THREADS", str(len(lane.cores))),),
            )
        )
