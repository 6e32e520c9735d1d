"""Who runs where, and what each member may expect of it: what a placement is, and a forecast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tunerd.colocation.planning.curves import Point
from tunerd.colocation.planning.engine_cost import EngineCost
from tunerd.colocation.planning.pairs import Side, Slowdown
from tunerd.colocation.planning.residency import NEVER_COLD, Cold, Residency

WHOLE = 100  # percent
Kind = Literal["time", "space", "space-time"]


@dataclass(frozen=True)
class Subject:
    """A member as the search sees it. part: of its requests that are to be within `slo_secs`."""

    name: str
    of: str  # entry of the mix, which has the curve
    rate: float  # requests per second
    slo_secs: float | None = None
    part: float = 0.99
    architecture: str = ""
    features: Mapping[str, float] = field(default_factory=dict)
    artifact: Path = Path()
    kernels: Path = Path()  # the artifact by which it runs, where its own is weights alone
    has_batches: bool = False  # a launch may take several of its requests
    shared_bytes: int = 0  # of memory, once
    each_bytes: int = 0  # of each seat
    residency: Residency | None = None  # of its group, where not all weights of it have memory

    @property
    def has_weights_there(self) -> bool:
        """Whether its weights never leave the device."""
        return self.residency is None or self.name in self.residency.own


@dataclass(frozen=True)
class Lane:
    """A part of the device, and who takes turns in it.

    together: how many requests of an entry's members a launch has at most.
    """

    share: int  # percent
    members: tuple[str, ...]
    together: int = 1


@dataclass(frozen=True)
class Placement:
    """Who runs where. Each lane of space-time serves everyone, and those of space their members."""

    kind: Kind
    lanes: tuple[Lane, ...]

    @property
    def together(self) -> int:
        """Return how many requests a launch has at most."""
        return max(lane.together for lane in self.lanes)

    def text(self, who: Callable[[Sequence[str]], str] = ", ".join) -> str:
        """Return it in words; `who` names the members of a lane."""
        if self.kind == "time":
            return "one after another, each on the whole device"
        if self.kind == "space-time":
            share, count = self.lanes[0].share, len(self.lanes)
            slices = f"{count} slices of {share}%" if count > 1 else f"one slice of {share}%"
            return f"{slices}, up to {self.together} requests in a launch"
        return "; ".join(
            f"{lane.share}%: {who(lane.members)}"
            + (f" (up to {lane.together} in a launch)" if lane.together > 1 else "")
            for lane in self.lanes
        )


class Resident(NamedTuple):
    """What runs in a lane at a time, beside others': a member, or launches of several of an entry.

    sizes: the launches that it may have, the smallest first; none where nothing was measured.
    """

    side: Side
    subjects: tuple[Subject, ...]
    sizes: tuple[Point, ...]

    @property
    def busy(self) -> float:
        """Return the part of the time in which it runs; of launches, if all were full."""
        if not self.sizes:
            return 1.0
        rate = math.fsum(subject.rate for subject in self.subjects)
        return min(1.0, rate * self.sizes[-1].secs.value / self.sizes[-1].together)

    @property
    def artifacts(self) -> tuple[Path, ...]:
        """Return what it runs by: the artifact with the kernels first, then others' weights."""
        kernels = self.subjects[0].kernels
        return tuple(dict.fromkeys((kernels, *(subject.artifact for subject in self.subjects))))


@dataclass(frozen=True)
class Expected:
    """What a member may expect, by itself and with its neighbours."""

    member: str
    share: int
    units: int
    secs: float  # of one launch, with its slowdown
    p50_secs: float
    tail_secs: float  # that `part` of its requests take at most
    part: float
    slo_secs: float | None
    rate: float
    busy: float  # the part of the time in which it has its lane, cold starts in it
    lane_busy: float
    slowdown: Slowdown
    memory_bytes: int
    engine: EngineCost | None  # in p50_secs and tail_secs; None: not measured, and taken for none
    point: Point
    score: float
    problem: str  # "" where it has what it was promised
    cold: Cold = NEVER_COLD  # in p50_secs and tail_secs, and not in secs


@dataclass(frozen=True)
class Forecast:
    """What a placement gives. score: its worst member's. It is fit where it has no problem."""

    placement: Placement
    expected: tuple[Expected, ...]
    score: float
    problems: tuple[str, ...]

    @property
    def is_fit(self) -> bool:
        return not self.problems

    @property
    def has_colds(self) -> bool:
        """Whether requests of a member may find its weights not on the device."""
        return any(each.cold.part for each in self.expected)

    @property
    def worst(self) -> Expected:
        return max(self.expected, key=lambda each: each.score)
