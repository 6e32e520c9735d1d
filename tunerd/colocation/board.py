"""What waits and what runs: what a scheduler changes, and what a policy sees of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tunerd.colocation.accounts import Accounts
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.margin import Margin
from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Choice, View
from tunerd.colocation.rates import Rates
from tunerd.colocation.suspects import Suspects
from tunerd.colocation.work import Group, Lane, Queue, Running, Seat, Waiting

_ESTIMATED_SECS = 0.002  # for which estimates are kept: to ask takes longer than to decide


class Board(View):
    """State of one engine. The arguments are those of a scheduler."""

    def __init__(
        self,
        members: Sequence[Member],
        lanes: Sequence[Lane],
        segments: Mapping[Seat, int],
        estimates: Estimates,
        *,
        other_lanes: Sequence[Sequence[Lane]] = (),
        depth: int = 1,
        groups: Sequence[Group] = (),
    ) -> None:
        self.now = -math.inf
        self.members = {member.name: member for member in members}
        self.loaded_as = {m.name: m.name for m in members} | {
            name: group.name for group in groups for name in group.members
        }
        self._together = {group.name: group.together for group in groups}
        self._layouts = [{lane.name: lane for lane in each} for each in (lanes, *other_lanes)]
        self._layout = 0
        self.lanes: Mapping[str, Lane] = self._layouts[0]  # in use
        self._wanted: tuple[int, float] | None = None  # another layout, and since when
        self._segments = dict(segments)
        self._estimates = estimates
        self._queues: dict[Queue, deque[Waiting]] = {
            Queue(m.name, tenant): deque() for m in members for tenant in m.tenants
        }
        self._lines: dict[Queue, deque[Waiting]] = {}  # the queues in which somebody waits
        self._accounts = Accounts(self._queues)
        every = [lane for each in self._layouts for lane in each.values()]
        self._room = {lane.name: depth for lane in every}  # segments that a lane takes
        self._depth = depth
        self._seats = {
            x.name: {m.name: Seat(self.loaded_as[m.name], x.name) for m in members} for x in every
        }
        self._slots = {seat: self._taken_at_once(seat) for seat in segments}  # 0: it is fenced
        self._homes_in = [  # where a member runs in each layout, in the order of lanes
            {
                name: [
                    (x, self._seat(name, x))
                    for x in each.values()
                    if name in x.members and self._seat(name, x) in segments
                ]
                for name in self.members
            }
            for each in self._layouts
        ]
        self._who: dict[str, list[tuple[Seat, list[deque[Waiting]]]]] = {  # comes to a lane
            x.name: [
                (self._seat(m.name, x), [self._queues[Queue(m.name, t)] for t in m.tenants])
                for m in members
                if m.name in x.members and self._seat(m.name, x) in segments
            ]
            for x in every
        }
        self._running: dict[str, deque[Running]] = {lane.name: deque() for lane in every}
        self._open: dict[Seat, list[Waiting]] = {seat: [] for seat in segments}
        self._paused: dict[int, Waiting] = {}  # by request: open, between two segments
        self._suspects = Suspects()
        self._rates = Rates()
        self._margin = Margin()
        self._ready = set(segments)
        self._left_secs: dict[Seat, dict[tuple[int, bool, int], float]] = {}  # as last estimated
        self._estimated_at = -math.inf
        self.noted = {}

    # --- what policies see ---------------------------------------------------------------------

    @property
    def idle(self) -> list[Lane]:
        return [lane for name, lane in self.lanes.items() if self._room[name] > 0]

    @property
    def running(self) -> list[Running]:
        return [running for line in self._running.values() for running in line]

    def on(self, lane: Lane) -> Sequence[Running]:
        return self._running[lane.name]

    @property
    def heads(self) -> list[Waiting]:
        return [*self._paused.values(), *(line[0] for line in self._lines.values())]

    @property
    def waiting(self) -> Iterator[Waiting]:
        yield from self._paused.values()
        for line in self._lines.values():
            yield from line

    @property
    def is_empty(self) -> bool:
        return not self._lines and not any(self._open.values())

    def startable(self) -> Iterator[Choice]:
        if self._suspects:
            yield from self._startable_suspects()
            return
        room, slots = self._room, self._slots
        for waiting in self._paused.values():
            if waiting.lane is not None and room[waiting.lane] > 0:
                yield waiting, self.lanes[waiting.lane]
        if self._wanted is not None:  # other lanes are to be in use first
            return
        idle = self.idle
        if len(idle) < len(self._lines):  # as where everybody has much to do
            for lane in idle:
                for seat, lines in self._who[lane.name]:
                    if slots[seat] > 0:
                        yield from ((line[0], lane) for line in lines if line)
            return
        homes = self._homes_in[self._layout]
        for queue, line in self._lines.items():
            for lane, seat in homes[queue.member]:
                if room[lane.name] > 0 and slots[seat] > 0:
                    yield line[0], lane

    def next_of(self, queue: Queue) -> Iterator[Choice]:
        line = self._lines.get(queue)
        if line and not self._suspects and self._wanted is None:
            room, slots = self._room, self._slots
            for lane, seat in self._homes_in[self._layout][queue.member]:
                if room[lane.name] > 0 and slots[seat] > 0:
                    yield line[0], lane

    def _startable_suspects(self) -> Iterator[Choice]:
        for waiting in self.heads:
            for lane, _ in self._homes_in[self._layout][waiting.request.member]:
                if self.can_start(waiting, lane):
                    yield waiting, lane

    def can_start(self, waiting: Waiting, lane: Lane) -> bool:
        if self._room[lane.name] <= 0:
            return False
        if self._suspects and (self.running or waiting.request.queue not in self._suspects.queues):
            return False
        if waiting.lane is not None:
            return waiting.lane == lane.name and waiting.request.request_id in self._paused
        if self._wanted is not None or lane.name not in self.lanes:
            return False
        member = waiting.request.member
        return member in lane.members and self._slots.get(self._seat(member, lane), 0) > 0

    def left_secs(
        self, waiting: Waiting, lane: Lane, *, likely: bool = False, count: int = 1
    ) -> float:
        seat = self._seats[lane.name][waiting.request.member]
        known, key = self._left_secs.get(seat), (waiting.segment, likely, count)
        if known is None:
            known = self._left_secs[seat] = {}
        secs = known.get(key)
        if secs is None:
            ask = self._estimates.likely_secs if likely else self._estimates.secs
            segments = range(waiting.segment, self._segments.get(seat, 1))
            each = [ask(seat, segment, now=self.now, count=count) for segment in segments]
            secs = known[key] = each[0] if len(each) == 1 else math.fsum(each)
        return secs

    def segment_secs(self, waiting: Waiting, lane: Lane) -> float:
        seat = self._seat(waiting.request.member, lane)
        return self._estimates.secs(seat, waiting.segment, now=self.now)

    def margin(self, now: float) -> float:
        return self._margin.part(now)

    def lag_secs(self, queue: Queue) -> float:
        return self._accounts.lag_secs(queue)

    def may_lag(self, secs: float) -> bool:
        return self._accounts.may_lag(secs)

    def together(self, waiting: Waiting) -> int:
        if self._suspects:
            return 1
        return self._together.get(self.loaded_as[waiting.request.member], 1)

    def mates(self, waiting: Waiting, lane: Lane) -> Sequence[Sequence[Waiting]]:
        name = self.loaded_as[waiting.request.member]
        names = {member for member in lane.members if self.loaded_as[member] == name}
        return [line for queue, line in self._lines.items() if queue.member in names]

    def gap_secs(self, waiting: Waiting) -> float:
        return self._rates.gap_secs(self.loaded_as[waiting.request.member], self.now)

    # --- what a scheduler changes --------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self.now = now
        if now >= self._estimated_at + _ESTIMATED_SECS:
            self._forget_estimates()
            self._estimated_at = now

    def _forget_estimates(self) -> None:
        self._left_secs.clear()
        self.noted.clear()

    def _seat(self, member: str, lane: Lane) -> Seat:
        return self._seats[lane.name][member]

    def _taken_at_once(self, seat: Seat) -> int:
        return self._depth if self._segments[seat] == 1 else 1

    def _left_lane(self, start_id: int, seat: Seat) -> Running | None:
        """Take a segment out of its lane; return None where it is not there any more."""
        line = self._running[seat.lane]
        if line and line[0].start_id == start_id:  # as nearly always
            running = line.popleft()
            if line:
                line[0].started_at = self.now
        else:
            found = next((r for r in line if r.start_id == start_id), None)
            if found is None:
                return None
            line.remove(running := found)
        self._room[seat.lane] += 1
        return running

    def _close(self, running: Running) -> None:
        """Note that a launch has left its seat for good, and that its requests are answered."""
        self._slots[running.seat] += 1
        self._answered(running.waits, running.seat)

    def _answered(self, waits: Iterable[Waiting], seat: Seat) -> None:
        for waiting in waits:
            self._open[seat].remove(waiting)
            self._accounts.close(waiting.request.queue)
