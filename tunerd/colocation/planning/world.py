"""One placement -> what each member may expect of it, and what it breaks. No clock, no engine.

A lane serves its members one request at a time, in the order of arrival. Its members' times are
those measured at its share, times their slowdown: what the members of each other lane do to them,
by the part of the time in which these run (in tails: as if they always ran), and lanes add up. That
they do is an assumption, which the proof checks. What the engine itself takes comes on top.

A lane with launches serves the members of each entry in launches of several requests. To its
neighbours it is a launch with all of the requests that one may have, for as long as such launches
run: fewer in a launch are more launches, and what those cost is not known.

A member of a group whose weights have less memory than all of them take has cold starts
(residency.py). One takes its lane for so much longer, as launches behind it wait; lanes of others
go on, and cold starts of several lanes are not taken to wait for each other.

The score of a member is its latency over its objective, or the use of its lane over what is
allowed, whichever is larger: at 1 and below it has what it was promised. A placement is as good as
its worst member.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tunerd.colocation.planning import queueing
from tunerd.colocation.planning.curves import Curves, Point
from tunerd.colocation.planning.engine_cost import NO_COST, EngineCost
from tunerd.colocation.planning.features import at_share
from tunerd.colocation.planning.pairs import NONE, How, Pairs, Side, Slowdown
from tunerd.colocation.planning.placement import (
    WHOLE,
    Expected,
    Forecast,
    Lane,
    Placement,
    Resident,
    Subject,
)
from tunerd.colocation.planning.residency import NEVER_COLD, Cold
from tunerd.system.text import percent_text, secs_text
from tunerd.vocabulary.verdict import Interval

WINDOW_SECS = 1e-3  # for which a launch may wait for company
_LEAST_SURE: tuple[How, ...] = ("assumed", "estimated", "measured", "alone")
Beside = Callable[[Side], tuple[Slowdown, float]]  # by how much others slow a side, and its tail


class World:
    """Everything that a placement is judged by."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        curves: Curves,
        pairs: Pairs,
        *,
        busy: float,
        memory_bytes: int | None = None,
        costs: Mapping[str, EngineCost] = MappingProxyType({}),
    ) -> None:
        self.subjects = {subject.name: subject for subject in subjects}
        self._order = {name: nth for nth, name in enumerate(self.subjects)}
        self.curves, self.pairs, self.busy = curves, pairs, busy
        self.memory_bytes, self.costs = memory_bytes, costs
        self.lane_score = functools.cache(self._lane_score)
        self.residents = functools.cache(self._residents)
        self.colds = functools.cache(self._colds)
        self.colds_beside = functools.cache(self._colds_beside)
        of = (subject.residency for subject in subjects)
        self._residencies = {each.name: each for each in of if each is not None}
        self._least: dict[object, tuple[float, float, float, float]] = {}

    def at_rates(self, times: float) -> World:
        """Return the same with each rate so many times as high."""
        subjects = [replace(each, rate=each.rate * times) for each in self.subjects.values()]
        return World(
            subjects, self.curves, self.pairs, busy=self.busy, memory_bytes=self.memory_bytes,
            costs=self.costs,
        )  # fmt: skip

    def point(self, name: str, share: int, together: int = 1) -> Point | None:
        return self.curves.at(self.subjects[name].of, share, together)

    def _residents(self, lane: Lane) -> tuple[Resident, ...]:
        """Return what runs in a lane: each member, or of each entry launches of its members."""
        each: dict[str, list[Subject]] = {}
        for name in sorted(lane.members, key=self._order.__getitem__):
            subject = self.subjects[name]
            each.setdefault(subject.of if lane.together > 1 else name, []).append(subject)
        found = []
        for members in each.values():
            sizes = self._sizes(members, lane)
            count = sizes[-1].together if sizes else 1
            found.append(Resident(_side(members[0], lane.share, count), tuple(members), sizes))
        return tuple(found)

    def _sizes(self, members: Sequence[Subject], lane: Lane) -> tuple[Point, ...]:
        """Return the launches that an entry's members may have in a lane, the smallest first."""
        of, most = members[0].of, lane.together
        if not members[0].has_batches:
            most = min(most, len(members))
        counts = (count for count in self.curves.together(of, lane.share) if count <= most)
        return tuple(point for count in counts if (point := self.curves.at(of, lane.share, count)))

    def _lane_score(self, members: frozenset[str], share: int) -> float:
        """Return the worst score in a lane without neighbours; infinite where it cannot be."""
        return self._worst(Lane(share, tuple(sorted(members))), lambda _: (NONE, 1.0))

    def least_score(
        self, members: frozenset[str], share: int, together: int = 1, *, around: int = 1
    ) -> float:
        """Return what the worst score in a lane is at least, beside all who are not in it.

        Infinite where it cannot be.

        around: how many requests launches of others may have.
        """
        others: dict[str, list[str]] = {}
        for name, subject in self.subjects.items():
            if name not in members:
                others.setdefault(subject.of if around > 1 else name, []).append(name)
        if others and share >= WHOLE:
            return math.inf
        names = [*map(tuple, others.values())]
        beside = functools.partial(self._least_beside, others=names, together=around)
        return self._worst(Lane(share, tuple(sorted(members)), together), beside)

    def _worst(self, lane: Lane, beside: Beside) -> float:
        if not all(each.sizes for each in self.residents(lane)):
            return math.inf
        return max(each.score for each in self._in(lane, beside))

    def forecast(self, placement: Placement) -> Forecast:
        """Judge a placement; KeyError where a lane has a share without a point."""
        lanes = placement.lanes
        if placement.kind == "space-time":
            beside = functools.partial(self._beside, others=lanes[1:], slices=len(lanes))
            expected = self._launched(lanes[0], beside, slices=len(lanes))
        else:
            expected = []
            for lane in lanes:
                others = [each for each in lanes if each is not lane]
                expected += self._in(lane, functools.partial(self._beside, others=others))
        problems = [each.problem for each in expected if each.problem]
        problems += self._without_room(placement)
        needed = sum(each.memory_bytes for each in expected)
        if self.memory_bytes is not None and needed > self.memory_bytes:
            problems.append(
                f"memory: they need {_gib(needed)}, and {_gib(self.memory_bytes)} may be used"
            )
        return Forecast(
            placement,
            tuple(sorted(expected, key=lambda each: self._order[each.member])),
            max(each.score for each in expected),
            tuple(problems),
        )

    def _without_room(self, placement: Placement) -> list[str]:
        """Return which groups' weights have too little memory for what may run at once."""
        lanes = [lane.members for lane in placement.lanes]
        said = [each.problem(lanes, placement.together) for each in self._residencies.values()]
        return [f"memory: {problem}" for problem in said if problem]

    def _colds(self, lane: Lane) -> Mapping[str, Cold]:
        """Return the cold starts of a lane's members; who never has any may lack."""
        found: dict[str, Cold] = {}
        of = (self.subjects[name].residency for name in lane.members)
        for name in {each.name for each in of if each is not None}:
            residency = self._residencies[name]
            beside = () if residency.is_shared else residency.beside(lane.members)
            found |= self.colds_beside(name, beside)
        return found

    def _colds_beside(self, group: str, members: tuple[str, ...]) -> Mapping[str, Cold]:
        """Return the cold starts of these members of a group, or of all where none are given."""
        residency = self._residencies[group]
        names = members or residency.members
        return residency.colds({name: self.subjects[name].rate for name in names})

    def _in(self, lane: Lane, beside: Beside) -> list[Expected]:
        """Return what members get of a lane of their own."""
        return (self._launched if lane.together > 1 else self._in_turn)(lane, beside)

    def _in_turn(self, lane: Lane, beside: Beside) -> list[Expected]:
        """Return what members get of a lane that serves one request at a time."""
        found: list[tuple[Subject, Point, Slowdown, float]] = []
        for each in self.residents(lane):
            (subject,) = each.subjects
            if not each.sizes:
                raise KeyError(f"{subject.name} has no point at {lane.share}%")
            found.append((subject, each.sizes[0], *beside(each.side)))
        works = [point.secs.value * slowdown.interval.value for _, point, slowdown, _ in found]
        colds = [self.colds(lane).get(subject.name, NEVER_COLD) for subject, *_ in found]
        wait = queueing.wait_of([
            queueing.Stream(part * subject.rate, secs)
            for (subject, *_), work, cold in zip(found, works, colds, strict=True)
            for part, secs in cold.times(work)
        ])  # fmt: skip
        return [
            self._expected(
                subject, point, slowdown, work, subject.rate * (work + cold.part * cold.secs),
                wait.busy,
                p50_secs=wait.latency(0.5, cold.times(work)),
                tail_secs=wait.latency(subject.part, cold.times(point.tail_secs * tail)),
                memory_bytes=_shared_bytes(subject, lane) + subject.each_bytes,
                cold=cold,
            )
            for (subject, point, slowdown, tail), work, cold in zip(
                found, works, colds, strict=True
            )
        ]  # fmt: skip

    def _launched(self, lane: Lane, beside: Beside, slices: int = 1) -> list[Expected]:
        """Return what members get of slices like a lane, in launches of several requests."""
        residents = self.residents(lane)
        slowdowns, secs_of = [], []
        for each in residents:
            if not each.sizes:
                raise KeyError(f"{each.subjects[0].of} has no point at {lane.share}%")
            slowdown, _ = beside(each.side)
            slowdowns.append(slowdown)
            secs_of.append(_launch_secs(each.sizes, slowdown.interval.high))
        rates = [math.fsum(subject.rate for subject in each.subjects) for each in residents]
        cold_of = self.colds(lane)
        colds = [_mean_cold(each, cold_of) for each in residents]
        window = WINDOW_SECS if lane.together > 1 else 0.0
        ran = queueing.launches(rates, secs_of, slices=slices, window_secs=window, colds=colds)
        expected = []
        for each, slowdown, secs, latency in zip(
            residents, slowdowns, secs_of, ran.latency, strict=True
        ):
            point = each.sizes[-1]
            spread = point.tail_secs / point.secs.value
            for subject in each.subjects:
                # What each seat of batches needs has all of them in it.
                seats = slices * (1 if subject.has_batches else lane.together)
                cold = cold_of.get(subject.name, NEVER_COLD)
                expected.append(
                    self._expected(
                        subject,
                        point,
                        slowdown,
                        secs[-1],
                        subject.rate * (secs[-1] / len(secs) + cold.part * cold.secs),
                        ran.busy,
                        p50_secs=latency(0.5, cold.part),
                        tail_secs=latency(subject.part, cold.part)
                        + secs[-1] * max(0.0, spread - 1),
                        memory_bytes=_shared_bytes(subject, lane)
                        + seats * subject.each_bytes // len(each.subjects),
                        cold=cold,
                    )
                )
        return expected

    def _expected(
        self, subject: Subject, point: Point, slowdown: Slowdown, secs: float, busy: float,
        lane_busy: float, *, p50_secs: float, tail_secs: float, memory_bytes: int, cold: Cold,
    ) -> Expected:  # fmt: skip
        engine = self.costs.get(subject.of)
        cost = engine or NO_COST
        p50_secs, tail_secs = p50_secs + cost.p50_secs, tail_secs + cost.tail_secs
        late = tail_secs / subject.slo_secs if subject.slo_secs else 0.0
        problem = ""
        if lane_busy > self.busy:
            problem = (
                f"{subject.name}: its lane at {point.share}% would be busy "
                f"{percent_text(lane_busy)} of the time, and {percent_text(self.busy)} may be"
            )
        elif late > 1:
            assert subject.slo_secs is not None
            problem = (
                f"{subject.name}: {100 * subject.part:g} of 100 would take up to "
                f"{secs_text(tail_secs)} at {point.share}%, over its {secs_text(subject.slo_secs)} "
                f"({secs_text(secs)} of it work)"
            )
        return Expected(
            subject.name, point.share, point.units, secs, p50_secs, tail_secs, subject.part,
            subject.slo_secs, subject.rate, busy, lane_busy, slowdown, memory_bytes, engine,
            point,
            max(late, lane_busy / self.busy), problem, cold,
        )  # fmt: skip

    def _beside(self, of: Side, others: Sequence[Lane], slices: int = 1) -> tuple[Slowdown, float]:
        """Return a side's slowdown by all other lanes, and the factor on its tail.

        slices: that share the work of each lane, where all of them serve everyone.
        """
        if not others:
            return NONE, 1.0
        value, low, high, tail = 1.0, 1.0, 1.0, 1.0
        hows: set[How] = set()
        notes: dict[str, None] = {}
        for lane in others:
            worst = 0.0
            for each in self.residents(lane):
                busy = each.busy / slices
                found = self.pairs.slowdown(of, each.side)
                value += busy * (found.interval.value - 1)
                low += busy * (found.interval.low - 1)
                high += busy * (found.interval.high - 1)
                worst = max(worst, found.interval.high - 1)
                hows.add(found.how)
                if found.note:
                    notes[found.note] = None
            tail += worst
        how = next(h for h in _LEAST_SURE if h in hows)
        return Slowdown(Interval(value, low, high), how, "; ".join(notes)), tail

    def _least_beside(
        self, of: Side, others: Iterable[tuple[str, ...]], together: int
    ) -> tuple[Slowdown, float]:
        """Return the least slowdown by others, wherever they are, and the factor on the tail.

        others: members, those that share launches of `together` as one.
        """
        value, low, high, tail = 1.0, 1.0, 1.0, 1.0
        for names in others:
            key = of.key, names, together
            least = self._least.get(key)
            if least is None:
                least = self._least[key] = self._least_cost(of, names, together)
            value, low, high = value + least[0], low + least[1], high + least[2]
            tail = max(tail, 1 + least[3])
        return Slowdown(Interval(value, low, high), "alone"), tail

    def _least_cost(
        self, of: Side, names: tuple[str, ...], together: int
    ) -> tuple[float, float, float, float]:
        """Return what is added to a slowdown, its ends and the tail's factor, each at the least."""
        costs = []
        entry = self.subjects[names[0]].of
        for share in {point.share for point in self.curves if point.of == entry}:
            if share + of.share <= WHOLE:
                for each in self.residents(Lane(share, names, together)):
                    found = self.pairs.slowdown(of, each.side).interval
                    ends = (found.value - 1, found.low - 1, found.high - 1)
                    costs.append((*(each.busy * end for end in ends), found.high - 1))
        if not costs:
            return 0.0, 0.0, 0.0, 0.0
        value, low, high, tail = map(min, zip(*costs, strict=True))
        return value, low, high, tail


