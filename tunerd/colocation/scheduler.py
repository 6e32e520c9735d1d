"""Events in, instructions out: who waits, what runs, what each has had. No clock and no thread.

The engine tells it what happened and when, and carries out what it returns; a test does so with a
clock of its own. What happened at about the same time is told in one `turn`, and decided about
once. Which request goes where is the policy's. Here is what holds under every policy:

- requests of one queue start in the order of their arrival;
- a lane runs one segment at a time; as many as its `depth` are started, each behind the one before;
- a member has as many open requests in a lane as that depth, each with buffers of its own there;
  one, where it is in several segments: what is between them is there once;
- a request goes on where it began, segment after segment unless the policy prefers another one;
- what a fault took from others runs once more, first in its line;
- where a fault took several seats, or a launch of several requests, and nobody knows whose it was,
  what ran runs apart then, where the place can do that, and else alone: it has a name if it comes
  again;
- of several layouts of lanes one is in use, and another one begins when nothing runs in it;
- who exceeds its time is evicted, the one that has run for longest first; while seats are loaded
  again, which may hold up the device, nobody's time runs.

Requests of a group may start in one launch, if the policy says so: together they are one segment of
one seat. Each has its own answer, and its queue is charged its part. A launch is evicted when all
of its members would be, and what a caller gives up before it began leaves it alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tunerd.colocation.board import Board
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Choice, Policy, Together
from tunerd.colocation.suspects import Apart, likeliest_first
from tunerd.colocation.time_limits import TimeLimits
from tunerd.colocation.work import (
    Complete,
    Evict,
    Fail,
    FaultReport,
    Group,
    Instruction,
    Lane,
    Pause,
    Refuse,
    Reload,
    Request,
    Reshared,
    Running,
    Seat,
    Start,
    TryApart,
    Waiting,
)

_MAX_LOSSES = 1  # a request that others' faults hit more often fails

Event = Callable[["Scheduler", float], Sequence[Instruction]]


class Scheduler(Board):
    """State of one engine. Every method that returns instructions is told the moment.

    Args:
        lanes: with which it begins.
        other_lanes: layouts to which `reshare` may change, of other lanes each.
        depth: how many segments the place takes of a lane; the policy may want fewer.
        groups: members that are loaded as one.
        tries_apart: whether the place tries requests where a fault of them reaches nobody else.

    `look_at` is the moment to decide again although nothing has happened, infinite where none is.
    `takes_all`: whether the policy refuses nothing.
    """

    def __init__(
        self,
        members: Sequence[Member],
        lanes: Sequence[Lane],
        policy: Policy,
        segments: Mapping[Seat, int],
        estimates: Estimates,
        *,
        other_lanes: Sequence[Sequence[Lane]] = (),
        depth: int = 1,
        groups: Sequence[Group] = (),
        tries_apart: bool = False,
    ) -> None:
        super().__init__(
            members,
            lanes,
            segments,
            estimates,
            other_lanes=other_lanes,
            depth=min(depth, policy.depth),
            groups=groups,
        )
        self.look_at = math.inf
        self.faults: list[FaultReport] = []
        self._policy = policy
        self._is_patient = type(policy).lateness is Policy.lateness  # nothing is ever too late
        self.takes_all = type(policy).refusal is Policy.refusal
        self._given_up: dict[Seat, str] = {}  # seats that cannot be loaded again, and why
        self._apart, self._tries_apart = Apart(), tries_apart
        self._limits = TimeLimits(self)
        self._start_ids = itertools.count()
        self._is_in_turn = False

    # --- events --------------------------------------------------------------------------------

    def turn(
        self, events: Iterable[Event], now: float, arrived: Iterable[Request] = ()
    ) -> list[Instruction]:
        """Take events that came together, and requests, and decide when all are known."""
        self._is_in_turn = True
        try:
            out = [instruction for event in events for instruction in event(self, now)]
            for request in arrived:
                out += self.arrive(request, now)
        finally:
            self._is_in_turn = False
        self._begin(now)
        out += self._decided()
        return out

    def hopeless(self, member: str, deadline_at: float, now: float) -> str:
        """Say why a request that came now would be refused; "" where it is to be asked for.

        Any thread may ask.
        """
        return self._policy.hopeless(member, deadline_at, now, self)

    def why_down(self, member: str) -> str:
        """Say why a member cannot be loaded again; "" where it serves. Any thread may ask."""
        seats = [seat for _, seat in self._homes_in[self._layout][member]]
        if not self._given_up or any(seat not in self._given_up for seat in seats):
            return ""
        return f"{member} is down: {self._given_up[seats[0]]}"

    def arrive(self, request: Request, now: float) -> list[Instruction]:
        self._begin(now)
        waiting = Waiting(request)
        reason = self.why_down(request.member) if self._given_up else ""
        if reason or (not self.takes_all and (reason := self._policy.refusal(waiting, self))):
            return [Refuse(request.request_id, reason, was_admitted=False)]
        queue = request.queue
        self._accounts.open(queue)
        line = self._queues[queue]
        line.append(waiting)
        self._lines[queue] = line
        waiting.margin = self._margin.part(now)
        if (name := self.loaded_as[queue.member]) in self._together:
            self._rates.note(name, now)
        return self._decided()

    def ended(
        self, start_id: int, seat: Seat, secs: float, now: float, *, segments: int = 1
    ) -> list[Instruction]:
        """So many segments have ended well; `secs` is what they had of their lane."""
        self._begin(now)
        running = self._left_lane(start_id, seat)
        if running is None:  # evicted meanwhile
            return []
        first, count = running.waiting, len(running.waits)
        ran = range(first.segment, first.segment + segments)
        had_secs = now - running.started_at - running.excused_secs
        self._estimates.observe_together(seat, ran, secs, now=now, count=count, had_secs=had_secs)
        for waiting in running.waits:
            queue = waiting.request.queue
            self._accounts.charge(queue, secs / count / self.members[queue.member].weight)
            waiting.segment += segments
        if first.segment < self._segments[seat]:
            self._paused[first.request.request_id] = first
            return self._decided()
        self._close(running)
        for waiting in running.waits:
            if now > waiting.request.deadline_at and not waiting.losses:
                self._margin.missed(waiting, now)
        return [*_completed(running.waits), *self._decided()]

    def lost(
        self, seats: Iterable[Seat], now: float, *, culprit: str, reason: str
    ) -> list[Instruction]:
        """Fence seats that a fault has taken; `culprit` is the member that it is of, or ""."""
        self._begin(now)
        taken = frozenset(seats) & self._ready
        if not taken:
            return []
        self._ready -= taken
        self.outlook = None
        self._limits.load(taken)
        fault = FaultReport(culprit, reason, now, taken)
        self.faults.append(fault)
        out: list[Instruction] = []
        firsts = self._firsts()
        first = {w.request.request_id for running in firsts for w in running.waits}
        ran = [waiting for running in firsts if running.seat in taken for waiting in running.waits]
        suspects, apart = set[int](), list[tuple[Waiting, Seat]]()
        if not culprit and (len(taken) > 1 or len(ran) > 1):  # what takes one alone has a name
            suspects = {waiting.request.request_id for waiting in ran if not waiting.losses}
            if not self._tries_apart:
                self._suspects.add(w for w in ran if w.request.request_id in suspects)
        for seat in sorted(taken):
            self._slots[seat] = 0
            waits, self._open[seat] = self._open[seat], []
            for running in [r for r in self._running[seat.lane] if r.seat == seat]:
                self._left_lane(running.start_id, seat)
            for waiting in reversed(waits):  # the first comes first again
                request_id = waiting.request.request_id
                was_running = self._paused.pop(request_id, None) is None and request_id in first
                if was_running and waiting.request.member == culprit:
                    out.append(self._failed(waiting, reason))
                elif waiting.losses >= _MAX_LOSSES:
                    said = f"it was lost twice, at last to this: {reason}"
                    out.append(self._failed(waiting, said))
                else:
                    waiting.losses, waiting.segment, waiting.lane = waiting.losses + 1, 0, None
                    waiting.is_held = False
                    fault.retried += 1
                    if self._tries_apart and request_id in suspects:
                        self._apart.add(waiting, fault)
                        apart.append((waiting, seat))
                    else:
                        self._comes_first(waiting)
        out += map(Reload, sorted(taken))
        if apart:
            out.append(TryApart(likeliest_first(apart, firsts, self.faults)))
        return [*out, *self._decided()]

    def ready(self, seat: Seat, now: float, *, segments: int | None = None) -> list[Instruction]:
        """A seat was loaded again, in so many segments; as many as before if not given."""
        self._begin(now)
        self._limits.loaded(seat, self._firsts())
        self._ready.add(seat)
        self.outlook = None
        self._segments[seat] = segments or self._segments[seat]
        self._forget_estimates()
        self._slots[seat] = self._taken_at_once(seat)
        for fault in self.faults:
            if fault.recovered_secs is None and fault.lost <= self._ready:
                fault.recovered_secs = now - fault.at
        return self._decided()

    def tried_apart(
        self, request_id: int, now: float, *, reason: str = "", is_fault: bool = True
    ) -> list[Instruction]:
        """What was to be tried apart has its outputs; or there is a reason why it has none.

        That is a fault of its own, or it could not be tried: it runs alone then.
        """
        self._begin(now)
        taken = self._apart.take(request_id)
        if taken is None:
            return []
        waiting, fault = taken
        if not reason:
            self._accounts.close(waiting.request.queue)
            return [Complete(request_id), *self._decided()]
        if is_fault:
            fault.member, fault.reason = waiting.request.member, reason
            return [self._failed(waiting, reason), *self._decided()]
        self._suspects.add([waiting])
        self._comes_first(waiting)
        return [*self._of_those_down(), *self._decided()]

    def not_tried(self, request_ids: Iterable[int], now: float) -> list[Instruction]:
        """Some need not be tried apart: another one has faulted. They are the first in line."""
        self._begin(now)
        for request_id in sorted(request_ids, reverse=True):
            if (taken := self._apart.take(request_id)) is not None:
                self._comes_first(taken[0])
        return [*self._of_those_down(), *self._decided()]

    def given_up(self, seat: Seat, reason: str, now: float) -> list[Instruction]:
        """A seat cannot be loaded again; a member without any other is down."""
        self._begin(now)
        self._limits.loaded(seat, self._firsts())
        self._given_up[seat] = reason
        self.outlook = None
        return [*self._of_those_down(), *self._decided()]

    def reshare(self, layout: int, now: float) -> list[Instruction]:
        """Begin with another layout as soon as what runs has ended, and start nothing before."""
        self._begin(now)
        since = now if self._wanted is None else self._wanted[1]
        self._wanted = layout, since
        return self._decided()

    def withdrawn(
        self, start_id: int, seat: Seat, now: float, *, request_ids: Collection[int] = ()
    ) -> list[Instruction]:
        """Requests that were just started are not wanted any more, and did not run.

        All of the launch where none is named.
        """
        self._begin(now)
        running = next((r for r in self._running[seat.lane] if r.start_id == start_id), None)
        if running is None:
            return []
        left = [w for w in running.waits if not request_ids or w.request.request_id in request_ids]
        if len(left) < len(running.waits):
            running.waits = tuple(w for w in running.waits if w not in left)
            self._answered(left, seat)
        else:
            self._left_lane(start_id, seat)
            self._close(running)
        return [*_completed(left), *self._decided()]

    def tick(self, now: float) -> list[Instruction]:
        """Evict what has exceeded its time, and drop what is too late by now."""
        self._begin(now)
        out: list[Instruction] = []
        for running in sorted(self._firsts(), key=lambda running: running.started_at):
            if now >= self._limits.evicted_at(running):
                seat, limit_secs = running.seat, self._limits.secs(running)
                reason = f"{seat.member} exceeded its time of {limit_secs:.3g} s and was evicted"
                out.append(Evict(seat, reason))
                out += self.lost((seat,), now, culprit=running.culprit, reason=reason)
        return out + self._decided()

    def next_tick(self) -> float:
        """Return the moment at which one is to be evicted or dropped; infinite where none is."""
        evicted_at = min(map(self._limits.evicted_at, self._firsts()), default=math.inf)
        if self._is_patient:
            return evicted_at
        heads = (line[0].request.deadline_at for line in self._lines.values())
        return min(evicted_at, min(heads, default=math.inf))

    # --- deciding ------------------------------------------------------------------------------

    def _decided(self) -> list[Instruction]:
        if self._is_in_turn:
            return []
        self.look_at = math.inf
        if not (self._lines or self._paused or self._wanted):
            return []
        out: list[Instruction] = [] if self._wanted is None else self._changed()
        out += [] if self._is_patient else list(self._dropped())
        if self._suspects:
            self._suspects.keep([*self.waiting, *(running.waiting for running in self.running)])
        for chosen in self._policy.starts(self):
            if isinstance(chosen, Together):
                waits, lane = chosen.waits, chosen.lane
                if chosen.at > self.now:
                    self.look_at = chosen.at
                    for waiting in waits:
                        waiting.is_held = True
                    break
            else:
                waits, lane = (chosen[0],), chosen[1]
            out += self._started(waits, lane)
            if not (self._lines or self._paused):
                break
        return [*out, *self._pauses()] if self._lines or self._paused else out

    def _changed(self) -> list[Instruction]:
        """Change to the layout that is wanted, when nothing is open in this one."""
        assert self._wanted is not None
        if self._paused or any(self._running[name] for name in self.lanes):
            return []
        self._layout, since = self._wanted
        self._wanted, self.lanes = None, self._layouts[self._layout]
        self.outlook = None
        self._forget_estimates()
        return [Reshared(self._layout, self.now - since), *self._of_those_down()]

    def _of_those_down(self) -> list[Instruction]:
        """Refuse what waits for members that no seat is left of."""
        out: list[Instruction] = []
        for queue in [*self._lines]:
            if reason := self.why_down(queue.member):
                out += [self._refused(waiting, reason) for waiting in self._lines.pop(queue)]
                self._queues[queue].clear()
        return out

    def _pauses(self) -> Iterator[Pause]:
        """Yield pauses of what the policy would not choose again, if it were to choose now."""
        for name, line in self._running.items():
            if len(line) != 1 or not line[0].more or line[0].is_pausing:
                continue
            running = line.pop()
            request_id = running.waiting.request.request_id
            self._paused[request_id] = running.waiting
            self._room[name] += 1
            choice = self._policy.choose(self)
            self._room[name] -= 1
            del self._paused[request_id]
            line.append(running)
            if choice is not None and _first_of(choice) is not running.waiting:
                running.is_pausing = True
                yield Pause(running.seat)

    def _dropped(self) -> Iterator[Refuse]:
        for queue in [*self._lines]:
            line = self._lines[queue]
            while line and line[0].request.deadline_at < math.inf:
                if not (reason := self._policy.lateness(line[0], self)):
                    break
                yield self._refused(line.popleft(), reason)
            if not line:
                del self._lines[queue]

    def _started(self, waits: tuple[Waiting, ...], lane: Lane) -> list[Instruction]:
        first, *company = waits
        name = type(self._policy).__name__
        seat = self._seat(first.request.member, lane)
        if not self.can_start(first, lane):
            raise ValueError(f"{name} starts what cannot: {first}")
        if company and len(waits) > self.together(first):
            raise ValueError(f"{name} starts {len(waits)} in one launch of {seat.member}")
        if first.lane is None:
            self._slots[seat] -= 1
            for waiting in waits:
                queue = waiting.request.queue
                line = self._queues[queue]
                if line[0] is not waiting:
                    raise ValueError(f"{name} passes over {line[0]}")
                if queue.member not in lane.members or self._seat(queue.member, lane) != seat:
                    raise ValueError(f"{name} starts {queue.member} in a launch of {seat.member}")
                line.popleft()
                if not line:
                    del self._lines[queue]
                waiting.lane = lane.name
                self._open[seat].append(waiting)
        else:
            del self._paused[first.request.request_id]
        start_id = next(self._start_ids)
        more = self._segments[seat] - first.segment - 1
        is_pausing = bool(more) and self._policy.stops_always
        running = Running(start_id, waits, seat, self.now, more, is_pausing)
        self._running[lane.name].append(running)
        self._room[lane.name] -= 1
        ids = tuple(waiting.request.request_id for waiting in company)
        start = Start(start_id, first.request.request_id, seat, first.segment, ids)
        return [start, Pause(seat)] if is_pausing else [start]

    def _comes_first(self, waiting: Waiting) -> None:
        """Have a request wait as the first in its line."""
        line = self._queues[waiting.request.queue]
        line.appendleft(waiting)
        self._lines[waiting.request.queue] = line

    def _failed(self, waiting: Waiting, reason: str) -> Fail:
        self._accounts.close(waiting.request.queue)
        return Fail(waiting.request.request_id, reason)

    def _refused(self, waiting: Waiting, reason: str) -> Refuse:
        self._accounts.close(waiting.request.queue)
        return Refuse(waiting.request.request_id, reason, was_admitted=True)

    def _firsts(self) -> list[Running]:
        """Return what runs: one in each lane, whatever was started behind it."""
        return [line[0] for line in self._running.values() if line]


def _first_of(choice: Choice | Together) -> Waiting:
    return choice.waits[0] if isinstance(choice, Together) else choice[0]


def _completed(waits: Iterable[Waiting]) -> list[Complete]:
    return [Complete(waiting.request.request_id) for waiting in waits]
