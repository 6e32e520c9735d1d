"""The best placement of a mix, "one after another is best", or "they do not fit, because ...".

One after another needs nothing of the others' shares and no pair, so it is taken unless something
else leaves more of what is allowed, by more than MARGIN. Where nothing fits, the placement that is
least bad says what binds, and at which part of the rates it would fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunerd.colocation.load.generator import TRIM
from tunerd.colocation.plan import LoadChoice, Member, Plan, PolicyChoice
from tunerd.colocation.planning.mix import Mix, names_of
from tunerd.colocation.planning.placement import WHOLE, Forecast, Lane, Placement, Subject
from tunerd.colocation.planning.search import Searched, lanes_of, search
from tunerd.colocation.planning.slices import launches_beside_lanes
from tunerd.colocation.planning.world import WINDOW_SECS, World
from tunerd.stats.tail import samples_needed
from tunerd.system.text import percent_text

MARGIN = 0.05  # of what a member is allowed
_PROOF_SECS = 10.0, 60.0
_MOST_TIMES = 64.0  # of the rates, and one over it, between which is looked
_STEPS = 16  # of the bisection

Said = Literal["plan", "one after another", "unfit", "unknown"]


@dataclass(frozen=True)
class Alternative:
    """A placement that was not taken, and why."""

    name: str
    forecast: Forecast
    why: str


@dataclass(frozen=True)
class Answer:
    """What was found. chosen: of what does not fit, the least bad; None where nothing is known."""

    said: Said
    chosen: Forecast | None
    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    searched: Searched | None
    times: float  # of the rates that the chosen placement holds at most
    to_measure: tuple[str, ...] = ()
    beside: Searched | None = None  # launches in slices beside lanes, where there may be any

    @property
    def is_fit(self) -> bool:
        return self.said in ("plan", "one after another")


def unknown(to_measure: Sequence[str]) -> Answer:
    """Return what is said where a member has no measured point at all."""
    reasons = ("not every member was measured at a share",)
    return Answer("unknown", None, reasons, (), None, math.nan, tuple(to_measure))


def answer(
    world: World, *, shares: Sequence[int], together: Sequence[int], to_measure: Sequence[str] = ()
) -> Answer:
    """Search, compare, and say which placement is to be taken."""
    searched = search(world, shares=shares)
    offered: dict[str, Forecast] = {}
    names = tuple(world.subjects)
    if all(world.point(name, WHOLE) for name in names):
        whole = Placement("time", (Lane(WHOLE, names),))
        offered["one after another"] = world.forecast(whole)
    if searched.best is not None and searched.best.placement.kind != "time":
        offered["shares"] = searched.best
    launched = [world.forecast(p) for p in _launched(world, shares, together)]
    if launched:
        best = min(launched, key=_rank)
        offered[f"{best.placement.together} in a launch"] = best
    beside = launches_beside_lanes(world, shares=shares, together=together)
    if beside is not None and beside.best is not None:
        offered["launches beside lanes"] = beside.best
    if not offered:
        return unknown(to_measure)
    chosen = min(offered, key=lambda name: _rank(offered[name]))
    simple = offered.get("one after another")
    if simple is not None and simple.is_fit and simple.score <= offered[chosen].score + MARGIN:
        chosen = "one after another"
    taken = offered[chosen]
    others = {name: each for name, each in offered.items() if name != chosen}
    for name, each in (("greedy", searched.greedy), ("equal shares", _equal(world, shares))):
        placements = [forecast.placement for forecast in (taken, *others.values())]
        if each is not None and each.placement not in placements:
            others[name] = each
    said: Said = "one after another" if taken.placement.kind == "time" else "plan"
    return Answer(
        said=said if taken.is_fit else "unknown" if to_measure else "unfit",
        chosen=taken,
        reasons=taken.problems,
        alternatives=tuple(
            Alternative(name, each, _why_not(each, taken)) for name, each in others.items()
        ),
        searched=searched,
        times=_times(world, taken.placement),
        to_measure=tuple(to_measure),
        beside=beside,
    )


def plan_of(answer: Answer, mix: Mix, subjects: Sequence[Subject]) -> Plan:
    """Return the plan of an answer that fits, as the engine takes it."""
    assert answer.chosen is not None
    placement = answer.chosen.placement
    share_of = {name: lane.share for lane in placement.lanes for name in lane.members}
    lane_of = {
        name: f"lane-{nth}"
        for nth, lane in enumerate(placement.lanes)
        if len(lane.members) > 1
        for name in lane.members
    }
    is_space = placement.kind == "space"
    entries = {name: entry for entry in mix.members for name in names_of(entry)}
    by_name = {subject.name: subject for subject in subjects}
    members = tuple(
        Member(
            name=name,
            artifact=by_name[name].artifact.absolute(),
            share=share_of[name] if is_space else None,
            lane=lane_of.get(name) if is_space else None,
            tenants=entry.tenants,
            slo_ms=entry.slo_ms,
            weight=entry.weight,
            rate=entry.rate,
        )
        for name, entry in entries.items()
    )
    policy: dict[str, Any] = {"kind": placement.kind}
    if placement.kind == "space-time" or placement.together > 1:
        policy = {
            "kind": "space-time",
            "slices": "lanes" if is_space else [lane.share for lane in placement.lanes],
            "together": placement.together,
            "window_ms": WINDOW_SECS * 1e3,
        }
    return Plan(
        place=mix.place,
        device=mix.device,
        policy=PolicyChoice.model_validate(policy),
        members=members,
        weights_gib=mix.weights_gib if any(each.residency for each in subjects) else None,
        load=LoadChoice(
            kind=mix.load.kind,
            duration=proof_secs(mix),
            rounds=mix.load.rounds,
        ),
    )


def proof_secs(mix: Mix) -> float:
    """Return how long a round of the proof lasts.

    As the mix says, or so long that each member's percentile can be told, within bounds.
    """
    if mix.load.duration is not None:
        return mix.load.duration
    counted = 1 - 2 * TRIM
    longest = max(samples_needed(entry.percentile) / entry.rate for entry in mix.members)
    low, high = _PROOF_SECS
    return float(math.ceil(min(high, max(low, 1.1 * longest / counted))))


def _equal(world: World, shares: Sequence[int]) -> Forecast | None:
    """Return a lane for each member, all of the largest share that leaves room for all."""
    room = [share for share in shares if share * len(world.subjects) <= WHOLE]
    names = tuple(world.subjects)
    known = [share for share in room if all(world.point(name, share) for name in names)]
    if not known or len(names) < 2:
        return None
    return world.forecast(lanes_of([Lane(max(known), (name,)) for name in names]))


def _launched(world: World, shares: Sequence[int], together: Sequence[int]) -> Iterable[Placement]:
    """Yield slices of each share with launches of several tenants, where these were measured."""
    entries = {subject.of for subject in world.subjects.values()}
    names = tuple(world.subjects)
    for share in sorted({*shares, WHOLE}):
        measured = [set(world.curves.together(of, share)) for of in entries]
        if not all(measured):
            continue
        for size in sorted(set(together) & set().union(*measured) - {1}):
            for count in range(1, WHOLE // share + 1):
                yield Placement("space-time", (Lane(share, names, size),) * count)


def _times(world: World, placement: Placement) -> float:
    """Return how many times the rates a placement holds, to a few percent."""

    def holds(times: float) -> bool:
        return world.at_rates(times).forecast(placement).is_fit

    low, high = 1 / _MOST_TIMES, _MOST_TIMES
    if not holds(low):
        return 0.0
    # Of launches each look is a queue that is run.
    for _ in range(_STEPS // 2 if placement.together > 1 else _STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _why_not(forecast: Forecast, taken: Forecast) -> str:
    if forecast.problems:
        more = len(forecast.problems) - 1
        return forecast.problems[0] + (f", and {more} more" if more else "")
    if forecast.score < taken.score:
        return (
            f"better by {100 * (taken.score - forecast.score):.0f}% of what is allowed, which is "
            f"not more than {MARGIN:.0%}"
        )
    worst = forecast.worst
    return (
        f"fits, and its tightest member, {worst.member}, is at {percent_text(forecast.score)} of "
        f"what it is allowed, where the plan's is at {percent_text(taken.score)}"
    )


def _rank(forecast: Forecast) -> tuple[bool, float, int]:
    return bool(forecast.problems), forecast.score, len(forecast.placement.lanes)
