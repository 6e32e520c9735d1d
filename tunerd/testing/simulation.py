"""A device in a simulation of discrete events: the real scheduler and policies, no time passes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunerd.colocation.estimates import Estimates
from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Policy
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.work import (
    Complete,
    Fail,
    Group,
    Instruction,
    Refuse,
    Request,
    Seat,
    Start,
)


def member(name: str, **said: object) -> Member:
    return Member.model_validate({"name": name, "artifact": Path(name), **said})


@dataclass
class Story:
    """What became of each request, by its number."""

    arrived: dict[int, Request] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # of first segments
    busy_secs: dict[str, float] = field(default_factory=dict)  # by member, or by group
    launches: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # when, and whose
    held: dict[int, float] = field(default_factory=dict)  # when first beside an idle lane

    @property
    def per_launch(self) -> float:
        """Return how many requests a launch has, on average."""
        return sum(len(ids) for _, ids in self.launches) / len(self.launches)

    def latencies(self, name: str) -> list[float]:
        return [
            at - self.arrived[i].arrived_at
            for i, at in self.ended.items()
            if self.arrived[i].member == name
        ]


class World:
    """Requests arrive, segments take what `secs` says of a member on a lane.

    groups: members that are loaded as one; a launch takes the `grown` of what its first member
        takes alone, by the number of requests for which the kernels are, of `COUNTS`.
    """

    COUNTS = (1, 2, 4, 8)

    def __init__(
        self,
        members: Sequence[Member],
        policy: Policy,
        *,
        secs: Mapping[str, float],
        segments: Mapping[str, int] | None = None,
        scale: Callable[[Seat], float] = lambda seat: 1.0,
        depth: int = 1,
        groups: Sequence[Group] = (),
        grown: Callable[[int], float] = lambda count: (1 + count) / 2,
    ) -> None:
        self.policy = policy
        lanes = policy.lay_out(members)
        alone = {m.name: m.name for m in members}
        of = alone | {name: group.name for group in groups for name in group.members}
        firsts = alone | {group.name: group.members[0] for group in groups}
        seats = {Seat(of[m], lane.name): None for lane in lanes for m in lane.members}
        counts = {seat: (segments or {}).get(seat.member, 1) for seat in seats}
        self._secs = {s: secs[firsts[s.member]] * scale(s) / counts[s] for s in seats}
        self._grown = grown
        estimates = Estimates()
        for seat in seats:
            for segment in range(counts[seat]):
                estimates.observe(seat, segment, self._secs[seat], now=0.0)
            if seat.member not in alone:
                estimates.compiled_for(seat, self.COUNTS)
                for count in self.COUNTS:
                    took = self._secs[seat] * grown(count)
                    estimates.observe(seat, 0, took, now=0.0, count=count)
        self.scheduler = Scheduler(
            members, lanes, policy, counts, estimates, depth=depth, groups=groups
        )
        self._free_at = dict.fromkeys((lane.name for lane in lanes), 0.0)
        self.story = Story()
        self.now = 0.0
        self.is_conserving = True  # no lane was idle beside what could have run there
        self._events: list[tuple[float, int, Callable[[], list[Instruction]]]] = []
        self._ids, self._order = itertools.count(), itertools.count()

    def secs_of(self, seat: Seat) -> float:
        """Return how long a segment takes; a test may put another in its place."""
        return self._secs[seat]

    def launch_secs(self, seat: Seat, count: int) -> float:
        """Return how long a launch of so many requests takes."""
        if count == 1:
            return self.secs_of(seat)
        return self.secs_of(seat) * self._grown(next(c for c in self.COUNTS if c >= count))

    def at(self, moment: float, event: Callable[[], list[Instruction]]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), event))

    def ask(
        self, moment: float, name: str, *, tenant: str = "default", within: float = math.inf
    ) -> int:
        request = Request(next(self._ids), name, tenant, moment, moment + within)

        def event() -> list[Instruction]:
            self.story.arrived[request.request_id] = request
            return self.scheduler.arrive(request, self.now)

        self.at(moment, event)
        return request.request_id

    def run(self, until: float = math.inf) -> Story:
        view = self.scheduler
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            for instruction in event():
                self._carry_out(instruction)
            for waiting in view.heads:
                if any(
                    view.can_start(waiting, lane) and self.policy.may_start(waiting, lane, view)
                    for lane in view.idle
                ):
                    self.is_conserving = False
                    self.story.held.setdefault(waiting.request.request_id, self.now)
            if not math.isinf(view.look_at):
                self.at(view.look_at, lambda: self.scheduler.turn((), self.now))
        return self.story

    def _carry_out(self, instruction: Instruction) -> None:
        story = self.story
        match instruction:
            case Start(start_id, _, seat, segment):
                secs = self.launch_secs(seat, len(instruction.request_ids))
                if segment == 0:
                    story.launches.append((self.now, instruction.request_ids))
                for request_id in instruction.request_ids:
                    if segment == 0 and request_id not in story.started:
                        story.started[request_id] = max(self.now, self._free_at[seat.lane])
                        story.order.append(request_id)
                story.busy_secs[seat.member] = story.busy_secs.get(seat.member, 0.0) + secs
                self._free_at[seat.lane] = max(self.now, self._free_at[seat.lane]) + secs
                self.at(
                    self._free_at[seat.lane],
                    lambda: self.scheduler.ended(start_id, seat, secs, self.now),
                )
            case Complete(request_id):
                story.ended[request_id] = self.now
            case Refuse(request_id, reason, was_admitted):
                story.refused[request_id] = reason
                if was_admitted:
                    story.late.add(request_id)
            case Fail(request_id, reason):
                story.failed[request_id] = reason
            case _:
                pass
