"""Members in runner processes, one for each seat, as slices have them.

What ends one process leaves the others alone, and what exceeds its time is ended with it. Inputs
and outputs go over a Unix socket, and each process has a runtime of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tunerd.colocation import artifacts
from tunerd.colocation.places import cpu_cut
from tunerd.colocation.places.base import Fault, Loaded, Place, Told
from tunerd.colocation.places.seat_thread import SeatThread
from tunerd.colocation.plan import Member, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.runner.client import ModelRunError, RunnerClient
from tunerd.slices.cpu import CpuSlice
from tunerd.system import cores
from tunerd.vocabulary import Arrays, Kind, SliceSpec

# A runner with a tiny model had 132 MiB resident, 64 MiB of them its own (x86-64, TVM 0.27).
_RUNTIME_BYTES = 150 << 20
_TRIES = 3  # of a seat that was just loaded; the fastest counts
_CLOSE_SECS = 5.0


class _Seat:
    """A runner in a slice of its own, and the thread that talks to it."""

    def __init__(self, member: Member, lane: Lane) -> None:
        self.member, self.lane = member, lane
        self.thread = SeatThread(f"{member.name}@{lane.name}")
        self.slice = CpuSlice(
            SliceSpec(
                slice_id=f"{member.name}@{lane.name}",
                kind="cpu",
                pct=lane.pct,
                cores=lane.cores,
                environment=(("OMP_NUM_THREADS", str(len(lane.cores))),),
            )
        )
        self.runner: RunnerClient | None = None

    def load(self) -> Loaded:
        try:
            return self.thread.call(self._load)
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Arrays) -> Arrays:
        assert self.runner is not None
        return self.runner.run_model(str(self.member.artifact), inputs)

    def close(self) -> None:
        self.thread.close(_CLOSE_SECS)
        self.slice.close()

    def _load(self) -> Loaded:
        inputs = artifacts.sample_inputs(self.member.artifact)
        self.runner = self.slice.launch()
        secs = math.inf
        for _ in range(_TRIES):
            since = time.monotonic()
            self.run(inputs)
            secs = min(secs, time.monotonic() - since)
        proved = self.slice.prove()
        proof = Proof(
            lane=self.lane.name,
            device=proved.device,
            units=proved.sm_count,
            mechanism=proved.mechanism,
        )
        return Loaded((secs,), proof)


class ProcessesPlace(Place):
    kind: ClassVar[str] = "processes"

    def __init__(self) -> None:
        self._seats: dict[Seat, _Seat] = {}

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        return cpu_cut.cut(lanes)

    def capacity_bytes(self) -> int:
        return cores.memory_bytes()

    def needed_bytes(self, member: Member, seats: int) -> int:
        needed = artifacts.needed_memory(member.artifact)
        return seats * (needed.shared_bytes + needed.each_bytes + _RUNTIME_BYTES)

    def load(self, member: Member, lane: Lane, *, segment_secs: float | None) -> Loaded:
        seat = _Seat(member, lane)
        loaded = seat.load()
        self._seats[Seat(member.name, lane.name)] = seat
        return loaded

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        held = self._seats[seat]

        def fault_of(error: Exception) -> Fault:
            if isinstance(error, ModelRunError):
                is_own = error.failure.kind is not Kind.COLLATERAL
                return Fault(error.failure.message, (seat,), is_own=is_own)
            return Fault(f"{type(error).__name__}: {error}", (seat,))

        held.thread.start(0, 1, lambda _: held.run(inputs), fault_of, told)

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        held = self._seats[seat]
        held.thread.leave()
        held.slice.fence("it exceeded its time", is_alone=False)
        return (seat,)

    def reload(self, seat: Seat) -> Loaded:
        old = self._seats[seat]
        old.close()
        return self.load(old.member, old.lane, segment_secs=None)

    def memory_bytes(self) -> Mapping[Seat, int]:
        import psutil

        found = {}
        for seat, held in self._seats.items():
            try:
                found[seat] = int(psutil.Process(held.slice.prove().runner_pid).memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        return found

    def close(self) -> None:
        seats, self._seats = self._seats, {}
        for held in seats.values():
            held.close()