def _side(subject: Subject, share: int, together: int) -> Side:
    """Return a member at a share, or a launch of several like it, as one of a pair."""
    of = at_share(subject.features, share)
    return Side(subject.name, subject.architecture or subject.of, share, of, together)


def _mean_cold(resident: Resident, cold_of: Mapping[str, Cold]) -> tuple[float, float]:
    """Return which part of all requests of what runs in a lane are cold starts, and their time."""
    of = [(each.rate, cold_of.get(each.name, NEVER_COLD)) for each in resident.subjects]
    part = math.fsum(rate * cold.part for rate, cold in of) / math.fsum(rate for rate, _ in of)
    return part, max(cold.secs for _, cold in of)


def _shared_bytes(subject: Subject, lane: Lane) -> int:
    """Return what a member takes once, with its part of its group's weights where these lack."""
    residency = subject.residency
    if residency is None:
        return subject.shared_bytes
    return subject.shared_bytes - residency.one_bytes + residency.part_bytes(lane.members)


def _launch_secs(points: Sequence[Point], slowdown: float) -> list[float]:
    """Return what launches of 1, 2, ... requests take: each uses the smallest that is compiled."""
    found: list[float] = []
    for point in points:
        found += [point.secs.value * slowdown] * (point.together - len(found))
    return found


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
