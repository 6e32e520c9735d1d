"""The contract of a place: it cuts a device into lanes, loads seats there and runs segments.

Members, by the names in a plan: in-process (threads of this process on CPUs, streams on a GPU),
processes (a runner each, on CPUs) and mps (the same on a GPU, as clients of an MPS daemon). One
thread at a time asks `start`, `pause`, `poll` and `evict`: the dispatcher's, or while that sleeps
who sends a request, in a block of `borrowed`; loaders' ask `reload` and `run_apart`.
`start` begins work and returns; what comes of it is told later. There are three ways to that, and a
place may have several:

- A device works by itself once work was given to it. The dispatcher's thread gives it, and sees
  what has ended when it calls `poll`: it is told there (places/completions.py). No thread is woken
  for an end, and none is waited for.
- A runner says over its connection that it has ended. `poll` takes what has come over any of them,
  and the dispatcher's thread sleeps by the place's `bell`, which wakes it for that and for what
  other threads have for it (places/bell.py): no thread is between it and a runner.
- A CPU works in the thread that calls the model: each seat has a thread, which tells when it has
  ended (places/seat_thread.py). `poll` has nothing to do.

`depth` says how many segments of a lane the place takes before the first has ended, and a policy
how many it wants. Where a device or a runner takes two, it goes from one to the next without the
host. Threads of seats take one: seats of one lane would run at once, and a second for the same seat
would spare a change of threads only where the model takes less than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

import numpy as np

from tunerd.artifacts.segments import Cut
from tunerd.colocation.artifacts import Needed
from tunerd.colocation.places.bell import Bell
from tunerd.colocation.plan import Member, PlaceKind, Proof
from tunerd.colocation.work import Group, Lane, Seat
from tunerd.errors import HostError, InfrastructureError
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import Arrays, TensorSpec

# What each seat takes beside its tensors, by the kind of place.
PROCESS_BYTES: Mapping[PlaceKind, int] = {
    "in-process": 0,
    # A runner with a tiny model had 132 MiB resident, 64 MiB of them its own (x86-64, TVM 0.27).
    "processes": 150 << 20,
    # A process with TVM and one captured model: context, kernels, workspaces.
    "mps": 600 << 20,
}
# Launches of a stream that are started before the first has ended; each has large inputs and all
# outputs for itself.
STREAM_DEPTH = 2
# Requests of a process: it has the next one when it has ended one. Each has own inputs and outputs.
PROCESS_DEPTH = 2
# Requests that wait and lie where its process reads them, if they do not take too much together.
_PROCESS_AHEAD, _PROCESS_AHEAD_BYTES = 4, 16 << 20


def slots_ahead(request_bytes: int) -> int:
    """Return how many requests of a process may lie where it reads them before they are started."""
    return min(_PROCESS_AHEAD, _PROCESS_AHEAD_BYTES // max(1, request_bytes))


def seat_bytes(needed: Needed, place: PlaceKind, device: str, *, is_whole: bool = True) -> int:
    """Return what a seat of a member takes on a device, "cpu" or "cuda", beside what the seats of a
    process share.

    is_whole: it runs in one segment; else one request is there at a time.
    """
    copies_bytes = 0
    if place == "processes":  # clients of MPS have theirs in the host's memory, not the device's
        slots = PROCESS_DEPTH + slots_ahead(needed.request_bytes) if is_whole else 1
        copies_bytes = slots * needed.request_bytes
    elif place == "in-process" and device == "cuda" and is_whole:
        copies_bytes = STREAM_DEPTH * needed.ahead_bytes
        copies_bytes += (STREAM_DEPTH - 1) * needed.output_bytes
    return needed.each_bytes + copies_bytes + PROCESS_BYTES[place]


@dataclass(frozen=True)
class Loaded:
    """A seat that can take requests.

    segment_secs: of each of its segments, when it was tried.
    ends: after which of its kernels each of them ends, where it was cut.
    launch_secs: of a group's seat, by the number of requests for which there are kernels.
    """

    segment_secs: tuple[float, ...]
    proof: Proof
    launch_secs: Mapping[int, float] = field(default_factory=dict)
    ends: tuple[int, ...] = ()


class Done(NamedTuple):
    """Segments have ended.

    secs: that they had their lane.
    outputs: None before the last segment.
    segments: how many they were.
    each: instead of outputs, those of each request of a launch of a group, in their order.
    """

    secs: float
    outputs: Arrays | None
    segments: int = 1
    each: tuple[Arrays, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A segment has not ended well, and its seat takes nothing until it is loaded again.

    lost: the seats that went with it, its own among them.
    is_own: whether it is the fault of the member that ran, as far as anybody knows.
    """

    reason: str
    lost: tuple[Seat, ...]
    is_own: bool = True


class FaultedApartError(InfrastructureError):
    """What ran apart from the others has faulted: it is the member's own."""


Told = Callable[[Done | Fault], None]


