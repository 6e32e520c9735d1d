"""When everything that waits would end, if nothing more came: what admission goes by.

Each request in its turn goes to the lane on which it ends first, or into the last launch there,
where it may be in one with those and none of them would be late by that. What requests of one
member have in common is asked once.

To foresee all that waits at each arrival would take longer than a launch, where many wait. So an
`Outlook` is kept from arrival to arrival: what is the last in turn costs a look at each lane, and
so does what would be late itself, or could be before others without any of them being late. The
others are foreseen with all that waits, and so is everything anew from time to time.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tunerd.colocation.policies.base import View
from tunerd.colocation.work import Lane, Queue, Waiting
from tunerd.system.text import secs_text

# For how long an outlook serves, by each request in it: to foresee one takes a tenth of that. What
# has ended sooner than foreseen shows as late as that.
_KEPT_SECS = 20e-6
_FEW = 5  # requests, for as many of which it serves at least

# Of what a request would wait for others that wait: as much more may it be.
_DOUBT = 0.05

_AFTER_ALL = 1 << 62  # as the number of a request: behind all of the same slack

PUSHES = "it would push others that were admitted past their deadlines"

MayUse = Callable[[Waiting, Lane], bool]
Turn = tuple[bool, bool, float, int]
_Kind = tuple[tuple[tuple[str, float], ...], float]  # the seconds on each lane, and the least


@dataclass(eq=False, slots=True)
class _Launch:
    """The last launch of a lane, as far as it is foreseen. room: for further requests."""

    name: str  # under which its members are loaded
    room: int
    begins_at: float
    due_at: float = math.inf  # the earliest deadline
    ids: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Inserted:
    """A request that was admitted before others, and is not foreseen with them.

    left_secs: until its deadline, when it would have ended.
    """

    turn: Turn
    secs: float
    left_secs: float


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
        self.view, self._may_use, self._together = view, may_use, together
        self._patience_secs = patience_secs
        self._are_owed = view.may_lag(patience_secs)
        self._owed: dict[Queue, float] = {}
        self._kinds: dict[object, _Kind] = view.noted

    def owed_secs(self, queue: Queue) -> float:
        """Return by how much a queue lags, where that is long enough to go first; 0 otherwise."""
        if not self._are_owed:
            return 0.0
        owed = self._owed.get(queue)
        if owed is None:
            lag_secs = self.view.lag_secs(queue)
            owed = self._owed[queue] = lag_secs if lag_secs > self._patience_secs else 0.0
        return owed

    def together(self, waiting: Waiting) -> int:
        """Return how many requests may be in a launch with one, itself among them."""
        return self._together(waiting, self.view)

    def turn(self, waiting: Waiting) -> Turn:
        """Return what is least of who goes first."""
        request = waiting.request
        deadline_at = request.deadline_at
        is_owed = deadline_at == math.inf and self.owed_secs(request.queue) > 0
        slack_secs = deadline_at - self.kind(waiting)[1]
        return not waiting.is_held, not is_owed, slack_secs, request.request_id

    def kind(self, waiting: Waiting) -> _Kind:
        """Return each lane that a request may use with what it seldom exceeds there, and the least.

        The least is of what it usually takes. The same for all requests of a member that are as
        far.
        """
        member, view = waiting.request.member, self.view
        key = (member, waiting.segment, waiting.lane)
        kind = self._kinds.get(key)
        if kind is None:
            lanes = [
                lane
                for lane in view.lanes.values()
                if member in lane.members
                and waiting.lane in (None, lane.name)
                and self._may_use(waiting, lane)
            ]
            takes = tuple((x.name, view.left_secs(waiting, x, likely=True)) for x in lanes)
            kind = takes, min(view.left_secs(waiting, lane) for lane in lanes)
            self._kinds[key] = kind
        return kind

    def known(self, member: str) -> _Kind | None:
        """Return the kind of a member's requests that have not begun, where it was asked for."""
        return self._kinds.get((member, 0, None))

    def free_at(self) -> tuple[dict[str, float], dict[int, tuple[Waiting, tuple[str, float]]]]:
        """Return when each lane is at a segment's end, and what is left of requests after that."""
        view = self.view
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


def late(late_secs: float, before_secs: float, *, margin: float) -> str:
    """Say that a request would be late, and what comes before it.

    margin: which part of its time it was to leave.
    """
    as_others = ", were it as late as others" if margin else ""
    return (
        f"it would end {secs_text(late_secs)} after its deadline{as_others}: "
        f"{secs_text(before_secs)} of work come before it"
    )


