"""Slices of the device, each of which takes several requests of one architecture in a launch.

Space-time scheduling (Jain et al., arXiv 1901.00041) with coalescing at run time (1901.10008), for
whole models: members whose artifacts are of one architecture, with kernels for several tenants, are
a *group*, and a launch takes requests of whichever of its members wait. A launch for eight costs
far less than eight launches, and a slice of the device wastes less of it than the whole.

Who is first is as in `ordered`, over all slices, and the first takes company along:

- Of what waits, a launch has its part: what waits is spread over the slices that are idle first.
- By slack, and of each queue in order, as long as everyone in it can afford the longer launch: who
  would be in time alone is in time together. All of them, unless clearly more requests per second
  come of fewer.
- A request that comes to the last idle slice may wait there for company: until `window_ms` after
  the first of them came at the latest, so that under saturation, where all have waited longer
  before a slice is free, nobody waits. Only if all that waits is in that launch, if the next
  arrival is likely within this time and would pay, and if everyone in it has the slack for that.
- What has waited so starts before whatever else has come: it would have run by now.
- Behind what runs a second launch is queued, if it is as full as it may be, so that the device goes
  from one to the next without the host. Nobody can pass it any more, or go with it: so there is
  none where a member's objective is less than some launches long.

Members without such kernels, and others' artifacts, run in the slices as requests of one.

With `slices: lanes` there are the lanes of the plan instead, each for its own members: a group has
launches in its lane, beside another model in another one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Choice, Policy, Together, View, own_lanes
from tunerd.colocation.policies.forecast import Forecast
from tunerd.colocation.policies.ordered import Ordered, is_short
from tunerd.colocation.work import Lane, Running, Waiting

_LATE_SECS = 1e-4  # that the end of a wait may be late: a thread is to be woken for it
# Of the most requests per second: a launch costs the host what its time has not in it, and who is
# left behind waits for the next one.
_ABOUT = 0.9

Share = Annotated[int, Field(ge=1, le=100)]


class SpaceTime(Ordered):
    """Attributes:
    slices: how many, of equal shares; or the shares, in percent. `lanes`: those of the members, by
        their shares and lanes in the plan, each for its own.
    together: the most requests of a launch.
    window_ms: how long a request may wait for company beside an idle slice.
    """

    kind: ClassVar[str] = "space-time"
    about: ClassVar[str] = "slices that take several requests of one architecture in a launch"

    slices: Annotated[int, Field(ge=1, le=64)] | tuple[Share, ...] | Literal["lanes"] = 1
    together: Annotated[int, Field(ge=1, le=64)] = 8
    window_ms: Annotated[float, Field(ge=0, le=1)] = 1.0

    @field_validator("slices")
    @classmethod
    def _fit(cls, slices: int | tuple[int, ...] | str) -> int | tuple[int, ...] | str:
        if isinstance(slices, tuple) and not 0 < sum(slices) <= 100:
            raise ValueError(f"the slices come to {sum(slices)}%; give 1% to 100% in all")
        return slices

    def choose(self, view: View) -> Choice | Together | None:
        if not view.idle:
            return None
        busy = {running.lane for running in view.running}
        choices = [*view.startable()]
        started, held = self._started_or_held(view, [c for c in choices if c[1].name not in busy])
        if started is not None or not busy:
            return started or held
        count = sum(1 for _ in itertools.islice(view.waiting, self.together))
        # Of a group only what fills a launch goes behind another one.
        full = [
            (waiting, lane)
            for waiting, lane in choices
            if lane.name in busy
            and (most := self._together(waiting, view)) <= count
            and (not self._has_homes or most <= self._count_for(lane, view, most))
        ]
        behind = self._chosen(view, full)
        if isinstance(behind, tuple):
            behind = Together((behind[0],), behind[1])
        return behind if behind is not None and self._may_be_behind(behind, view) else held

    def _started_or_held(
        self, view: View, choices: list[Choice]
    ) -> tuple[Choice | Together | None, Together | None]:
        """Return what starts now on one of these lanes, and what waits for company meanwhile.

        What waits in one lane keeps nobody from another. Of several that wait the one that starts
        first is returned.
        """
        held: Together | None = None
        while choices:
            chosen = self._chosen(view, choices)
            if not isinstance(chosen, Together) or chosen.at <= view.now:
                return chosen, held
            held = chosen if held is None or chosen.at < held.at else held
            choices = [c for c in choices if c[1].name != chosen.lane.name]
        return None, held

    starts = Policy.starts  # who comes along changes with each launch

    def _may_be_behind(self, launch: Together, view: View) -> bool:
        """Say whether a launch is full, and delays nobody who may come much."""
        first = launch.waits[0]
        most = self._together(first, view)
        if len(launch.waits) < most:
            return False
        secs = view.left_secs(first, launch.lane, likely=True, count=most)
        return is_short(secs, launch.lane, view)

    def may_start(self, waiting: Waiting, lane: Lane, view: View) -> bool:
        return True  # `choose` says what does

    @property
    def most_together(self) -> int:
        return self.together

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        names = tuple(m.name for m in members)
        shares = self.slices
        if isinstance(shares, str):
            return own_lanes(members)
        if isinstance(shares, int):
            shares = (100 // shares,) * shares
        return tuple(Lane(f"slice-{nth}", share, names) for nth, share in enumerate(shares))

    def _with_company(
        self, waiting: Waiting, lane: Lane, view: View, seen: Forecast
    ) -> Choice | Together:
        most = self._together(waiting, view)
        if most == 1:
            return waiting, lane
        busy = {running.lane: running for running in view.running}
        empty = [each for each in view.idle if each.name not in busy]
        if self._has_homes:
            empty = [each for each in empty if waiting.request.member in each.home]
        idle = max(1, sum(view.can_start(waiting, each) for each in empty))
        count = self._count_for(lane, view, most * idle)
        before = busy.get(lane.name)
        launch = _Launch(waiting, lane, view, _ends_at(before, lane, view) if before else view.now)
        self._fill(launch, min(most, math.ceil(count / idle)), seen)
        waits = launch.fastest()
        is_all = len(waits) == count and len(empty) == 1 and before is None
        return Together(waits, lane, self._until(launch, most) if is_all else -math.inf)

    def _fill(self, launch: _Launch, count: int, seen: Forecast) -> None:
        """Add who may come along, by slack, and of each queue in order."""
        lanes, view = (launch.lane,), launch.view
        lines = view.mates(launch.first, launch.lane)
        heads: list[tuple[tuple[float, ...], int, int]] = []  # of a line the next, and its place

        def queue_up(nth: int, place: int) -> None:
            if place < len(lines[nth]):
                rank = self._rank(lines[nth][place], lanes, view, seen)
                heapq.heappush(heads, (rank, nth, place))

        for nth, line in enumerate(lines):
            queue_up(nth, 1 if line[0] is launch.first else 0)
        while heads and len(launch.waits) < count:
            _, nth, place = heapq.heappop(heads)
            if launch.add(lines[nth][place]):  # what is behind one that stays stays, too
                queue_up(nth, place + 1)

    def _until(self, launch: _Launch, most: int) -> float:
        """Return until when a launch with all that waits may wait for more."""
        count, view = len(launch.waits), launch.view
        ends_at = min(w.request.arrived_at for w in launch.waits) + self.window_ms / 1e3
        left_secs, gap_secs = ends_at - view.now, view.gap_secs(launch.first)
        if count >= most or gap_secs > left_secs:
            return -math.inf
        more = min(most, count + (int(left_secs / gap_secs) if gap_secs else most))
        if launch.per_sec(more) <= launch.per_sec(count):
            return -math.inf
        return min(ends_at, launch.due_at - launch.likely_secs(more) - _LATE_SECS)

    def _together(self, waiting: Waiting, view: View) -> int:
        return min(self.together, view.together(waiting))

    @property
    def _has_homes(self) -> bool:
        """Whether a lane is for its own members; else each is for all."""
        return self.slices == "lanes"

    def _count_for(self, lane: Lane, view: View, most: int) -> int:
        """Return how many requests wait that a lane may have, `most` at most."""
        waits = view.waiting
        if self._has_homes:
            home = set(lane.home)
            waits = (waiting for waiting in waits if waiting.request.member in home)
        return sum(1 for _ in itertools.islice(waits, most))


def _ends_at(running: Running, lane: Lane, view: View) -> float:
    """Return when a launch that runs will have ended, at the latest that is likely."""
    count = len(running.waits)
    left_secs = view.left_secs(running.waiting, lane, likely=True, count=count)
    return max(view.now, running.started_at + left_secs)


class _Launch:
    """A request, and those that may go with it: each that is in time alone is so with the others.

    due_at: the earliest deadline of those.
    """

    def __init__(self, first: Waiting, lane: Lane, view: View, begins_at: float) -> None:
        self.first, self.lane, self.view = first, lane, view
        self.waits: list[Waiting] = []
        self.due_at = math.inf
        self._begins_at = begins_at
        self._per_sec: list[float] = view.noted.setdefault(
            ("per second", view.loaded_as[first.request.member], lane.name), []
        )
        self._alone_at = self._end_at(1)
        self.add(first)

    def add(self, waiting: Waiting) -> bool:
        """Add one, unless it or another would be late by that; return whether it was added."""
        due_at, deadline_at = self.due_at, waiting.request.deadline_at
        if self._alone_at <= deadline_at < due_at:
            due_at = deadline_at
        if self.waits and due_at < math.inf and self._end_at(len(self.waits) + 1) > due_at:
            return False
        self.waits.append(waiting)
        self.due_at = due_at
        return True

    def _end_at(self, count: int) -> float:
        return self._begins_at + self.likely_secs(count)

    def fastest(self) -> tuple[Waiting, ...]:
        """Return the first of them, as many as give about the most requests per second."""
        count = len(self.waits)
        self.per_sec(count)
        per_sec = self._per_sec
        enough = _ABOUT * max(per_sec[:count])
        while per_sec[count - 1] < enough:
            count -= 1
        return tuple(self.waits[:count])

    def likely_secs(self, count: int) -> float:
        return self.view.left_secs(self.first, self.lane, likely=True, count=count)

    def per_sec(self, count: int) -> float:
        """Return how many requests a second launches of so many are."""
        per_sec = self._per_sec
        while len(per_sec) < count:
            secs = self.view.left_secs(self.first, self.lane, count=len(per_sec) + 1)
            per_sec.append((len(per_sec) + 1) / secs if secs else math.inf)
        return per_sec[count - 1]
