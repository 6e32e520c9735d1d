"""Members in runner processes, one for each seat, as slices have them.

What ends one process leaves the others alone, and what exceeds its time is ended with it. Inputs
and outputs lie in memory that both sides have, and some bytes over a socket wake either. A seat of
a whole model takes a second request while it runs the first; a lane's turns keep the order. Where
the processes have a device in common, a fault may take more than one of them: who is seen to be
gone is lost, and the fault is a member's own where nothing else ran meanwhile, or its slice says
so.
"""

from __future__ import annotations

import functools
import math
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from tunerd.artifacts.segments import Cut
from tunerd.colocation import artifacts
from tunerd.colocation.places import cpu_cut
from tunerd.colocation.places.base import (
    PROCESS_DEPTH,
    Done,
    Fault,
    Loaded,
    Place,
    Told,
    seat_bytes,
)
from tunerd.colocation.places.seat_thread import SeatRun, SeatThread
from tunerd.colocation.places.turns import Turn, Turns
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
    """A runner in a slice of its own, and the threads that talk to it: one for each request."""

    def __init__(self, member: Member, lane: Lane, made: ProcessSlice, cut: Cut | None) -> None:
        self.member, self.lane, self.slice, self.cut = member, lane, made, cut
        self.has_company = False  # since its last start
        self.client = SeatClient(made, lambda: not self.has_company)
        self.segments = 1
        self._threads = [
            SeatThread(f"{member.name}@{lane.name}/{nth}")
            for nth in range(PROCESS_DEPTH if cut is None else 1)
        ]
        self._starts = 0
        self._turn: Turn | None = None  # of the last start
        self._is_evicted = False

    def load(self) -> tuple[CapProof, Cutting]:
        try:
            return self._threads[0].call(self._load)
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
            buffers=len(self._threads),
        )
        self.segments, self.pid = len(found.secs), proof.runner_pid
        self.process = ProcessId.of(self.pid)  # None where it has ended already
        return proof, found

    def start(
        self,
        segment: int,
        inputs: Arrays,
        turn: Turn,
        began: Callable[[Turn], None],
        fault_of: Callable[[BaseException], Fault],
        told: Told,
    ) -> None:
        """Start a run in its turn, or go on with the one that pauses; `began` is called then."""
        self.client.ask_to_pause(False)
        self._turn = turn
        if segment == 0:
            self._starts += 1
        which = self._starts % len(self._threads)

        def run(seat_run: SeatRun) -> Arrays:
            self.client.write(inputs, which)
            self._run(0, which, turn, began)
            seat_run.begin()
            while (following := self.client.answer()) is not None:
                seat_run.pause(following)
                assert self._turn is not None
                self._run(following, which, self._turn, began)
                seat_run.begin()
            return self.client.read(which)

        self._threads[which].start(segment, self.segments, run, fault_of, told)

    def _run(self, segment: int, which: int, turn: Turn, began: Callable[[Turn], None]) -> None:
        turn.may_ask()
        began(turn)
        self.client.ask(segment, which)
        turn.asked()
        turn.may_hear()
        if turn.is_left:
            raise RuntimeError("its process has faulted before it ran")

    def evict(self) -> None:
        """Wait for it no longer; what ends the process may take a while, and is left to `close`."""
        self._is_evicted = True
        self.client.give_up()
        self._leave()

    def close(self) -> None:
        self._leave()
        if self._is_evicted:
            self.slice.fence(_EVICTED, is_alone=False)
        for thread in self._threads:
            thread.close(_CLOSE_SECS)
        self.client.close()
        self.slice.close()

    def _leave(self) -> None:
        for thread in self._threads:
            thread.leave()


class RunnersPlace(Place):
    """Seats in processes; members say how a device is cut, and what makes a process of a lane."""

    kind: ClassVar[PlaceKind]
    depth: ClassVar[int] = PROCESS_DEPTH
    loaders: ClassVar[int] = 16  # a fault takes all, and a start waits for much besides cores

    def __init__(self) -> None:
        self._seats: dict[Seat, _Seat] = {}
        self._turns = Turns()
        self._running: dict[Turn, _Seat] = {}
        self._lock = threading.Lock()  # held while `_running` changes

    @abstractmethod
    def _slice_of(self, seat: Seat, lane: Lane) -> ProcessSlice:
        """Return what a process for a seat is started by."""

    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        needed = artifacts.needed_memory(member.artifact)
        device = "cpu" if self.gpu_uuid is None else "cuda"
        each_bytes = seat_bytes(needed, self.kind, device, is_whole=cut is None)
        return seats * (needed.shared_bytes + each_bytes)

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
        turn = self._turns.next(seat)

        def heard(answer: Done | Fault) -> None:
            with self._lock:
                self._running.pop(turn, None)
            told(answer)
            if isinstance(answer, Fault):
                self._turns.leave(seat)
            turn.leave()

        held.start(
            segment,
            inputs,
            turn,
            functools.partial(self._began, held),
            functools.partial(self._fault, seat),
            heard,
        )

    def _began(self, held: _Seat, turn: Turn) -> None:
        with self._lock:
            if turn.is_left:
                return
            others = [other for other in self._running.values() if other is not held]
            if held not in self._running.values():
                held.has_company = False
            for each in (held, *others) if others else ():
                each.has_company = True
            self._running[turn] = held

    def pause(self, seat: Seat) -> None:
        self._seats[seat].client.ask_to_pause(True)

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        held = self._seats[seat]
        held.evict()
        self._forget(held)
        return (seat,)

    def reload(self, seat: Seat) -> Loaded:
        old = self._seats[seat]
        self._forget(old)
        old.close()
        return self.load(old.member, old.lane, cut=old.cut)

    def close(self) -> None:
        seats, self._seats = self._seats, {}
        self._turns.leave_all()
        if seats:  # each takes a while to end by itself
            with ThreadPoolExecutor(len(seats)) as pool:
                list(pool.map(_Seat.close, seats.values()))

    def _forget(self, held: _Seat) -> None:
        """Have nobody wait for what a seat runs."""
        with self._lock:
            self._running = {t: other for t, other in self._running.items() if other is not held}
            self._turns.leave(Seat(held.member.name, held.lane.name))

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
        for process in [each.process for each in held]:  # by pid it may be another one by now
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
