"""Members on streams of one GPU, in this process: each seat has graphs with buffers of its own.

A member is loaded once, its weights are shared by its seats. The hardware divides the GPU among
the streams of lanes of the whole; a lane of less is a green context with SMs of its own. A kernel
cannot be ended but with the process, and an error that leaves the context dead takes all seats with
it: only a new process goes on then. Where there is an MPS daemon this process is its client, which
it warns of: killed, it takes all other clients along. Members need no threads, and a lane takes two
requests of whole ones at a time (places/cuda_seats.py).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from tunerd.artifacts import loading
from tunerd.artifacts.segments import Cut
from tunerd.artifacts.staging import PinnedPool, bytes_of
from tunerd.colocation import artifacts
from tunerd.colocation.groups import add_tenants, load_for_several
from tunerd.colocation.places.base import (
    STREAM_DEPTH,
    Fault,
    Loaded,
    Place,
    Told,
    refuse_cores,
    seat_bytes,
)
from tunerd.colocation.places.completions import Completions, sleep_exactly
from tunerd.colocation.places.cuda_seats import (
    GroupSeat,
    SegmentedSeat,
    WholeSeat,
)
from tunerd.colocation.places.gpu_context import GpuContext, MpsClientWarning
from tunerd.colocation.places.green_contexts import GreenContexts, Part
from tunerd.colocation.places.staged import CudaGroup, CudaModel
from tunerd.colocation.places.tracks import CudaSeat, Track
from tunerd.colocation.plan import Member, Proof
from tunerd.colocation.work import Group, Lane, Seat
from tunerd.errors import InfrastructureError
from tunerd.system.text import numbers_text
from tunerd.vocabulary import Arrays, TensorSpec

_CLOSE_SECS = 5.0
_WHOLE = ""  # of the GPU, among its parts by lane
_MPS_CLIENT = (
    "this process is a client of an MPS daemon itself: if it is killed while it works, all clients "
    "of that daemon fail; use `place: mps`, whose clients are processes of their own, or stop the "
    "daemon"
)


class Contexts(Protocol):
    """What cuts the GPU: GreenContexts."""

    def cut(self, names_and_pcts: Sequence[tuple[str, int]]) -> tuple[Part, ...]: ...
    def stream(self, part: Part) -> int: ...
    def close(self) -> None: ...


class CudaStreamsPlace(Place):
    """Warns with MpsClientWarning where the context of this process is that of an MPS client."""

    kind: ClassVar[str] = "in-process"
    depth: ClassVar[int] = STREAM_DEPTH
    shares_weights: ClassVar[bool] = True

    def __init__(
        self,
        gpu: GpuContext | None = None,
        open_model: Callable[[Path], CudaModel] = loading.load,
        make_contexts: Callable[[], Contexts] = GreenContexts,
        open_for_several: Callable[[Path], CudaGroup] = load_for_several,
    ) -> None:
        self._gpu = gpu or GpuContext()
        if self._gpu.is_mps_client:
            warnings.warn(_MPS_CLIENT, MpsClientWarning, stacklevel=2)
        self._open_model = open_model
        self._make_contexts = make_contexts
        self._contexts: list[Contexts] = []  # of each call of `cut`
        self._parts: dict[str, tuple[Contexts, Part]] = {}
        self._tracks: dict[str, Track] = {}
        self._shared_streams: dict[tuple[str, str], int] = {}  # by the part, and for what
        self._open_for_several = open_for_several
        self._models: dict[str, CudaModel] = {}
        self._groups: dict[str, tuple[CudaGroup, dict[str, str]]] = {}  # and their tenants
        self._seats: dict[Seat, CudaSeat] = {}
        self._pools: dict[tuple[TensorSpec, ...], PinnedPool] = {}  # by the inputs of a request
        self._pool_of: dict[str, PinnedPool] = {}  # by member
        self._resident: dict[Seat, int] = {}
        self._completions = Completions()
        self._entered = 0  # the thread that starts segments, when this GPU is current there
        self.gpu_uuid = self._gpu.uuid

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        refuse_cores(lanes)
        if parts := [(lane.name, lane.pct) for lane in lanes if lane.pct < 100]:
            self._gpu.make_current()
            contexts = self._make_contexts()
            self._contexts.append(contexts)
            for (name, _), part in zip(parts, contexts.cut(parts), strict=True):
                self._parts[name] = contexts, part
        return tuple(lanes)

    def capacity_bytes(self) -> int:
        return self._gpu.free_bytes()

    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        needed = artifacts.needed_memory(member.artifact)
        return self._needed(needed, seats, is_whole=cut is None)

    def needed_together_bytes(self, group: Group, seats: int) -> int:
        needed = artifacts.needed_memory(
            group.kernels, len(group.members), most_bytes=group.weights_bytes
        )
        return self._needed(needed, seats, is_whole=True)

    def _needed(self, needed: artifacts.Needed, seats: int, *, is_whole: bool) -> int:
        each_bytes = seat_bytes(needed, "in-process", "cuda", is_whole=is_whole)
        return needed.shared_bytes + seats * each_bytes

    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        before = self._gpu.free_bytes()
        if member.name not in self._models:
            self._models[member.name] = self._open_model(member.artifact)
            self._pool(member.name, member.artifact)
        made = self._made(member, lane, cut)
        return self._loaded(Seat(member.name, lane.name), made, before)

    def load_group(self, group: Group, members: Sequence[Member], lane: Lane) -> Loaded:
        before = self._gpu.free_bytes()
        if group.name not in self._groups:
            self._groups[group.name] = self._open_for_several(group.kernels), {}
        model, tenants = self._groups[group.name]
        tenants |= add_tenants(model, group, [m for m in members if m.name not in tenants])
        for member in members:
            self._pool(member.name, group.kernels)
        made = GroupSeat(group, lane, model, tenants, self._track(lane), self.depth)
        return self._loaded(Seat(group.name, lane.name), made, before)

    def lent(self, specs: Sequence[TensorSpec]) -> Arrays:
        return self._gpu.pinned(specs, is_lent=True)

    def holding(self, member: str, inputs: Arrays) -> Arrays:
        pool = self._pool_of.get(member)  # none where it was closed meanwhile
        return inputs if pool is None else pool.holding(inputs)

    def give_back(self, member: str, inputs: Arrays) -> None:
        if (pool := self._pool_of.get(member)) is not None:
            pool.give_back(inputs)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        with self._gpu.current():
            entered, self._entered = self._entered, threading.get_ident()
            try:
                yield
            finally:
                self._entered = entered

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        self._enter()
        self._seats[seat].start(segment, inputs, functools.partial(self._fault, seat), told)

    def start_together(
        self, seat: Seat, requests: Sequence[tuple[str, Arrays]], told: Told
    ) -> None:
        self._enter()
        self._seats[seat].start_together(requests, functools.partial(self._fault, seat), told)

    def pause(self, seat: Seat) -> None:
        self._seats[seat].pause()

    def poll(self) -> float | None:
        return self._completions.look()

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        """Leave what hangs alone, with all that waits behind it on its stream."""
        left = self._seats[seat].leave()
        return tuple(s for s, held in self._seats.items() if held in left)

    def reload(self, seat: Seat) -> Loaded:
        if self._gpu.is_dead():
            raise InfrastructureError(
                "the CUDA context of this process is dead, as a fault leaves it; start the process "
                "again"
            )
        new = self._seats[seat].anew()
        secs = new.load()
        self._seats[seat] = new
        return Loaded(secs, self._proof(new.lane), new.launch_secs, new.ends)

    def brought(self) -> Mapping[str, int]:
        return {name: model.brought for name, (model, _) in self._groups.items()}

    def memory_bytes(self) -> Mapping[Seat, int]:
        """Return what the GPU's free memory fell by when each seat was loaded.

        A member's first seat has its weights; memory that the allocator had left counts nowhere.
        """
        return dict(self._resident)

    def close(self) -> None:
        self._gpu.make_current()
        give_up_at = time.monotonic() + _CLOSE_SECS
        while (secs := self.poll()) is not None:
            if time.monotonic() > give_up_at:
                return  # what hangs has its memory until the process ends
            time.sleep(secs)
        seats, self._seats = self._seats, {}
        for held in seats.values():
            held.close()
        self._models.clear()
        self._groups.clear()
        self._pools.clear()
        self._pool_of.clear()
        tracks, self._tracks = self._tracks, {}
        for track in tracks.values():
            for stream in track.streams:
                self._gpu.destroy_stream(stream)
        while self._shared_streams:
            self._gpu.destroy_stream(self._shared_streams.popitem()[1])
        while self._contexts:
            self._contexts.pop().close()

    def _pool(self, member: str, kernels: Path) -> None:
        """Give a member's requests pinned memory, together with all that take such inputs."""
        specs = artifacts.inputs_of(kernels)
        if specs not in self._pools:
            make = functools.partial(self._gpu.pinned, specs)
            self._pools[specs] = PinnedPool(make, sum(map(bytes_of, specs)))
        self._pool_of[member] = self._pools[specs]

    def _enter(self) -> None:
        """Prepare the thread that starts segments, when it does so first."""
        if self._entered != threading.get_ident():
            self._gpu.make_current()
            sleep_exactly()
            self._entered = threading.get_ident()

    def _fault(self, seat: Seat, error: BaseException) -> Fault:
        lost = tuple(self._seats) if self._gpu.is_dead() else (seat,)
        return Fault(f"{type(error).__name__}: {error}", lost)

    def _loaded(self, seat: Seat, made: CudaSeat, free_before: int) -> Loaded:
        secs = made.load()
        self._seats[seat] = made
        self._resident[seat] = max(0, free_before - self._gpu.free_bytes())
        return Loaded(secs, self._proof(made.lane), made.launch_secs, made.ends)

    def _made(self, member: Member, lane: Lane, cut: Cut | None) -> CudaSeat:
        model = self._models[member.name]
        if cut is not None:
            return SegmentedSeat(member, lane, model, self._track(lane), cut)
        return WholeSeat(member, lane, model, self._track(lane), self.depth)

    def _stream(self, part: str) -> int:
        """Return a new stream of a lane's part of the GPU, or of the whole."""
        held = self._parts.get(part)
        return held[0].stream(held[1]) if held else self._gpu.stream()

    def _track(self, lane: Lane) -> Track:
        if lane.name not in self._tracks:
            part = lane.name if lane.name in self._parts else _WHOLE
            make = functools.partial(self._stream, part)
            # Few, because two streams may be one queue to the GPU.
            capture, bring = self._shared(part, "capture"), self._shared(_WHOLE, "bring")
            self._tracks[lane.name] = Track(make, capture, bring, self._completions)
        return self._tracks[lane.name]

    def _shared(self, part: str, use: str) -> int:
        """Return the stream of a part that all its lanes have for a use."""
        if (part, use) not in self._shared_streams:
            self._shared_streams[part, use] = self._stream(part)
        return self._shared_streams[part, use]

    def _proof(self, lane: Lane) -> Proof:
        _, part = self._parts.get(lane.name, (None, None))
        return Proof(
            lane=lane.name,
            device=self._gpu.name,
            units=part.sm_count if part else self._gpu.sm_count,
            mechanism="green context" if part else "stream",
            which=numbers_text(part.sms) if part else "",
        )
