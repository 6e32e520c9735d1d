"""Events in, instructions out: who waits, what runs, what each has had. No clock and no thread.

The engine tells it what happened and when, and carries out what it returns; a test does so with a
clock of its own. Which request goes where is the policy's. Here is what holds under every policy:

- requests of one queue start in the order of their arrival;
- a lane runs one segment at a time, and a member has one open request in a lane: its buffers there
  are one set;
- a request goes on where it began, segment after segment unless the policy prefers another one;
- what a fault took from others runs once more, first in its line.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tunerd.colocation.estimates import Estimates
from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Choice, Policy, View
from tunerd.colocation.work import (
    Complete,
    Evict,
    Fail,
    FaultReport,
    Instruction,
    Lane,
    Pause,
    Queue,
    Refuse,
    Reload,
    Request,
    Running,
    Seat,
    Start,
    Waiting,
)

# A member without a limit of its own is evicted after so many times what it takes.
_LIMIT_TIMES, _LEAST_LIMIT_SECS = 100.0, 10.0
_MAX_LOSSES = 1  # a request that others' faults hit more often fails


class Scheduler(View):
    """State of one engine. Every method that returns instructions is told the moment."""

    def __init__(
        self,
        members: Sequence[Member],
        lanes: Sequence[Lane],
        policy: Policy,
        segments: Mapping[Seat, int],
        estimates: Estimates,
    ) -> None:
        self.now = -math.inf
        self.members = {member.name: member for member in members}
        self.lanes = {lane.name: lane for lane in lanes}
        self.faults: list[FaultReport] = []
        self._policy = policy
        self._segments = dict(segments)
        self._estimates = estimates
        self._queues: dict[Queue, deque[Waiting]] = {
            Queue(m.name, tenant): deque() for m in members for tenant in m.tenants
        }
        self._accounts = dict.fromkeys(self._queues, 0.0)
        self._running: dict[str, Running] = {}
        self._open: dict[Seat, Waiting] = {}
        self._ready = set(segments)
        self._down: dict[str, str] = {}  # members that cannot be loaded again, and why
        self._start_ids = itertools.count()
        self._left_secs: dict[tuple[str, str, int, bool], float] = {}  # of this moment

    # --- events --------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> list[Instruction]:
        self._begin(now)
        waiting = Waiting(request)
        reason = self._down.get(request.member) or self._policy.refusal(waiting, self)
        if reason:
            return [Refuse(request.request_id, reason, was_admitted=False)]
        self._activate(request.queue)
        self._queues[request.queue].append(waiting)
        return self._decided()

    def ended(
        self, start_id: int, seat: Seat, secs: float, now: float, *, segments: int = 1
    ) -> list[Instruction]:
        """So many segments have ended well; `secs` is what they had of their lane."""
        self._begin(now)
        running = self._running.get(seat.lane)
        if running is None or running.start_id != start_id:  # evicted meanwhile
            return []
        del self._running[seat.lane]
        waiting = running.waiting
        request = waiting.request
        self._observe(seat, range(waiting.segment, waiting.segment + segments), secs)
        self._accounts[request.queue] += secs / self.members[seat.member].weight
        waiting.segment += segments
        if waiting.segment < self._segments[seat]:
            return self._decided()
        del self._open[seat]
        return [Complete(request.request_id), *self._decided()]

    def lost(
        self, seats: Iterable[Seat], now: float, *, culprit: str, reason: str
    ) -> list[Instruction]:
        """Fence seats that a fault has taken; `culprit` is the member that it is of, or ""."""
        self._begin(now)
        taken = frozenset(seats) & self._ready
        if not taken:
            return []
        self._ready -= taken
        fault = FaultReport(culprit, reason, now, taken)
        self.faults.append(fault)
        out: list[Instruction] = []
        for seat in sorted(taken):
            running = self._running.get(seat.lane)
            is_running = running is not None and running.seat == seat
            if is_running:
                del self._running[seat.lane]
            waiting = self._open.pop(seat, None)
            if waiting is None:
                continue
            request_id = waiting.request.request_id
            if is_running and seat.member == culprit:
                out.append(Fail(request_id, reason))
            elif waiting.losses >= _MAX_LOSSES:
                out.append(Fail(request_id, f"it was lost twice, at last to this: {reason}"))
            else:
                waiting.losses, waiting.segment, waiting.lane = waiting.losses + 1, 0, None
                self._queues[waiting.request.queue].appendleft(waiting)
                fault.retried += 1
        return [*out, *map(Reload, sorted(taken)), *self._decided()]

    def ready(self, seat: Seat, now: float, *, segments: int | None = None) -> list[Instruction]:
        """A seat was loaded again, in so many segments; as many as before if not given."""
        self._begin(now)
        self._ready.add(seat)
        self._segments[seat] = segments or self._segments[seat]
        for fault in self.faults:
            if fault.recovered_secs is None and fault.lost <= self._ready:
                fault.recovered_secs = now - fault.at
        return self._decided()

    def given_up(self, seat: Seat, reason: str, now: float) -> list[Instruction]:
        """A seat cannot be loaded again; a member without any other is down."""
        self._begin(now)
        if any(other.member == seat.member for other in self._ready):
            return self._decided()
        self._down[seat.member] = f"{seat.member} is down: {reason}"
        out: list[Instruction] = []
        for queue, line in self._queues.items():
            if queue.member == seat.member:
                out += [
                    Refuse(w.request.request_id, self._down[seat.member], was_admitted=True)
                    for w in line
                ]
                line.clear()
        return out + self._decided()

    def withdrawn(self, start_id: int, seat: Seat, now: float) -> list[Instruction]:
        """A request that was just started is not wanted any more, and did not run."""
        self._begin(now)
        running = self._running.get(seat.lane)
        if running is None or running.start_id != start_id:
            return []
        del self._running[seat.lane], self._open[seat]
        return [Complete(running.waiting.request.request_id), *self._decided()]

    def tick(self, now: float) -> list[Instruction]:
        """Evict what has exceeded its time, and drop what is too late by now."""
        self._begin(now)
        out: list[Instruction] = []
        for running in [*self._running.values()]:
            limit_secs = self._limit_secs(running)
            if now >= running.started_at + limit_secs:
                seat = running.seat
                reason = f"{seat.member} exceeded its time of {limit_secs:.3g} s and was evicted"
                out.append(Evict(seat, reason))
                out += self.lost((seat,), now, culprit=seat.member, reason=reason)
        return out + self._decided()

    def next_tick(self) -> float:
        """Return the moment at which the first eviction is due; infinite where nothing runs."""
        dues = (r.started_at + self._limit_secs(r) for r in self._running.values())
        return min(dues, default=math.inf)

    # --- what policies see ---------------------------------------------------------------------

    @property
    def idle(self) -> list[Lane]:
        return [lane for name, lane in self.lanes.items() if name not in self._running]

    @property
    def running(self) -> list[Running]:
        return list(self._running.values())

    @property
    def heads(self) -> list[Waiting]:
        busy = {id(running.waiting) for running in self._running.values()}
        paused = [w for w in self._open.values() if id(w) not in busy]
        return paused + [line[0] for line in self._queues.values() if line]

    @property
    def waiting(self) -> Iterator[Waiting]:
        busy = {id(running.waiting) for running in self._running.values()}
        yield from (w for w in self._open.values() if id(w) not in busy)
        for line in self._queues.values():
            yield from line

    @property
    def is_empty(self) -> bool:
        return not self._open and not any(self._queues.values())

    def can_start(self, waiting: Waiting, lane: Lane) -> bool:
        seat = Seat(waiting.request.member, lane.name)
        if lane.name in self._running or seat not in self._ready:
            return False
        return waiting.lane == lane.name or (waiting.lane is None and seat not in self._open)

    def left_secs(self, waiting: Waiting, lane: Lane, *, likely: bool = False) -> float:
        key = (waiting.request.member, lane.name, waiting.segment, likely)
        secs = self._left_secs.get(key)
        if secs is None:
            seat = Seat(waiting.request.member, lane.name)
            ask = self._estimates.likely_secs if likely else self._estimates.secs
            segments = range(waiting.segment, self._segments.get(seat, 1))
            secs = math.fsum(ask(seat, segment, now=self.now) for segment in segments)
            self._left_secs[key] = secs
        return secs

    def segment_secs(self, waiting: Waiting, lane: Lane) -> float:
        seat = Seat(waiting.request.member, lane.name)
        return self._estimates.secs(seat, waiting.segment, now=self.now)

    def lag_secs(self, queue: Queue) -> float:
        active = [account for q, account in self._accounts.items() if self._is_active(q)]
        return max(active, default=0.0) - self._accounts[queue]

    def _begin(self, now: float) -> None:
        self.now = now
        self._left_secs.clear()

    # --- deciding ------------------------------------------------------------------------------

    def _decided(self) -> list[Instruction]:
        out: list[Instruction] = list(self._dropped())
        while (choice := self._policy.choose(self)) is not None:
            out.append(self._started(choice))
        return [*out, *self._paused()]

    def _paused(self) -> Iterator[Pause]:
        """Yield pauses of what the policy would not choose again, if it were to choose now."""
        for name, running in [*self._running.items()]:
            if not running.more or running.is_pausing:
                continue
            del self._running[name]
            choice = self._policy.choose(self)
            is_preferred = choice is None or choice[0] is running.waiting
            self._running[name] = replace(running, is_pausing=not is_preferred)
            if not is_preferred:
                yield Pause(running.seat)

    def _dropped(self) -> Iterator[Refuse]:
        for line in self._queues.values():
            while line and (reason := self._policy.lateness(line[0], self)):
                waiting = line.popleft()
                yield Refuse(waiting.request.request_id, reason, was_admitted=True)

    def _started(self, choice: Choice) -> Start:
        waiting, lane = choice
        request = waiting.request
        if not self.can_start(waiting, lane):
            raise ValueError(f"{type(self._policy).__name__} starts what cannot: {waiting}")
        seat = Seat(request.member, lane.name)
        if waiting.lane is None:
            line = self._queues[request.queue]
            if line[0] is not waiting:
                raise ValueError(f"{type(self._policy).__name__} passes over {line[0]}")
            line.popleft()
            waiting.lane = lane.name
            self._open[seat] = waiting
        more = self._segments[seat] - waiting.segment - 1
        running = Running(next(self._start_ids), waiting, lane.name, self.now, more)
        self._running[lane.name] = running
        return Start(running.start_id, request.request_id, seat, waiting.segment)

    def _observe(self, seat: Seat, segments: range, secs: float) -> None:
        """Take what segments had together as spread over them as it was expected."""
        expected = [self._estimates.secs(seat, segment, now=self.now) for segment in segments]
        together = math.fsum(expected)
        for segment, one in zip(segments, expected, strict=True):
            part = one / together if together else 1 / len(segments)
            self._estimates.observe(seat, segment, secs * part, now=self.now)

    def _is_active(self, queue: Queue) -> bool:
        return bool(self._queues[queue]) or any(
            w.request.queue == queue for w in self._open.values()
        )

    def _activate(self, queue: Queue) -> None:
        """Begin a queue's account where the others stand: being idle saves nothing up.

        Start-time fair queueing (Goyal, Vin and Cheng, 1996).
        """
        if not self._is_active(queue):
            active = [account for q, account in self._accounts.items() if self._is_active(q)]
            self._accounts[queue] = max(self._accounts[queue], min(active, default=0.0))

    def _limit_secs(self, running: Running) -> float:
        member = self.members[running.seat.member]
        if member.limit_ms is not None:
            return member.limit_ms / 1e3
        lane = self.lanes[running.lane]
        usual = self.left_secs(running.waiting, lane, likely=True)
        return max(_LEAST_LIMIT_SECS, _LIMIT_TIMES * usual)
