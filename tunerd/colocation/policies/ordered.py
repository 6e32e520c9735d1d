"""Earliest slack first over all shares; nobody starves, and what cannot be met is refused early.

Slack is the time until a request's deadline less what it still takes: it shrinks while one waits,
so that every deadline has its turn. What has no deadline goes behind what has one, until its queue
lags behind the others by `patience_ms` of the device's time over their weights: then it goes first
(the deficit of Paella, SOSP 2023, with the accounts of start-time fair queueing). An idle share is
used by whoever waits (BLESS, EuroSys 2025). A request is refused when it arrives if its deadline
would pass behind what is before it, or if it would push one that was admitted past its own
(Clockwork, OSDI 2020). What waits is to end as much earlier as some were late that were admitted.

An idle share is lent to whom it serves sooner than their own would: kernels that were tuned for a
large share may take longer in a small one than the wait. Behind what runs in its share a member's
next request is queued where launches are short beside the objectives of who is at home there, so
that the device goes from one to the next without the host.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Choice, Policy, Together, View, own_lanes
from tunerd.colocation.policies.forecast import Forecast, Outlook, late
from tunerd.colocation.work import Lane, Waiting
from tunerd.system.text import secs_text

_Rank = tuple[float, ...]  # the least goes first
_LAUNCHES = 4  # that fit at least into the shortest objective, where one is queued behind another


class Ordered(Policy):
    """Attributes:
    patience_ms: how far a queue may lag behind others before it goes first.
    borrow: whether idle shares are used by members of others.
    borrow_ms: the longest segment that may run in another member's share; None: any.
    admission: whether what cannot be met is refused.
    """

    kind: ClassVar[str] = "ordered"
    about: ClassVar[str] = "earliest slack first, in shares that idle ones lend"

    patience_ms: Annotated[float, Field(ge=0)] = 50.0
    borrow: bool = True
    borrow_ms: Annotated[float, Field(gt=0)] | None = None
    admission: bool = True

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        names = [m.name for m in members]
        return tuple(
            replace(lane, guests=tuple(n for n in names if n not in lane.home))
            if self.borrow
            else lane
            for lane in own_lanes(members)
        )

    @property
    def depth(self) -> int:
        return 2

    def choose(self, view: View) -> Choice | Together | None:
        return self._chosen(view, view.startable())

    def starts(self, view: View) -> Iterator[Choice | Together]:
        return self._in_turn(view, view.startable())

    def _chosen(self, view: View, choices: Iterable[Choice]) -> Choice | Together | None:
        """Return what to start next of these."""
        return next(self._in_turn(view, choices), None)

    def _in_turn(self, view: View, choices: Iterable[Choice]) -> Iterator[Choice | Together]:
        """Yield what to start of these, and of what is behind them, each request ranked once.

        Each has started when the next is asked for.
        """
        seen, count = self._forecast(view), itertools.count()

        def ranked(choices: Iterable[Choice]) -> list[tuple[_Rank, int, Waiting, list[Lane]]]:
            return [
                (self._rank(waiting, lanes, view, seen), next(count), waiting, lanes)
                for waiting, lanes in self._usable(view, choices)
            ]

        able = ranked(choices)
        heapq.heapify(able)
        while able:
            _, _, waiting, lanes = heapq.heappop(able)
            if left := [lane for lane in lanes if view.can_start(waiting, lane)]:
                yield self._with_company(waiting, self._least(left, waiting, view), view, seen)
                for each in ranked(view.next_of(waiting.request.queue)):
                    heapq.heappush(able, each)

    def _usable(self, view: View, choices: Iterable[Choice]) -> list[tuple[Waiting, list[Lane]]]:
        """Return each request with the lanes that it may have."""
        can: dict[int, tuple[Waiting, list[Lane]]] = {}
        for waiting, lane in choices:
            if self._may_use(view, waiting, lane) and self.may_start(waiting, lane, view):
                can.setdefault(id(waiting), (waiting, []))[1].append(lane)
        return [*can.values()]

    def _least(self, lanes: Sequence[Lane], waiting: Waiting, view: View) -> Lane:
        """Return where a request costs least."""
        if len(lanes) == 1:
            return lanes[0]
        return min(lanes, key=lambda lane: self._cost(waiting, lane, view))

    def _with_company(
        self, waiting: Waiting, lane: Lane, view: View, seen: Forecast
    ) -> Choice | Together:
        """Return what starts with a request that was chosen, in the same launch."""
        return waiting, lane

    def may_start(self, waiting: Waiting, lane: Lane, view: View) -> bool:
        """Behind what runs only at home, and only where that delays nobody who may come much.

        As a guest only where it ends sooner than at home, behind what runs there.
        """
        before, member = view.on(lane), waiting.request.member
        if member not in lane.home:
            return not before and view.left_secs(waiting, lane) <= _secs_at_home(waiting, view)
        if not before:
            return True
        return is_short(view.left_secs(before[0].waiting, lane, likely=True), lane, view)

    def refusal(self, waiting: Waiting, view: View) -> str:
        if not self.admission:
            return ""
        outlook = view.outlook
        serves = isinstance(outlook, Outlook) and outlook.serves(view.now)
        has_deadline = waiting.request.deadline_at < math.inf
        if has_deadline and not serves:
            outlook = view.outlook = Outlook(self._forecast(view), view.waiting)
        refusal = outlook.refusal(waiting, view.now) if isinstance(outlook, Outlook) else ""
        if refusal is None and has_deadline:
            return self._refusal_among_all(waiting, view)
        if refusal is None:
            view.outlook = None
        return refusal or ""

    def _refusal_among_all(self, waiting: Waiting, view: View) -> str:
        """Look at all that waits; leave an outlook with the request in it, if it is admitted."""
        waits, seen = [*view.waiting], self._forecast(view)
        then = Outlook(seen, [*waits, waiting])
        if late_secs := then.late_secs(waiting):
            return late(late_secs, then.before_secs(waiting), margin=view.margin(view.now))
        missed = [w for w in waits if then.ends[w.request.request_id] > w.request.deadline_at]
        if missed:
            view.outlook = now = Outlook(seen, waits)
            pushed = [w for w in missed if now.ends[w.request.request_id] <= w.request.deadline_at]
            if pushed:
                return f"it would push {len(pushed)} that were admitted past their deadlines"
        view.outlook = then
        return ""

    def hopeless(self, member: str, deadline_at: float, now: float, view: View) -> str:
        outlook = view.outlook
        if not self.admission or not isinstance(outlook, Outlook):
            return ""
        return outlook.hopeless(member, deadline_at, now)

    def lateness(self, waiting: Waiting, view: View) -> str:
        if not self.admission:
            return ""
        deadline_at = waiting.request.deadline_at
        member, left_secs = waiting.request.member, math.inf
        for lane in view.lanes.values():
            if member in lane.members:
                left_secs = min(left_secs, view.left_secs(waiting, lane))
                if view.now + left_secs <= deadline_at:  # as nearly always on the first lane
                    return ""
        late_secs = view.now + left_secs - deadline_at
        return f"it waited, and would now end {secs_text(late_secs)} after its deadline"

    def _forecast(self, view: View) -> Forecast:
        may_use = functools.partial(self._may_use, view)
        return Forecast(view, may_use, self._together, patience_secs=self.patience_ms / 1e3)

    def _together(self, waiting: Waiting, view: View) -> int:
        """Return how many requests may be in a launch with this one."""
        return 1

    def _may_use(self, view: View, waiting: Waiting, lane: Lane) -> bool:
        if waiting.request.member in lane.home or self.borrow_ms is None:
            return True
        return view.segment_secs(waiting, lane) <= self.borrow_ms / 1e3

    def _rank(self, waiting: Waiting, lanes: Sequence[Lane], view: View, seen: Forecast) -> _Rank:
        """Return what is least of who goes first: what is held, who is owed, the least slack."""
        request = waiting.request
        owed_secs, slack_secs = 0.0, request.deadline_at
        if slack_secs < math.inf:
            slack_secs -= view.now + least_secs(waiting, lanes, view)
        else:
            owed_secs = seen.owed_secs(request.queue)
        length = self._length(waiting, lanes, view)
        return not waiting.is_held, -owed_secs, slack_secs, length, request.request_id

    def _length(self, waiting: Waiting, lanes: Sequence[Lane], view: View) -> float:
        """Return what decides between requests of the same slack, as those without deadlines."""
        return 0.0

    def _cost(self, waiting: Waiting, lane: Lane, view: View) -> tuple[bool, bool, float]:
        is_guest = waiting.request.member not in lane.home
        return bool(view.on(lane)), is_guest, view.left_secs(waiting, lane)


def _secs_at_home(waiting: Waiting, view: View) -> float:
    """Return in how long a request would end in its own share; infinite where it has none."""
    least = math.inf
    for lane in view.lanes.values():
        if waiting.request.member in lane.home:
            secs = view.left_secs(waiting, lane)
            for nth, running in enumerate(view.on(lane)):
                left_secs = view.left_secs(running.waiting, lane, count=len(running.waits))
                had_secs = 0.0 if nth else view.now - running.started_at
                secs += max(0.0, left_secs - had_secs)
            least = min(least, secs)
    return least


def is_short(secs: float, lane: Lane, view: View) -> bool:
    """Say whether a launch is short beside the shortest objective of those who are at home there.

    Then one may be behind it: guests can stay away.
    """
    slos = (view.members[name].slo_ms for name in lane.home)
    return _LAUNCHES * secs <= min((slo / 1e3 for slo in slos if slo), default=math.inf)


def least_secs(waiting: Waiting, lanes: Sequence[Lane], view: View) -> float:
    """Return what a request takes from now on, on the lane where it takes least."""
    return min(view.left_secs(waiting, lane) for lane in lanes)
