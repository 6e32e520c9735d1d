"""What a placement is about: devices, jobs, what is seen of jobs that run, and instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunerd.colocation.planning.pairs import Side


@dataclass(frozen=True)
class Device:
    """A GPU, an instance of MIG, or cores. units: its SMs or cores."""

    name: str
    memory_bytes: int
    units: int


@dataclass(frozen=True)
class Job:
    """A model that serves or a tuning run.

    memory_bytes: of a device, what it needs; known of an artifact, and else estimated.
    units: of a device, what it keeps busy when it is alone.
    side: what slowdowns are estimated from; None where nothing is known.
    not_on: devices that it cannot run on, by name.
    """

    name: str
    memory_bytes: int
    units: float
    side: Side | None = None
    not_on: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reading:
    """What a job that runs is seen to hold and to keep busy."""

    memory_bytes: int
    units: float


@dataclass(frozen=True)
class Place:
    """Start a job on a device. note: what the policy has to say of it."""

    job: str
    device: str
    note: str = ""


@dataclass(frozen=True)
class Fail:
    """A job that no device can take."""

    job: str
    reason: str


Instruction = Place | Fail


@dataclass(frozen=True)
class State:
    """A device and what is on it, as policies see it.

    promised_bytes: what its jobs need, or hold where that is more.
    """

    device: Device
    jobs: tuple[Job, ...]
    promised_bytes: int
    busy_units: float

    @property
    def free_bytes(self) -> int:
        """Below zero where jobs hold more than they were said to need."""
        return self.device.memory_bytes - self.promised_bytes

    @property
    def utilisation(self) -> float:
        """The busy part of its units; above one where jobs want more than there are."""
        return self.busy_units / self.device.units


@dataclass(frozen=True)
class View:
    """What a policy decides by.

    states: the devices that can take the job now, in the order of `devices`; never empty.
    last: the device that got a job last, None before the first.
    """

    states: Sequence[State]
    devices: Sequence[str]
    last: str | None
