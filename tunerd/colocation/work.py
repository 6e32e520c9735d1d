"""The values that pass between engine, scheduler, policies and places."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tunerd.errors import InfrastructureError


class RefusedError(InfrastructureError):
    """A request that is not carried out: it would end too late, or nobody can take it.

    was_admitted: it had waited before it was refused.
    """

    def __init__(self, reason: str, *, was_admitted: bool = False) -> None:
        super().__init__(reason)
        self.was_admitted = was_admitted


class MemberError(InfrastructureError):
    """A request whose member faulted or exceeded its time while it ran."""


@dataclass(frozen=True)
class Lane:
    """A part of the device on which one segment runs at a time.

    pct: of the device. A lane of 100% overlaps with all others, those below are disjoint.
    home: members whose requests belong here.
    guests: members that may run here while it is idle.
    cores: of a CPU lane, once the place has cut the device.
    """

    name: str
    pct: int
    home: tuple[str, ...]
    guests: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        return self.home + self.guests


@dataclass(frozen=True)
class Group:
    """Members of one architecture, each with weights of its own, that are loaded as one.

    Or a single member, whose artifact has several batches.

    name: under which they are; no member's.
    together: the most requests that one launch takes, of whichever members.
    kernels: the artifact whose kernels serve all of them.
    weights_bytes: of memory that their weights may have where they are loaded; None: all have it.
    """

    name: str
    members: tuple[str, ...]
    together: int
    kernels: Path = Path()
    weights_bytes: int | None = None


class Seat(NamedTuple):
    """A member, or a group, that is loaded for a lane."""

    member: str
    lane: str


class Queue(NamedTuple):
    """Whose requests wait in one line, in the order of their arrival."""

    member: str
    tenant: str


@dataclass(slots=True)
class Request:
    """Moments are seconds of the engine's clock. `request_id` grows with the arrival.

    It stays as it was made. No `frozen`: that takes three times as long to make.
    """

    request_id: int
    member: str
    tenant: str
    arrived_at: float
    deadline_at: float = math.inf
    queue: Queue = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.queue = Queue(self.member, self.tenant)


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that waits for its next segment to start."""

    request: Request
    segment: int = 0
    lane: str | None = None  # where its earlier segments have run, and it must go on
    losses: int = 0  # how often it was lost by a fault that was not its member's
    is_held: bool = False  # it waits for company beside an idle lane, or has
    margin: float = 0.0  # which part of its time it was to leave when it was admitted


@dataclass(eq=False, slots=True)
class Running:
    """A segment that was started. started_at: when, or later when what was before it ended.

    waits: whose; several where requests of a group are in one launch.
    excused_secs: what does not count against its limit, because others were loaded again.
    """

    start_id: int
    waits: tuple[Waiting, ...]
    seat: Seat
    started_at: float
    more: int = 0  # segments that follow the one with which it started
    is_pausing: bool = False  # it was asked to
    excused_secs: float = 0.0

    @property
    def lane(self) -> str:
        return self.seat.lane

    @property
    def waiting(self) -> Waiting:
        return self.waits[0]

    @property
    def culprit(self) -> str:
        """Return whose fault it is if it faults, "" where that cannot be said of one."""
        return self.waiting.request.member if len(self.waits) == 1 else ""


# --- instructions, which the scheduler gives ----------------------------------------------------


class Start(NamedTuple):
    """Run a request's segments on a lane, from this one on, until a pause or the end.

    company: requests that are in the same launch, where the seat is a group's.
    """

    start_id: int
    request_id: int
    seat: Seat
    segment: int
    company: tuple[int, ...] = ()

    @property
    def request_ids(self) -> tuple[int, ...]:
        return (self.request_id, *self.company)


@dataclass(frozen=True)
class Pause:
    """Have what runs in a seat stop at the end of a segment: somebody else is to have the lane."""

    seat: Seat


class Complete(NamedTuple):
    request_id: int


class TryApart(NamedTuple):
    """Run requests of seats' members once more, where a fault of them reaches nobody else.

    suspects: of one fault, the likeliest first: when one has faulted, the others need not be tried.
    """

    suspects: tuple[tuple[int, Seat], ...]


@dataclass(frozen=True)
class Refuse:
    """Answer with a reason. was_admitted: it had waited, and is refused late."""

    request_id: int
    reason: str
    was_admitted: bool


@dataclass(frozen=True)
class Fail:
    request_id: int
    reason: str


@dataclass(frozen=True)
class Evict:
    """End what runs in a seat; nothing of it may run when it is loaded again."""

    seat: Seat
    reason: str


@dataclass(frozen=True)
class Reload:
    seat: Seat


@dataclass(frozen=True)
class Reshared:
    """The lanes are others from now on. secs: since that was first asked for."""

    layout: int
    secs: float


Instruction = Start | Pause | Complete | TryApart | Refuse | Fail | Evict | Reload | Reshared


@dataclass
class FaultReport:
    """What a fault did. recovered_secs: until every seat that it took served again; None: not."""

    member: str
    reason: str
    at: float
    lost: frozenset[Seat]
    retried: int = 0
    recovered_secs: float | None = None
