"""Members in clients of an MPS daemon, under the guard that slices use: a GPU for many processes.

Each seat is a process at its lane's share, which CUDA takes from its environment when it starts,
and which it proves. This process is no client: it may be killed and started again, and the guard
ends the runners that it leaves as such clients are to be ended, without a signal to one that works.

A fault is one of all clients: the guard replaces them and the daemon, and all seats are lost, the
one to blame among them. Who it was shows without MPS: each that may be to blame runs once more in a
process that is no client, while all are loaded again, until one has faulted. What exceeds its time
is ended by the daemon, and its neighbours go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tunerd.artifacts.segments import Cut
from tunerd.colocation.places.apart import Apart
from tunerd.colocation.places.base import Loaded, refuse_cores
from tunerd.colocation.places.processes import RunnersPlace
from tunerd.colocation.plan import Member, PlaceKind
from tunerd.colocation.work import Lane, Seat
from tunerd.errors import HostError
from tunerd.slices.base import ProcessSlice
from tunerd.slices.mps.mps_slice import MPS_CLIENT_LIMIT, MpsSlice, problem_of, run_name, share_of
from tunerd.slices.whole import WholeSlice, whole_spec
from tunerd.system import host
from tunerd.system.forks import ForkServer
from tunerd.system.gpus import GpuFacts, gpu_state
from tunerd.vocabulary import Arrays, SliceSpec


class MpsPlace(RunnersPlace):
    """Args:
    gpu: the first that this process sees if not given.

    Raises HostError where MPS cannot be used here.
    """

    kind: ClassVar[PlaceKind] = "mps"
    # Each makes a context, as the seats do at that time: more hold up those, and each other.
    runs_apart: ClassVar[int] = 5

    def __init__(self, gpu: GpuFacts | None = None) -> None:
        super().__init__()
        self._gpu = gpu or _first_gpu()
        self.gpu_uuid = self._gpu.uuid
        self._specs: dict[Seat, SliceSpec] = {}
        self._resident: dict[Seat, int] = {}
        self._early = contextlib.ExitStack()
        self._apart = Apart()
        self._forks: ForkServer | None = None  # starts what runs apart

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        refuse_cores(lanes)
        seats = [(Seat(member, lane.name), lane) for lane in lanes for member in lane.members]
        specs = [self._spec_of(seat, lane) for seat, lane in seats]
        if len(self._specs) > MPS_CLIENT_LIMIT:
            raise HostError(
                f"{len(self._specs)} members in lanes are more than the {MPS_CLIENT_LIMIT} clients "
                "that MPS takes; choose a policy with fewer lanes, or `place: in-process`"
            )
        # Held to the end: the guard and its daemon stay while seats are loaded again.
        self._early.enter_context(MpsSlice.early(specs, run_name()))
        if self._forks is None:
            self._forks = ForkServer("tunerd.runner.preload", "cuda")
            self._early.callback(self._forks.close)
        return tuple(lanes)

    def capacity_bytes(self) -> int:
        return self._gpu.mem_bytes - self._used_bytes()

    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        seat = Seat(member.name, lane.name)
        if seat in self._resident:  # a question for the driver, which is slow after a fault
            return super().load(member, lane, cut=cut)
        before = self._used_bytes()
        loaded = super().load(member, lane, cut=cut)
        self._resident[seat] = max(0, self._used_bytes() - before)
        return loaded

    def memory_bytes(self) -> Mapping[Seat, int]:
        """Return what the GPU's memory in use grew by when each seat was first loaded."""
        return dict(self._resident)

    def run_apart(self, seat: Seat, inputs: Arrays) -> Arrays:
        artifact = self._seats[seat].member.artifact
        return self._apart.run(self._slice_apart(seat), artifact, inputs)

    def end_apart(self) -> None:
        self._apart.end()

    def close(self) -> None:
        with self._early:  # ends the guard and its daemon, also where a seat does not close
            super().close()
            self._apart.close()

    def _slice_of(self, seat: Seat, lane: Lane) -> ProcessSlice:
        return MpsSlice(self._spec_of(seat, lane))

    def _slice_apart(self, seat: Seat) -> ProcessSlice:
        """Return what starts a process that is no client of the daemon."""
        return WholeSlice(whole_spec(self._gpu, f"apart-{seat.member}"), self._forks)

    def _spec_of(self, seat: Seat, lane: Lane) -> SliceSpec:
        if seat not in self._specs:
            slice_id = f"seat-{len(self._specs)}"
            self._specs[seat] = share_of(self._gpu, lane.pct, slice_id=slice_id)
        return self._specs[seat]

    def _used_bytes(self) -> int:
        return gpu_state(self._gpu.uuid).mem_used_bytes or 0


def _first_gpu() -> GpuFacts:
    usable = MpsSlice.usability()
    if not usable.ok:
        raise HostError(f"there is no GPU for `place: mps` here: {usable.why}")
    return next(gpu for gpu in host.facts().gpus if not problem_of(gpu))
