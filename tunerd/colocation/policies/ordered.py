"""Earliest slack first over all shares; nobody starves, and what cannot be met is refused early.

Slack is the time until a request's deadline less what it still takes: it shrinks while one waits,
so that every deadline has its turn. What has no deadline goes behind what has one, until its queue
lags behind the others by `patience_ms` of the device's time over their weights: then it goes first
(the deficit of Paella, SOSP 2023, with the accounts of start-time fair queueing). An idle share is
used by whoever waits (BLESS, EuroSys 2025). A request is refused when it arrives if its deadline
would pass behind what is before it, or if it would push one that was admitted past its own
(Clockwork, OSDI 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from tunerd.colocation.plan import Member, shares_of
from tunerd.colocation.policies.base import Choice, Policy, View
from tunerd.colocation.work import Lane, Waiting
from tunerd.system.text import secs_text


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
        shares, names = shares_of(members), [m.name for m in members]
        return tuple(
            Lane(
                m.name,
                shares[m.name],
                (m.name,),
                tuple(n for n in names if n != m.name) if self.borrow else (),
                m.cores,
            )
            for m in members
        )

    def choose(self, view: View) -> Choice | None:
        idle = view.idle
        can = {
            id(w): (w, lanes)
            for w in view.heads
            if (lanes := [x for x in idle if view.can_start(w, x) and self._may_use(w, x, view)])
        }
        if not can:
            return None
        waiting, lanes = min(can.values(), key=lambda each: self._rank(each[0], each[1], view))
        return waiting, min(lanes, key=lambda lane: self._cost(waiting, lane, view))

    def refusal(self, waiting: Waiting, view: View) -> str:
        deadline_at = waiting.request.deadline_at
        if not self.admission or math.isinf(deadline_at):
            return ""
        waits = [*view.waiting]
        ends, before_secs = self._forecast([*waits, waiting], view)
        late_secs = ends[waiting.request.request_id] - deadline_at
        if late_secs > 0:
            return (
                f"it would end {secs_text(late_secs)} after its deadline: "
                f"{secs_text(before_secs)} of work come before it"
            )
        missed = [w for w in waits if ends[w.request.request_id] > w.request.deadline_at]
        if not missed:
            return ""
        ends, _ = self._forecast(waits, view)
        pushed = [w for w in missed if ends[w.request.request_id] <= w.request.deadline_at]
        if not pushed:
            return ""
        return f"it would push {len(pushed)} that were admitted past their deadlines"

    def lateness(self, waiting: Waiting, view: View) -> str:
        deadline_at = waiting.request.deadline_at
        if not self.admission or math.isinf(deadline_at):
            return ""
        late_secs = view.now + self._least_secs(waiting, view) - deadline_at
        if late_secs <= 0:
            return ""
        return f"it waited, and would now end {secs_text(late_secs)} after its deadline"

    def _may_use(self, waiting: Waiting, lane: Lane, view: View) -> bool:
        if waiting.request.member in lane.home or self.borrow_ms is None:
            return True
        return view.segment_secs(waiting, lane) <= self.borrow_ms / 1e3

    def _rank(
        self, waiting: Waiting, lanes: Sequence[Lane], view: View
    ) -> tuple[bool, float, float, int]:
        request = waiting.request
        is_owed = self._is_owed(waiting, view)
        lag_secs = view.lag_secs(request.queue) if is_owed else 0.0
        left_secs = min(view.left_secs(waiting, lane) for lane in lanes)
        slack_secs = request.deadline_at - view.now - left_secs
        return not is_owed, -lag_secs, slack_secs, request.request_id

    def _cost(self, waiting: Waiting, lane: Lane, view: View) -> tuple[bool, float]:
        is_guest = waiting.request.member not in lane.home
        return is_guest, view.left_secs(waiting, lane)

    def _lanes_of(self, waiting: Waiting, view: View) -> list[Lane]:
        member = waiting.request.member
        return [lane for lane in view.lanes.values() if member in lane.members]

    def _least_secs(self, waiting: Waiting, view: View) -> float:
        return min(view.left_secs(waiting, lane) for lane in self._lanes_of(waiting, view))

    def _forecast(self, waits: Sequence[Waiting], view: View) -> tuple[dict[int, float], float]:
        """Return when each would end, and the seconds of work that come before the last of them.

        Each in its turn goes to the lane on which it ends first.
        """
        free_at = dict.fromkeys(view.lanes, view.now)
        for running in view.running:
            lane = view.lanes[running.lane]
            left_secs = view.left_secs(running.waiting, lane, likely=True)
            free_at[running.lane] = max(view.now, running.started_at + left_secs)
        work_secs, before_secs = sum(at - view.now for at in free_at.values()), 0.0
        ends: dict[int, float] = {}
        for each in sorted(waits, key=lambda w: self._turn(w, view)):
            before_secs = work_secs if each is waits[-1] else before_secs
            begin_at, end_at = self._dealt(each, view, free_at)
            work_secs += end_at - begin_at
            ends[each.request.request_id] = end_at
        return ends, before_secs

    def _dealt(
        self, waiting: Waiting, view: View, free_at: dict[str, float]
    ) -> tuple[float, float]:
        """Give a request to the lane on which it ends first; return when it begins and ends."""
        ends = {
            lane.name: free_at[lane.name] + view.left_secs(waiting, lane, likely=True)
            for lane in self._lanes_of(waiting, view)
            if waiting.lane in (None, lane.name) and self._may_use(waiting, lane, view)
        }
        name = min(ends, key=lambda each: ends[each])
        begin_at, free_at[name] = free_at[name], ends[name]
        return begin_at, ends[name]

    def _turn(self, waiting: Waiting, view: View) -> tuple[bool, float, int]:
        """Return what the order of all that waits is by: the same as `_rank`, less the lanes."""
        request = waiting.request
        slack_secs = request.deadline_at - self._least_secs(waiting, view)
        return not self._is_owed(waiting, view), slack_secs, request.request_id

    def _is_owed(self, waiting: Waiting, view: View) -> bool:
        """Say whether what has no deadline has waited for its turn long enough."""
        if math.isfinite(waiting.request.deadline_at):
            return False
        return view.lag_secs(waiting.request.queue) > self.patience_ms / 1e3