class Place(ABC):
    """Where members run. close() is idempotent."""

    kind: ClassVar[str]
    depth: ClassVar[int] = 1  # segments of a lane that may be started before the first has ended
    loaders: ClassVar[int] = 1  # how many seats can be loaded again at once
    runs_apart: ClassVar[int] = 0  # at a time, where a fault of them reaches nobody else
    shares_weights: ClassVar[bool] = False  # all seats of a group have the same ones
    gpu_uuid: str | None = None  # of the GPU that is shared; None on CPUs
    bell: Bell | None = None  # by which who polls is to wait, where there is something to hear

    @abstractmethod
    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        """Give each lane its part of the device; HostError where they do not fit.

        Lanes of another call may have the same parts: those of one call are in use at a time.
        """

    @abstractmethod
    def capacity_bytes(self) -> int:
        """Return the memory that there is for seats."""

    @abstractmethod
    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        """Return the memory that so many seats of a member take, before any is loaded.

        cut: as `load` takes it.
        """

    @abstractmethod
    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        """Load a member for a lane, try it, and prove what it obtained.

        Args:
            cut: how long its segments may be in seconds, or after which kernels they end; None:
                whole.

        Raises LoadError or InfrastructureError.
        """

    def lent(self, specs: Sequence[TensorSpec]) -> Arrays:
        """Return arrays for a caller's inputs, whence `start` has least to do with them."""
        return {spec.name: np.zeros(spec.shape, dtype_of(spec.dtype)) for spec in specs}

    def holding(self, member: str, inputs: Arrays) -> Arrays:
        """Return a request's inputs where `start` has least to do with them, or as they are.

        Called by who sends the request, at the same time as by others.
        """
        return inputs

    def give_back(self, member: str, inputs: Arrays) -> None:  # noqa: B027
        """Take back what `holding` returned: the request has its answer."""

    def borrowed(self) -> AbstractContextManager[None]:
        """Have a caller's thread start segments in this block, and leave it as it was."""
        return nullcontext()

    @abstractmethod
    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        """Have a seat run a segment and those that follow, and return.

        It stops before the end where `pause` was asked for since; a further start goes on there.
        `inputs` are those of the first segment. `told` is called once, unless the seat is evicted
        before. Segments of a lane run in the order of their starts.
        """

    def brought(self) -> Mapping[str, int]:
        """Return how many times weights of each group's tenants were brought, by its name."""
        return {}

    def needed_together_bytes(self, group: Group, seats: int) -> int:
        """Return the memory that so many seats of a group take; HostError as `load_group`."""
        raise self._takes_no_groups(group)

    def load_group(self, group: Group, members: Sequence[Member], lane: Lane) -> Loaded:
        """Load a group for a lane, with the weights of members of it; raises as `load` does.

        HostError where the place has one member in a seat and no more.
        """
        raise self._takes_no_groups(group)

    def start_together(
        self, seat: Seat, requests: Sequence[tuple[str, Arrays]], told: Told
    ) -> None:
        """Have a group's seat run requests, by member, in one launch; as `start` for the rest."""
        raise NotImplementedError(f"{self.kind} has loaded no group")

    def _takes_no_groups(self, group: Group) -> HostError:
        return HostError(
            f"{', '.join(group.members)} run by {group.kernels}, whose kernels are for several "
            f"requests at once, and the place {self.kind} takes no groups; choose `place: "
            "in-process`, or give each an artifact for one model and one size"
        )

    def pause(self, seat: Seat) -> None:  # noqa: B027
        """Have what runs in a seat stop after its segment; what is whole goes on to its end."""

    def poll(self) -> float | None:
        """Tell what has ended and was not told; return after how many seconds to be asked again.

        None: when something else has happened, as nothing runs or threads tell by themselves.
        """
        return None

    @abstractmethod
    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        """Stop what runs in a seat, if it can be stopped; it is of no use until `reload`.

        Returns the seats that went with it, its own among them.
        """

    @abstractmethod
    def reload(self, seat: Seat) -> Loaded:
        """Load a seat again after a fault or an eviction; raises as `load` does."""

    def run_apart(self, seat: Seat, inputs: Arrays) -> Arrays:
        """Run a seat's member once where a fault of it reaches nobody else; return its outputs.

        In one of `runs_apart` threads of the loader's. Raises FaultedApartError for a fault of its
        own, anything else where it could not be tried.
        """
        raise NotImplementedError(f"{self.kind} runs nothing apart")

    def end_apart(self) -> None:  # noqa: B027
        """End what runs apart, and what would, from any thread: nobody waits for it any more."""

    def kill(self, member: str) -> None:
        """Kill the processes of a member's seats, from any thread; HostError where none may be."""
        raise HostError(
            f"the place {self.kind} has no process of {member} that may be killed; choose "
            "`place: processes`"
        )

    @abstractmethod
    def close(self) -> None:
        """Stop all seats."""

    def memory_bytes(self) -> Mapping[Seat, int]:
        """Return what seats were found to hold, of those whose place can tell."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_cores(lanes: Sequence[Lane]) -> None:
    """Raise HostError where a lane of a GPU is to have cores."""
    if named := [lane for lane in lanes if lane.cores]:
        raise HostError(f"{named[0].name} is to have cores, and this place is a GPU: name none")
