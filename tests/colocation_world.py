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
from tunerd.colocation.work import Complete, Fail, Instruction, Refuse, Request, Seat, Start


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
    busy_secs: dict[str, float] = field(default_factory=dict)  # by member

    def latencies(self, name: str) -> list[float]:
        return [
            at - self.arrived[i].arrived_at
            for i, at in self.ended.items()
            if self.arrived[i].member == name
        ]


class World:
    """Requests arrive, segments take what `secs` says of a member on a lane."""

    def __init__(
        self,
        members: Sequence[Member],
        policy: Policy,
        *,
        secs: Mapping[str, float],
        segments: Mapping[str, int] | None = None,
        scale: Callable[[Seat], float] = lambda seat: 1.0,
        depth: int = 1,
    ) -> None:
        lanes = policy.lay_out(members)
        seats = [Seat(m, lane.name) for lane in lanes for m in lane.members]
        counts = {seat: (segments or {}).get(seat.member, 1) for seat in seats}
        self._secs = {s: secs[s.member] * scale(s) / counts[s] for s in seats}
        estimates = Estimates()
        for seat in seats:
            for segment in range(counts[seat]):
                estimates.observe(seat, segment, self._secs[seat], now=0.0)
        self.scheduler = Scheduler(members, lanes, policy, counts, estimates, depth=depth)
        self._free_at = dict.fromkeys((lane.name for lane in lanes), 0.0)
        self.story = Story()
        self.now = 0.0
        self.is_conserving = True  # no lane was idle beside what could have run there
        self._events: list[tuple[float, int, Callable[[], list[Instruction]]]] = []
        self._ids, self._order = itertools.count(), itertools.count()

    def secs_of(self, seat: Seat) -> float:
        """Return how long a segment takes; a test may put another in its place."""
        return self._secs[seat]

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
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            for instruction in event():
                self._carry_out(instruction)
            view = self.scheduler
            self.is_conserving &= not any(
                view.can_start(w, lane) for w in view.heads for lane in view.idle
            )
        return self.story

    def _carry_out(self, instruction: Instruction) -> None:
        story = self.story
        match instruction:
            case Start(start_id, request_id, seat, segment):
                secs = self.secs_of(seat)
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