class Outlook:
    """What a forecast says of all that waits, and of what comes next.

    What runs in segments is in it, too: it has its turn after the segment that runs now.

    Attributes:
        ends: by request, when each would end.
        work_secs: of all lanes until then.
    """

    def __init__(self, seen: Forecast, waits: Iterable[Waiting]) -> None:
        self._seen = seen
        self._free_at, self._rests = seen.free_at()
        self._first_free_at = min(self._free_at.values(), default=seen.view.now)
        self.work_secs = math.fsum(self._free_at.values()) - seen.view.now * len(self._free_at)
        self.ends: dict[int, float] = {}
        self._begins: dict[int, float] = {}
        self._launches: dict[str, _Launch] = {}
        self._deadlines: dict[int, float] = {}
        self._turns: list[Turn] = []
        self._before: list[tuple[dict[str, float], float]] = []  # free_at and work_secs, by turn
        self._inserted: list[_Inserted] = []
        self._longest_secs = 0.0  # that anybody takes
        self._slack: list[float] = []  # by turn: the least of all from there on
        turns = [(seen.turn(w), w) for w in (*waits, *(rest for rest, _ in self._rests.values()))]
        turns.sort(key=lambda each: each[0])
        for turn, waiting in turns:
            self._append(turn, waiting)
        self._serves_until = seen.view.now + _KEPT_SECS * max(_FEW, len(turns))

    def late_secs(self, waiting: Waiting) -> float:
        """Return by how much a request that is in here would be late; 0 where it would not."""
        request_id = waiting.request.request_id
        begins_at, end_at = self._begins[request_id], self.ends[request_id]
        return self._late_secs(waiting, begins_at, end_at, self._seen.view.now)

    def _late_secs(self, waiting: Waiting, begins_at: float, end_at: float, now: float) -> float:
        secs, request = end_at - begins_at, waiting.request
        begins_at = self._doubted(begins_at, now)
        return self._late_by(request.arrived_at, begins_at, secs, request.deadline_at, now)

    def _late_by(
        self, arrived_at: float, begins_at: float, secs: float, deadline_at: float, now: float
    ) -> float:
        """Return by how much one that begins then would be late, with its margin; or 0.

        The margin is for what it waits for: who comes to an idle engine is not refused by that.
        """
        margin = self._seen.view.margin(now)
        margin_secs = margin and min(
            margin * (deadline_at - arrived_at), max(0.0, begins_at - arrived_at)
        )
        return max(0.0, begins_at + secs + margin_secs - deadline_at)

    def _doubted(self, begins_at: float, now: float) -> float:
        """Return when what waits for others may begin."""
        return begins_at + _DOUBT * max(0.0, begins_at - max(now, self._first_free_at))

    def hopeless(self, member: str, deadline_at: float, now: float) -> str:
        """Say why a request that came now would be late; "" where that needs more than a glance.

        Changes nothing, so that any thread may ask.
        """
        kind, count = self._seen.known(member), len(self._turns)
        if kind is None or not count or not self.serves(now):
            return ""
        takes, least_secs = kind
        nth = bisect(self._turns, (True, True, deadline_at - least_secs, _AFTER_ALL))
        free_at, work_secs = self._free_at, self.work_secs
        if nth < count:
            if self._seen.view.loaded_as[member] != member:  # it may be in a launch with others
                return ""
            free_at, work_secs = self._before[nth]
        lane, secs = min(takes, key=lambda each: max(free_at[each[0]], now) + each[1])
        begins_at = max(free_at[lane], now)
        begins_at = self._doubted(begins_at, now)
        if late_secs := self._late_by(now, begins_at, secs, deadline_at, now):
            return late(late_secs, work_secs, margin=self._seen.view.margin(now))
        slack = self._slack  # of the last time that somebody came before others
        return PUSHES if nth < len(slack) and secs / (2 * len(free_at)) > slack[nth] else ""

    def before_secs(self, waiting: Waiting) -> float:
        """Return the seconds of work of all lanes that come before a request."""
        return self._before[bisect_left(self._turns, self._seen.turn(waiting))][1]

    def serves(self, now: float) -> bool:
        """Say whether it is young enough."""
        return now <= self._serves_until

    def refusal(self, waiting: Waiting, now: float) -> str | None:
        """Say why what has just arrived would be late, "" where it would not: it is in here then.

        None where that needs a look at all that waits.
        """
        seen = self._seen
        turn = seen.turn(waiting)
        if not self._turns or turn > self._turns[-1]:
            self._free_at = {lane: max(at, now) for lane, at in self._free_at.items()}
            end_at, name, joined = self._place(waiting)
            begins_at, later_secs = self._begin_of(name, joined), self._later_secs(turn)
            if late_secs := self._late_secs(
                waiting, begins_at + later_secs, end_at + later_secs, now
            ):
                return late(late_secs, self.work_secs, margin=seen.view.margin(now))
            self._append(turn, waiting)
            return ""
        if seen.together(waiting) > 1:  # it may be in a launch with others
            return None
        nth, (takes, _) = bisect(self._turns, turn), seen.kind(waiting)
        free_at, work_secs = self._before[nth]
        lane, secs = min(takes, key=lambda each: max(free_at[each[0]], now) + each[1])
        begins_at = max(free_at[lane], now)
        if late_secs := self._late_secs(waiting, begins_at, begins_at + secs, now):
            return late(late_secs, work_secs, margin=seen.view.margin(now))
        begins_at += self._later_secs(turn)
        end_at = begins_at + secs
        if self._late_secs(waiting, begins_at, end_at, now):
            return None
        secs, slack_secs = max(secs for _, secs in takes), self._slack_from(nth)
        behind = [each for each in self._inserted if each.turn > turn]
        if secs / (2 * len(free_at)) > slack_secs:
            return PUSHES
        if secs + self._later_secs(self._turns[-1]) > slack_secs or any(
            each.left_secs < secs for each in behind
        ):
            return None
        for each in behind:
            each.left_secs -= secs
        left_secs = waiting.request.deadline_at - end_at
        self._inserted.append(_Inserted(turn, secs, left_secs))
        return ""

    def _later_secs(self, turn: Turn) -> float:
        """Return by how much later than foreseen a turn is, by what was admitted before it since.

        At most: list scheduling spreads work over the lanes but for the longest request.
        """
        secs = math.fsum(each.secs for each in self._inserted if each.turn < turn)
        return min(secs, secs / len(self._free_at) + self._longest_secs)

    def _slack_from(self, nth: int) -> float:
        """Return the least time that any from this place on has left before its deadline.

        Who is late already has nothing to lose.
        """
        if len(self._slack) != len(self._turns):
            least, self._slack = math.inf, [math.inf] * len(self._turns)
            for place in range(len(self._turns) - 1, -1, -1):
                request_id = self._turns[place][3]
                left_secs = self._deadlines[request_id] - self.ends[request_id]
                least = min(least, left_secs) if left_secs >= 0 else least
                self._slack[place] = least
        return self._slack[nth]

    def _append(self, turn: Turn, waiting: Waiting) -> None:
        """Foresee the next one in turn."""
        request = waiting.request
        end_at, name, joined = self._place(waiting)
        self._before.append((self._free_at, self.work_secs))
        self._turns.append(turn)  # last, because of `hopeless`
        if not joined:
            is_rest = request.request_id in self._rests
            room = 1 if is_rest else self._seen.together(waiting)
            member = self._seen.view.loaded_as[request.member]
            self._launches[name] = _Launch(member, room, self._begin_of(name, joined))
        launch = self._launches[name]
        launch.ids.append(request.request_id)
        launch.room -= 1
        launch.due_at = min(launch.due_at, request.deadline_at)
        secs = end_at - self._free_at[name]
        self.work_secs += secs
        self._longest_secs = max(self._longest_secs, secs)
        self._free_at = self._free_at | {name: end_at}
        self._deadlines[request.request_id] = request.deadline_at
        self._begins[request.request_id] = launch.begins_at
        for request_id in launch.ids:
            self.ends[request_id] = end_at

    def _begin_of(self, name: str, joined: bool) -> float:
        """Return when what is placed on a lane would begin."""
        return self._launches[name].begins_at if joined else self._free_at[name]

    def _place(self, waiting: Waiting) -> tuple[float, str, bool]:
        """Return when the next one in turn would end, on which lane, and whether with others."""
        end_at, name, joined = math.inf, "", False
        _, rest = self._rests.get(waiting.request.request_id, (waiting, None))
        for lane, takes_secs in (rest,) if rest else self._seen.kind(waiting)[0]:
            if (ends_at := self._free_at[lane] + takes_secs) < end_at:
                end_at, name, joined = ends_at, lane, False
            launch = self._launches.get(lane)
            if launch is not None and launch.room:
                ends_at = self._end_with(launch, waiting, lane)
                if ends_at < end_at:
                    end_at, name, joined = ends_at, lane, True
        return end_at, name, joined

    def _end_with(self, launch: _Launch, waiting: Waiting, lane: str) -> float:
        """Return when a launch would end with one more; infinite where that cannot be."""
        view = self._seen.view
        if view.loaded_as[waiting.request.member] != launch.name:
            return math.inf
        count = len(launch.ids) + 1
        secs = view.left_secs(waiting, view.lanes[lane], likely=True, count=count)
        end_at = launch.begins_at + secs
        return end_at if end_at <= min(launch.due_at, waiting.request.deadline_at) else math.inf
