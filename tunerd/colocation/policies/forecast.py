"""When everything that waits would end, if nothing more came: what admission goes by.

Each request in its turn goes to the lane on which it ends first, or into the last launch there,
where it may be in one with those and none of them would be late by that. This runs at each arrival,
with all that waits; what requests of one member have in common is asked once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tunerd.colocation.policies.base import View
from tunerd.colocation.work import Lane, Queue, Waiting

MayUse = Callable[[Waiting, Lane], bool]


@dataclass(eq=False, slots=True)
class _Launch:
    """The last launch of a lane, as far as it is foreseen. room: for further requests."""

    name: str  # under which its members are loaded
    room: int
    begins_at: float
    due_at: float = math.inf  # the earliest deadline
    ids: list[int] = field(default_factory=list)


class Forecast:
    """Of one moment of a view.

    Args:
        may_use: whether a request may run on a lane, as far as the policy is asked.
        together: how many requests may be in a launch with one.
        patience_secs: how far a queue without deadlines may lag before it goes first.
    """

    def __init__(
        self,
        view: View,
        may_use: MayUse,
        together: Callable[[Waiting, View], int],
        *,
        patience_secs: float,
    ) -> None:
        self._view, self._may_use, self._together = view, may_use, together
        self._patience_secs = patience_secs
        self._owed: dict[Queue, float] = {}
        self._kinds: dict[tuple[str, int, str | None], tuple[tuple[tuple[str, float], ...], float]]
        self._kinds = {}

    def ends(self, waits: Sequence[Waiting]) -> tuple[dict[int, float], float]:
        """Return when each would end, and the seconds of work that come before the last of them.

        The last is the last in `waits`, whenever its turn is. What runs in segments ends, too: it
        has its turn after the segment that runs now.
        """
        free_at, rests = self._free_at()
        work_secs, before_secs = sum(at - self._view.now for at in free_at.values()), 0.0
        ends: dict[int, float] = {}
        launches: dict[str, _Launch] = {}
        for waiting in sorted(
            [*waits, *(waiting for waiting, _ in rests.values())], key=self._turn
        ):
            before_secs = work_secs if waiting is waits[-1] else before_secs
            end_at, name, joined = math.inf, "", False
            _, rest = rests.get(waiting.request.request_id, (waiting, None))
            for lane, takes_secs in (rest,) if rest else self._kind(waiting)[0]:
                if (ends_at := free_at[lane] + takes_secs) < end_at:
                    end_at, name, joined = ends_at, lane, False
                if lane in launches:
                    ends_at = self._end_with(launches[lane], waiting, lane)
                    if ends_at < end_at:
                        end_at, name, joined = ends_at, lane, True
            if not joined:
                member = self._view.loaded_as[waiting.request.member]
                room = 1 if rest else self._together(waiting, self._view)
                launches[name] = _Launch(member, room, free_at[name])
            launch = launches[name]
            launch.ids.append(waiting.request.request_id)
            launch.room -= 1
            launch.due_at = min(launch.due_at, waiting.request.deadline_at)
            work_secs += end_at - free_at[name]
            free_at[name] = end_at
            ends.update(dict.fromkeys(launch.ids, end_at))
        return ends, before_secs

    def _end_with(self, launch: _Launch, waiting: Waiting, lane: str) -> float:
        """Return when a launch would end with one more; infinite where that cannot be."""
        view = self._view
        if not launch.room or view.loaded_as[waiting.request.member] != launch.name:
            return math.inf
        count = len(launch.ids) + 1
        secs = view.left_secs(waiting, view.lanes[lane], likely=True, count=count)
        end_at = launch.begins_at + secs
        return end_at if end_at <= min(launch.due_at, waiting.request.deadline_at) else math.inf

    def owed_secs(self, queue: Queue) -> float:
        """Return by how much a queue lags, where that is long enough to go first; 0 otherwise."""
        owed = self._owed.get(queue)
        if owed is None:
            lag_secs = self._view.lag_secs(queue)
            owed = self._owed[queue] = lag_secs if lag_secs > self._patience_secs else 0.0
        return owed

    def least_secs(self, waiting: Waiting) -> float:
        """Return what a request takes from now on, on the lane where it takes least."""
        return self._kind(waiting)[1]

    def _free_at(self) -> tuple[dict[str, float], dict[int, tuple[Waiting, tuple[str, float]]]]:
        """Return when each lane is at a segment's end, and what is left of requests after that."""
        view = self._view
        free_at = dict.fromkeys(view.lanes, view.now)
        rests = {}
        behind: set[str] = set()  # lanes in which something was started before
        for running in view.running:
            waiting, lane = running.waiting, view.lanes[running.lane]
            count = len(running.waits)
            left_secs = view.left_secs(waiting, lane, likely=True, count=count)
            if running.lane not in behind:
                left_secs = max(0.0, running.started_at + left_secs - view.now)
            behind.add(running.lane)
            now_secs = (
                min(left_secs, view.segment_secs(waiting, lane)) if running.more else left_secs
            )
            free_at[running.lane] += now_secs
            if rest_secs := left_secs - now_secs:
                rests[waiting.request.request_id] = waiting, (running.lane, rest_secs)
        return free_at, rests

    def _turn(self, waiting: Waiting) -> tuple[bool, bool, float, int]:
        request = waiting.request
        has_deadline = request.deadline_at < math.inf
        is_owed = not has_deadline and self.owed_secs(request.queue) > 0
        slack_secs = request.deadline_at - self.least_secs(waiting)
        return not waiting.is_held, not is_owed, slack_secs, request.request_id

    def _kind(self, waiting: Waiting) -> tuple[tuple[tuple[str, float], ...], float]:
        """Return each lane that a request may use with what it seldom exceeds there, and the least.

        The same for all requests of a member that are as far.
        """
        member, view = waiting.request.member, self._view
        key = (member, waiting.segment, waiting.lane)
        if key not in self._kinds:
            lanes = [
                lane
                for lane in view.lanes.values()
                if member in lane.members
                and waiting.lane in (None, lane.name)
                and self._may_use(waiting, lane)
            ]
            takes = tuple((x.name, view.left_secs(waiting, x, likely=True)) for x in lanes)
            self._kinds[key] = takes, min(view.left_secs(waiting, lane) for lane in lanes)
        return self._kinds[key]
