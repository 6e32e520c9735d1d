"""One placement -> what each member may expect of it, and what it breaks. No clock, no engine.

A lane serves its members one request at a time, in the order of arrival. Its members' times are
those measured at its share, times their slowdown: what the members of each other lane do to them,
by the part of the time in which these run (in tails: as if they always ran), and lanes add up. That
they do is an assumption, which the proof checks. What the engine itself takes comes on top.

The score of a member is its latency over its objective, or the use of its lane over what is
allowed, whichever is larger: at 1 and below it has what it was promised. A placement is as good as
its worst member.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tunerd.colocation.planning import queueing
from tunerd.colocation.planning.curves import Curves, Point
from tunerd.colocation.planning.engine_cost import NO_COST, EngineCost
from tunerd.colocation.planning.features import at_share
from tunerd.colocation.planning.pairs import NONE, How, Pairs, Side, Slowdown
from tunerd.system.text import percent_text, secs_text
from tunerd.vocabulary.verdict import Interval

WHOLE = 100  # percent
WINDOW_SECS = 1e-3  # for which a launch may wait for company
_LEAST_SURE: tuple[How, ...] = ("assumed", "estimated", "measured", "alone")
Kind = Literal["time", "space", "space-time"]


@dataclass(frozen=True)
class Subject:
    """A member as the search sees it. part: of its requests that are to be within `slo_secs`."""

    name: str
    of: str  # entry of the mix, which has the curve
    rate: float  # requests per second
    slo_secs: float | None = None
    part: float = 0.99
    architecture: str = ""
    features: Mapping[str, float] = field(default_factory=dict)
    artifact: Path = Path()
    kernels: Path = Path()  # the artifact by which it runs, where its own is weights alone
    shared_bytes: int = 0  # of memory, once
    each_bytes: int = 0  # of each seat


@dataclass(frozen=True)
class Lane:
    """A part of the device, and who takes turns in it.

    together: how many members of one entry a launch has at most.
    """

    share: int  # percent
    members: tuple[str, ...]
    together: int = 1


@dataclass(frozen=True)
class Placement:
    """Who runs where. Each lane of space-time serves everyone, and those of space their members."""

    kind: Kind
    lanes: tuple[Lane, ...]

    @property
    def together(self) -> int:
        """Return how many tenants a launch has at most."""
        return max(lane.together for lane in self.lanes)

    def text(self) -> str:
        if self.kind == "time":
            return "one after another, each on the whole device"
        if self.kind == "space-time":
            share, count = self.lanes[0].share, len(self.lanes)
            slices = f"{count} slices of {share}%" if count > 1 else f"one slice of {share}%"
            return f"{slices}, up to {self.together} tenants in a launch"
        return "; ".join(
            f"{lane.share}%: {', '.join(lane.members)}"
            + (f" (up to {lane.together} in a launch)" if lane.together > 1 else "")
            for lane in self.lanes
        )


@dataclass(frozen=True)
class Expected:
    """What a member may expect, by itself and with its neighbours."""

    member: str
    share: int
    units: int
    secs: float  # of one launch, with its slowdown
    p50_secs: float
    tail_secs: float  # that `part` of its requests take at most
    part: float
    slo_secs: float | None
    rate: float
    busy: float  # the part of the time in which it has its lane
    lane_busy: float
    slowdown: Slowdown
    memory_bytes: int
    engine: EngineCost | None  # in p50_secs and tail_secs; None: not measured, and taken for none
    point: Point
    score: float
    problem: str  # "" where it has what it was promised


@dataclass(frozen=True)
class Forecast:
    """What a placement gives. score: its worst member's. It is fit where it has no problem."""

    placement: Placement
    expected: tuple[Expected, ...]
    score: float
    problems: tuple[str, ...]

    @property
    def is_fit(self) -> bool:
        return not self.problems

    @property
    def worst(self) -> Expected:
        return max(self.expected, key=lambda each: each.score)


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
        self.curves, self.pairs, self.busy = curves, pairs, busy
        self.memory_bytes, self.costs = memory_bytes, costs
        self.lane_score = functools.cache(self._lane_score)
        self._side = functools.cache(self._made_side)

    def at_rates(self, times: float) -> World:
        """Return the same with each rate so many times as high."""
        subjects = [replace(each, rate=each.rate * times) for each in self.subjects.values()]
        return World(
            subjects, self.curves, self.pairs, busy=self.busy, memory_bytes=self.memory_bytes,
            costs=self.costs,
        )  # fmt: skip

    def point(self, name: str, share: int, together: int = 1) -> Point | None:
        return self.curves.at(self.subjects[name].of, share, together)

    def sides_in(self, lane: Lane) -> list[tuple[Side, tuple[Subject, ...]]]:
        """Return what runs in a lane, beside others': each member, or of an entry a launch."""
        if lane.together == 1:
            return [
                (self._side(name, lane.share, 1), (self.subjects[name],)) for name in lane.members
            ]
        found = []
        for members in self._entries(lane.members):
            sizes = self._sizes(members, lane)
            count = sizes[-1].together if sizes else 1
            found.append((self._side(members[0].name, lane.share, count), members))
        return found

    def _entries(self, names: Sequence[str]) -> list[tuple[Subject, ...]]:
        """Return the members of each entry among these, in the order of the mix."""
        entries: dict[str, list[Subject]] = {}
        for subject in self.subjects.values():
            if subject.name in names:
                entries.setdefault(subject.of, []).append(subject)
        return [tuple(members) for members in entries.values()]

    def _sizes(self, members: Sequence[Subject], lane: Lane) -> list[Point]:
        """Return the launches of an entry's members that a lane may have, the smallest first."""
        of, most = members[0].of, max(1, min(lane.together, len(members)))
        return [
            point
            for count in self.curves.together(of, lane.share)
            if count <= most and (point := self.curves.at(of, lane.share, count))
        ]

    def _lane_score(self, members: frozenset[str], share: int, together: int = 1) -> float:
        """Return the worst score in a lane without neighbours; infinite where it cannot be."""
        lane = Lane(share, tuple(sorted(members)), together)
        if together > 1:
            if not all(self._sizes(each, lane) for each in self._entries(lane.members)):
                return math.inf
            return max(each.score for each in self._launched(lane, ()))
        if any(self.point(name, share) is None for name in members):
            return math.inf
        expected = self._in_lane(lane, ())
        return max(each.score for each in expected)

    def forecast(self, placement: Placement) -> Forecast:
        """Judge a placement; KeyError where a lane has a share without a point."""
        lanes = placement.lanes
        if placement.kind == "space-time":
            expected = self._launched(lanes[0], lanes[1:], slices=len(lanes))
        else:
            expected = [
                each
                for lane in lanes
                for each in (self._launched if lane.together > 1 else self._in_lane)(
                    lane, [x for x in lanes if x is not lane]
                )
            ]
        problems = [each.problem for each in expected if each.problem]
        needed = sum(each.memory_bytes for each in expected)
        if self.memory_bytes is not None and needed > self.memory_bytes:
            problems.append(
                f"memory: they need {_gib(needed)}, and {_gib(self.memory_bytes)} may be used"
            )
        order = {name: nth for nth, name in enumerate(self.subjects)}
        return Forecast(
            placement,
            tuple(sorted(expected, key=lambda each: order[each.member])),
            max(each.score for each in expected),
            tuple(problems),
        )

    def _in_lane(self, lane: Lane, others: Sequence[Lane]) -> list[Expected]:
        found: list[tuple[Subject, Point, Slowdown, float]] = []
        for name in lane.members:
            subject, point = self.subjects[name], self.point(name, lane.share)
            if point is None:
                raise KeyError(f"{name} has no point at {lane.share}%")
            side = self._side(name, lane.share, 1)
            found.append((subject, point, *self._beside(side, others)))
        streams = [
            queueing.Stream(subject.rate, point.secs.value * slowdown.interval.value)
            for subject, point, slowdown, _ in found
        ]
        wait = queueing.wait_of(streams)
        return [
            self._expected(
                subject, point, slowdown, stream.secs, stream.busy, wait.busy,
                p50_secs=wait.quantile(0.5) + stream.secs,
                tail_secs=wait.quantile(subject.part) + point.tail_secs * tail,
                memory_bytes=self._memory_bytes(subject),
            )
            for (subject, point, slowdown, tail), stream in zip(found, streams, strict=True)
        ]  # fmt: skip

    def _launched(self, lane: Lane, others: Sequence[Lane], slices: int = 1) -> list[Expected]:
        """Return what members get of slices like a lane, with their architectures' launches.

        others: lanes beside one of the slices; of several slices the further ones.
        """
        entries = self._entries(lane.members)
        slowdowns, secs_of, points = [], [], []
        for (side, _), members in zip(self.sides_in(lane), entries, strict=True):
            slowdown, _ = self._beside(side, others, slices)
            sizes = self._sizes(members, lane)
            if not sizes:
                raise KeyError(f"{members[0].of} has no point at {lane.share}%")
            slowdowns.append(slowdown)
            points.append(sizes[-1])
            secs_of.append(_launch_secs(sizes, slowdown.interval.high))
        rates = [math.fsum(m.rate for m in members) for members in entries]
        window = WINDOW_SECS if lane.together > 1 else 0.0
        ran = queueing.launches(rates, secs_of, slices=slices, window_secs=window)
        expected = []
        for members, slowdown, secs, point, latency in zip(
            entries, slowdowns, secs_of, points, ran.latency, strict=True
        ):
            spread = point.tail_secs / point.secs.value
            for subject in members:
                tail_secs = latency(subject.part) + secs[-1] * max(0.0, spread - 1)
                each = secs[-1] / len(secs)
                seats = slices * lane.together
                expected.append(
                    self._expected(
                        subject,
                        point,
                        slowdown,
                        secs[-1],
                        subject.rate * each,
                        ran.busy,
                        p50_secs=latency(0.5),
                        tail_secs=tail_secs,
                        memory_bytes=subject.shared_bytes
                        + seats * subject.each_bytes // len(members),
                    )
                )
        return expected

    def _expected(
        self, subject: Subject, point: Point, slowdown: Slowdown, secs: float, busy: float,
        lane_busy: float, *, p50_secs: float, tail_secs: float, memory_bytes: int,
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
            max(late, lane_busy / self.busy), problem,
        )  # fmt: skip

    def _beside(self, of: Side, others: Sequence[Lane], slices: int = 1) -> tuple[Slowdown, float]:
        """Return a side's slowdown by all other lanes, and the factor on its tail."""
        if not others:
            return NONE, 1.0
        value, low, high, tail = 1.0, 1.0, 1.0, 1.0
        hows: set[How] = set()
        notes: dict[str, None] = {}
        for lane in others:
            worst = 0.0
            for side, subjects in self.sides_in(lane):
                busy = self._busy(side, subjects) / slices
                found = self.pairs.slowdown(of, side)
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

    def _busy(self, side: Side, subjects: Sequence[Subject]) -> float:
        """Return the part of the time in which a side runs; of launches, if all were full."""
        point = self.curves.at(subjects[0].of, side.share, side.together)
        if point is None:
            return 1.0
        rate = math.fsum(subject.rate for subject in subjects)
        return min(1.0, rate * point.secs.value / side.together)

    def _made_side(self, name: str, share: int, together: int) -> Side:
        subject = self.subjects[name]
        features = at_share(subject.features, share)
        return Side(name, subject.architecture or subject.of, share, features, together)

    def _memory_bytes(self, subject: Subject) -> int:
        return subject.shared_bytes + subject.each_bytes


def _launch_secs(points: Sequence[Point], slowdown: float) -> list[float]:
    """Return what launches of 1, 2, ... requests take: each uses the smallest that is compiled."""
    found: list[float] = []
    for point in points:
        found += [point.secs.value * slowdown] * (point.together - len(found))
    return found


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
