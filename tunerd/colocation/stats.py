"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tunerd.colocation.plan import Proof
from tunerd.colocation.work import FaultReport, Lane, MemberError, RefusedError


@dataclass
class Counters:
    """Of one member's requests, since the start."""

    completed: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    latency_secs: float = 0.0  # of those completed, in all; from arrival to answer

    def add(self, answer: object, secs: float) -> None:
        """Count an answer after so long: outputs, an error, or None where it was cancelled."""
        match answer:
            case None:
                self.cancelled += 1
            case MemberError():
                self.failed += 1
            case RefusedError():
                self.refused += 1
            case _:
                self.completed += 1
                self.latency_secs += secs


@dataclass
class Launches:
    """Of a group, since the start: those that have ended well, and the requests in them.

    brought: how many times a member's weights were brought, which had no memory meanwhile.
    """

    launches: int = 0
    requests: int = 0
    of_size: dict[int, int] = field(default_factory=dict)  # launches by the requests in them
    brought: int = 0

    def add(self, requests: int) -> None:
        """Count a launch of so many requests."""
        self.launches += 1
        self.requests += requests
        self.of_size[requests] = self.of_size.get(requests, 0) + 1

    def copy(self) -> Launches:
        return Launches(self.launches, self.requests, dict(sorted(self.of_size.items())))

    @property
    def per_launch(self) -> float | None:
        return self.requests / self.launches if self.launches else None


@dataclass(frozen=True)
class MemberStats:
    completed: int
    failed: int
    refused: int
    cancelled: int
    latency_secs: float
    planned_bytes: int  # of memory, of all its seats
    tuned_for: tuple[int, ...]  # SMs, on CPUs cores

    @property
    def mean_secs(self) -> float | None:
        return self.latency_secs / self.completed if self.completed else None


@dataclass(frozen=True)
class EngineStats:
    policy: str
    place: str
    members: Mapping[str, MemberStats]
    lanes: tuple[Lane, ...]
    proofs: tuple[Proof, ...]
    faults: tuple[FaultReport, ...]
    groups: Mapping[str, Launches]
    down: Mapping[str, str]  # members that cannot be loaded again, and why; they serve no more

    @property
    def mismatches(self) -> list[str]:
        """Say who runs on its own lane with other kernels than those that may be fastest."""
        units = {proof.lane: proof.units for proof in self.proofs}
        return [
            f"{name} has {units[lane.name]} cores in {lane.name} and was tuned for "
            f"{' or '.join(map(str, self.members[name].tuned_for))}"
            for lane in self.lanes
            for name in lane.home
            if self.members[name].tuned_for and units[lane.name] not in self.members[name].tuned_for
        ]
