"""Placements of a mix: what a lane gives, the search, and the answer."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.planning_world import (
    DEVICE,
    SHARES,
    best_score,
    every_placement,
    exactly,
    pair,
    point,
    side,
    world_of,
)
from tunerd.colocation.planning import queueing
from tunerd.colocation.planning.answer import Answer, answer, plan_of
from tunerd.colocation.planning.columns import columns_of, kinds_of
from tunerd.colocation.planning.curves import Curves
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.neighbours import neighbours
from tunerd.colocation.planning.pairs import Pair, Pairs, Side
from tunerd.colocation.planning.placement import Lane, Placement, Subject
from tunerd.colocation.planning.queueing import Stream, wait_of
from tunerd.colocation.planning.search import greedy, lanes_of, search
from tunerd.colocation.planning.slices import launches_beside_lanes
from tunerd.colocation.planning.world import World
from tunerd.colocation.policies import policy_of

# --- what a placement gives --------------------------------------------------------------------

ONE, TWO = Subject("one", "one", 20, 0.1), Subject("two", "two", 5, 0.4)
SECS = {"one": {25: 0.03, 50: 0.02, 100: 0.012}, "two": {25: 0.12, 50: 0.07, 100: 0.04}}


def halves(world: World) -> Placement:
    return lanes_of([Lane(50, (name,)) for name in world.subjects])


def test_a_member_waits_for_those_in_its_lane_alone() -> None:
    world = world_of([ONE, TWO], SECS)
    one = world.forecast(halves(world)).expected[0]
    assert one.busy == one.lane_busy == pytest.approx(20 * 0.02)
    assert one.tail_secs == pytest.approx(0.02 + wait_of([Stream(20, 0.02)]).quantile(0.99))
    whole = world.forecast(lanes_of([Lane(100, ("one", "two"))]))
    assert whole.placement.kind == "time"
    assert whole.expected[0].lane_busy == pytest.approx(20 * 0.012 + 5 * 0.04)
    assert whole.expected[0].tail_secs > 0.04  # a long one may be before it


def test_a_neighbour_slows_by_the_part_of_the_time_in_which_it_runs() -> None:
    world = world_of([ONE, TWO], SECS, slowdown=lambda *_: 1.5)
    one, two = world.forecast(halves(world)).expected
    assert one.slowdown.how == "measured"
    assert one.slowdown.interval.value == pytest.approx(1 + 5 * 0.07 * 0.5)
    assert one.secs == pytest.approx(0.02 * one.slowdown.interval.value)
    assert two.slowdown.interval.value == pytest.approx(1 + 20 * 0.02 * 0.5)
    assert (
        world.forecast(halves(world)).score
        > world_of([ONE, TWO], SECS).forecast(halves(world)).score
    )


def test_a_pair_that_nobody_measured_is_said_to_be_assumed() -> None:
    world = world_of([ONE, TWO], SECS)
    one, _ = world.forecast(halves(world)).expected
    assert one.slowdown.how == "assumed"
    assert "no pair was measured" in one.slowdown.note


def test_a_gain_by_a_neighbour_is_taken_for_noise() -> None:
    pairs = Pairs([pair("one", 50, "two", 50, 0.9)], "a device")
    found = pairs.slowdown(side("one", 50), side("two", 50))
    assert (found.how, found.interval.value) == ("measured", 1.0)
    assert (
        Pairs([pair("one", 50, "two", 50, 2)], "another")
        .slowdown(side("one", 50), side("two", 50))
        .how
        == "assumed"
    )


@pytest.mark.parametrize(
    ("subject", "memory", "said"),
    [
        (Subject("one", "one", 20, 0.015), None, "one: 99 of 100 would take up to"),
        (Subject("one", "one", 48), None, "busy 96.0% of the time, and 90.0% may be"),
        (Subject("one", "one", 1, 1.0, shared_bytes=3 << 30), 1 << 30, "memory: they need 3.00 Gi"),
    ],
)
def test_what_a_placement_breaks_is_named(subject: Subject, memory: int | None, said: str) -> None:
    world = world_of([subject], {"one": SECS["one"]}, memory_bytes=memory)
    (problem,) = world.forecast(lanes_of([Lane(50, ("one",))])).problems
    assert said in problem


# --- the search --------------------------------------------------------------------------------


@st.composite
def mixes(draw: st.DrawFn) -> World:
    count = draw(st.integers(1, 4))
    names = [f"m{i}" for i in range(count)]
    subjects, secs = [], {}
    for name in names:
        whole = draw(st.floats(0.002, 0.02))
        knee = draw(st.floats(0.2, 1.0))  # of the device that it can use
        secs[name] = {s: whole * max(1.0, knee * 100 / s) for s in SHARES}
        slo = draw(st.one_of(st.none(), st.floats(0.01, 0.2)))
        subjects.append(
            Subject(name, name, draw(st.floats(1, 60)), slo, shared_bytes=draw(st.integers(1, 9)))
        )
    worst = draw(st.floats(1.0, 1.5))
    seed = draw(st.integers(0, 99))

    def slowdown(a: str, s: int, b: str, t: int) -> float:
        return 1 + (worst - 1) * random.Random(f"{seed}{a}{s}{b}{t}").random()

    return world_of(subjects, secs, slowdown=slowdown)


@settings(max_examples=40, deadline=None)
@given(mixes())
def test_the_search_finds_the_best_of_all_placements(world: World) -> None:
    found = search(world, shares=SHARES)
    best = best_score(world, SHARES)
    assert found.is_exact
    assert found.best is not None
    if not math.isfinite(best):
        assert not math.isfinite(found.best.score)
        return
    assert found.best.score == pytest.approx(best, rel=1e-6)
    assert found.gap == pytest.approx(0, abs=1e-6)
    assert found.greedy is not None
    assert found.greedy.score >= best * (1 - 1e-9)
    assert found.greedy_gap == pytest.approx(found.greedy.score / best - 1, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(mixes(), st.integers(5, 30))
def test_a_memory_that_not_all_placements_have_is_kept(world: World, size: int) -> None:
    small = World(
        list(world.subjects.values()), world.curves, world.pairs, busy=0.9, memory_bytes=size
    )
    found = search(small, shares=SHARES)
    needed = sum(subject.shared_bytes for subject in world.subjects.values())
    assert found.best is not None
    assert any(p.startswith("memory") for p in found.best.problems) == (needed > size)


def test_a_search_without_time_states_the_gap_to_its_bound() -> None:
    subjects = [Subject(f"m{i}", f"m{i}", 20, 0.1) for i in range(4)]
    secs = {s.name: {25: 0.03, 50: 0.02, 100: 0.012} for s in subjects}
    world = world_of(subjects, secs, slowdown=lambda *_: 1.2)
    ticking = iter(range(1000))
    found = search(world, shares=SHARES, clock=lambda: next(ticking), limit_secs=0.5)
    assert not found.is_exact
    assert found.best is not None
    assert found.gap == pytest.approx(found.best.score / found.bound - 1)
    assert found.gap > 0
    best = best_score(world, SHARES)
    assert found.bound <= best <= found.best.score


def test_members_that_are_alike_are_placed_by_how_many_there_are() -> None:
    """Of four alike there are 15 groups to be in a lane, and four numbers."""
    subjects = [Subject(f"m{i}", "m", 25, 0.05) for i in range(4)] + [Subject("b", "b", 9, 0.4)]
    points = [
        point(of, s, secs * 100 / s) for of, secs in (("m", 4e-3), ("b", 0.02)) for s in SHARES
    ]
    known = [pair(a, s, b, t, 1.3) for a, b in ("mb", "bm", "mm") for s in SHARES for t in SHARES]
    world = World(subjects, Curves(points), Pairs(known, DEVICE), busy=0.9)
    found = search(world, shares=SHARES)
    assert found.is_exact
    assert found.best is not None
    assert found.best.score == pytest.approx(best_score(world, SHARES), rel=1e-6)
    assert [len(kind) for kind in kinds_of(subjects)] == [4, 1]
    columns = columns_of(world, kinds_of(subjects), SHARES)
    assert columns is not None
    assert len(columns) <= (5 * 2 - 1) * len(SHARES)


def test_very_many_that_are_alike_are_placed_exactly() -> None:
    subjects = [Subject(f"m{i}", "m", 30, 0.05) for i in range(40)]
    points = [point("m", s, 0.0002 * 100 / s) for s in SHARES]
    found = search(World(subjects, Curves(points), Pairs([], DEVICE), busy=0.9), shares=SHARES)
    assert found.is_exact
    assert found.best is not None
    names = [name for lane in found.best.placement.lanes for name in lane.members]
    assert sorted(names) == sorted(subject.name for subject in subjects)


def test_many_members_are_placed_by_the_greedy_search_with_a_bound() -> None:
    subjects = [Subject(f"m{i}", "m", 30 + i / 40, 0.05) for i in range(40)]
    world = World(
        subjects, Curves([point("m", s, 0.0002 * 100 / s) for s in SHARES]), Pairs([], "a device"),
        busy=0.9,
    )  # fmt: skip
    found = search(world, shares=SHARES)
    assert not found.is_exact
    assert found.best is not None
    assert found.best.is_fit
    assert found.bound <= found.best.score
    names = [name for lane in found.best.placement.lanes for name in lane.members]
    assert sorted(names) == sorted(world.subjects)


def test_the_greedy_search_joins_lanes_where_the_shares_do_not_suffice() -> None:
    subjects = [Subject(f"m{i}", f"m{i}", 1, 1.0) for i in range(6)]
    world = world_of(subjects, {s.name: {25: 0.03, 50: 0.02} for s in subjects})
    found = greedy(world, SHARES)
    assert found is not None
    assert sum(lane.share for lane in found.placement.lanes) <= 100
    assert found.is_fit


# --- the answer --------------------------------------------------------------------------------


def asked(world: World, together: tuple[int, ...] = (1, 2, 4, 8)) -> Answer:
    return answer(world, shares=SHARES, together=together)


def test_a_short_model_beside_a_long_one_gets_a_share_of_its_own() -> None:
    short = Subject("short", "short", 50, 0.02)
    long = Subject("long", "long", 3, 1.0)
    secs = {"short": {25: 0.004, 50: 0.003, 100: 0.002}, "long": {25: 0.4, 50: 0.15, 100: 0.08}}
    world = world_of([short, long], secs, slowdown=lambda *_: 1.05)
    found = asked(world)
    assert found.said == "plan"
    assert found.chosen is not None
    assert found.chosen.placement.lanes == (Lane(50, ("long",)), Lane(50, ("short",)))
    (rejected,) = (a for a in found.alternatives if a.name == "one after another")
    assert "short: 99 of 100 would take up to" in rejected.why
    assert found.times >= 1


def test_one_after_another_is_said_where_shares_gain_nothing() -> None:
    subjects = [Subject("one", "one", 10, 0.1), Subject("two", "two", 10, 0.1)]
    secs = {s.name: {25: 0.04, 50: 0.02, 100: 0.01} for s in subjects}
    found = asked(world_of(subjects, secs))
    assert found.said == "one after another"
    (rejected,) = found.alternatives
    assert rejected.name == "equal shares"
    assert rejected.why.startswith("fits, and its tightest member")


@pytest.mark.parametrize(
    ("rate", "slo", "said"),
    [(200, 0.1, "would be busy"), (1, 0.005, "over its 5.00\N{NO-BREAK SPACE}ms")],
)
def test_what_does_not_fit_is_told_with_what_binds(rate: float, slo: float, said: str) -> None:
    subjects = [Subject("one", "one", rate, slo), Subject("two", "two", 1, 1.0)]
    secs = {s.name: {25: 0.04, 50: 0.02, 100: 0.01} for s in subjects}
    found = asked(world_of(subjects, secs))
    assert found.said == "unfit"
    assert any(said in reason for reason in found.reasons)
    assert found.times < 1


def test_tenants_in_one_launch_are_chosen_where_they_serve_more() -> None:
    subjects = [Subject(f"m{i}", "m", 90, 0.03) for i in range(8)]
    points = [point("m", s, 0.003 * 50 / s) for s in SHARES]
    points += [point("m", s, 0.006 * 50 / s, together=8) for s in SHARES]
    world = World(subjects, Curves(points), Pairs([], "a device"), busy=0.9)
    found = asked(world)
    assert found.said == "plan"
    assert found.chosen is not None
    assert (found.chosen.placement.kind, found.chosen.placement.together) == ("space-time", 8)
    mix = Mix.model_validate(
        {"members": [{"name": "m", "artifacts": [f"a{i}" for i in range(8)], "rate": 90}]}
    )
    named = [Subject(f"m-{i}", "m", 90) for i in range(8)]
    plan = plan_of(found, mix, named)
    slices = [lane.share for lane in found.chosen.placement.lanes]
    assert plan.policy.model_dump() == {
        "kind": "space-time", "slices": slices, "together": 8, "window_ms": 1.0,
    }  # fmt: skip
    assert asked(world, together=(1,)).said == "unfit"


def test_batches_of_one_model_are_chosen_where_they_serve_more() -> None:
    subjects = [Subject("m", "m", 320, 0.05, has_batches=True)]
    points = [point("m", s, 0.003 * 100 / s) for s in SHARES]
    points += [point("m", s, 0.006 * 100 / s, together=8) for s in SHARES]
    found = asked(World(subjects, Curves(points), Pairs([], "a device"), busy=0.9))
    assert found.said == "plan"
    assert found.chosen is not None
    assert (found.chosen.placement.kind, found.chosen.placement.together) == ("space-time", 8)
    assert "up to 8 requests in a launch" in found.chosen.placement.text()
    one_by_one = [dataclasses.replace(subject, has_batches=False) for subject in subjects]
    world = World(one_by_one, Curves(points), Pairs([], "a device"), busy=0.9)
    assert asked(world).said == "unfit"


def with_a_group(of_launches: float, *, pairs: Pairs | None = None) -> World:
    """Return four tenants that are busy, and a long model that is to have a share of its own."""
    subjects = [Subject(f"m-{i}", "m", 40, 0.06) for i in range(4)] + [Subject("b", "b", 2, 2.0)]
    points = [point("m", s, 0.006 * 50 / s) for s in SHARES]
    points += [point("m", s, of_launches * 50 / s, together=4) for s in SHARES]
    points += [point("b", s, 0.25 * 50 / s) for s in SHARES]
    return World(subjects, Curves(points), pairs or Pairs([], DEVICE), busy=0.8)


def test_a_group_has_launches_in_a_slice_beside_another_models_lane() -> None:
    world = with_a_group(0.008)
    found = asked(world)
    assert found.said == "plan"
    assert found.chosen is not None
    names = tuple(f"m-{i}" for i in range(4))
    placement = found.chosen.placement
    assert placement.kind == "space"
    assert {lane.members: lane.together for lane in placement.lanes} == {names: 4, ("b",): 1}
    assert "m-0, m-1, m-2, m-3 (up to 4 in a launch)" in placement.text()
    entries = [
        {"name": "m", "artifacts": [f"a{i}" for i in range(4)], "rate": 40, "slo_ms": 60},
        {"name": "b", "artifact": "b", "rate": 2, "slo_ms": 2000},
    ]
    plan = plan_of(found, Mix.model_validate({"members": entries}), [*world.subjects.values()])
    assert plan.policy.model_dump() == {
        "kind": "space-time", "slices": "lanes", "together": 4, "window_ms": 1.0,
    }  # fmt: skip
    (lane,) = {m.lane for m in plan.members if m.name != "b"}
    policy = policy_of(plan.policy.kind, plan.policy.parameters)
    laid = {each.name: each.home for each in policy.lay_out(plan.members)}
    assert laid == {lane: names, "b": ("b",)}


def test_launches_in_a_slice_need_a_group_something_beside_it_and_a_point() -> None:
    world = with_a_group(0.008)
    sizes = (1, 4)
    assert launches_beside_lanes(world, shares=SHARES, together=sizes) is not None
    assert launches_beside_lanes(world, shares=SHARES, together=(1, 2)) is None
    alone = [s for s in world.subjects.values() if s.of == "m"]
    without = World(alone, world.curves, world.pairs, busy=0.8)
    assert launches_beside_lanes(without, shares=SHARES, together=sizes) is None
    several = [point for point in world.curves if point.together == 1]
    unmeasured = World([*world.subjects.values()], Curves(several), world.pairs, busy=0.8)
    assert launches_beside_lanes(unmeasured, shares=SHARES, together=sizes) is None


@pytest.mark.parametrize("seed", range(6))
def test_the_best_launches_beside_lanes_of_all_are_found(seed: int) -> None:
    rng = random.Random(seed)
    secs = {"m": 0.005, "a": rng.uniform(0.02, 0.1), "b": rng.uniform(0.02, 0.1), "c": 0.03}
    subjects = [Subject(f"m-{i}", "m", 30, 0.06) for i in range(3)]
    subjects += [Subject(of, of, rng.uniform(0.1, 0.4) / secs[of], 0.5) for of in "abc"]
    points = [point(of, s, each * 50 / s) for of, each in secs.items() for s in SHARES]
    points += [point("m", s, 0.007 * 50 / s, together=3) for s in SHARES]
    sides = [side(of, s) for of in secs for s in SHARES]
    sides += [side("m", s, together=3) for s in SHARES]
    known = [
        Pair(of, beside, DEVICE, exactly(rng.uniform(1.0, 1.6)), "a law")
        for of, beside in itertools.product(sides, sides)
    ]
    world = World(subjects, Curves(points), Pairs(known, DEVICE), busy=0.9)
    names = tuple(subject.name for subject in subjects[:3])
    single = World(subjects[3:], world.curves, world.pairs, busy=0.9)
    every = [
        world.forecast(lanes_of([Lane(share, names, 3), *others])).score
        for share in SHARES
        for others in every_placement(single, SHARES)
        if share + sum(lane.share for lane in others) <= 100
    ]
    found = launches_beside_lanes(world, shares=SHARES, together=(1, 3))
    assert found is not None
    assert found.best is not None
    assert found.is_exact
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    if math.isfinite(min(every)):
        assert found.best.score == pytest.approx(min(every), rel=1e-6)
    ticking = iter(range(1000))
    short = launches_beside_lanes(
        world, shares=SHARES, together=(1, 3), clock=lambda: next(ticking), limit_secs=0.5
    )
    assert short is not None
    assert short.best is not None
    assert not short.is_exact
    assert short.bound <= min(every) * (1 + 1e-6)
    assert short.gap == pytest.approx(short.best.score / short.bound - 1)


def test_a_launch_slows_its_neighbour_by_what_was_measured_of_launches() -> None:
    def told(of: Side, beside: Side, slowdown: float) -> Pair:
        return Pair(of, beside, DEVICE, exactly(slowdown), "a law")

    one, four, long = side("m", 50), side("m", 50, together=4), side("b", 50)
    known = [told(long, four, 1.5), told(four, long, 1.2), told(long, one, 9.0)]
    world = with_a_group(0.008, pairs=Pairs(known, DEVICE))
    group = Lane(50, tuple(f"m-{i}" for i in range(4)), 4)
    placement = Placement("space", (Lane(50, ("b",)), group))
    *tenants, other = world.forecast(placement).expected
    assert other.slowdown.how == "measured"
    assert other.slowdown.interval.value == pytest.approx(1 + 0.5 * 160 * 0.008 / 4)
    assert tenants[0].slowdown.interval.value == pytest.approx(1 + 0.2 * 2 * 0.25)
    ((of, beside),) = neighbours(placement, world)
    assert (of.side, beside.side) == (long, dataclasses.replace(four, name="m-0"))
    assert [subject.name for subject in beside.subjects] == [*group.members]


def test_in_equal_slices_launches_are_beside_launches_of_the_same_group_too() -> None:
    world = with_a_group(0.008)
    everyone = Lane(50, tuple(world.subjects), 4)
    found = [*neighbours(Placement("space-time", (everyone, everyone)), world)]
    keys = [(of.side.key, beside.side.key) for of, beside in found]
    four, long = ("m", 50, 4), ("b", 50, 1)
    assert keys == [(four, four), (four, long), (long, long)]
    assert [*neighbours(Placement("space-time", (everyone,)), world)] == []


def test_a_model_with_batches_has_them_in_a_slice_beside_another_models_lane() -> None:
    subjects = [Subject("m", "m", 120, 0.05, has_batches=True), Subject("b", "b", 4, 0.5)]
    points = [point("m", s, 0.006 * 50 / s) for s in SHARES]
    points += [point("m", s, 0.012 * 50 / s, together=8) for s in SHARES]
    points += [point("b", s, 0.1 * 50 / s) for s in SHARES]
    world = World(subjects, Curves(points), Pairs([], DEVICE), busy=0.8)
    found = launches_beside_lanes(world, shares=SHARES, together=(1, 8))
    assert found is not None
    best = found.best
    assert best is not None
    assert best.is_fit
    lanes = {lane.members: lane.together for lane in best.placement.lanes}
    assert lanes == {("m",): 8, ("b",): 1}
    (of,) = world.residents(Lane(50, ("m",), 8))
    assert [point.together for point in of.sizes] == [1, 8]
    assert "m (up to 8 in a launch)" in best.placement.text()


def test_a_mix_of_a_group_and_others_is_answered_in_a_few_seconds() -> None:
    subjects = [Subject(f"m-{i}", "m", 40, 0.1) for i in range(8)]
    subjects += [Subject(of, of, rate, 0.5) for of, rate in (("a", 3), ("b", 5), ("c", 8))]
    shares = (25, 50, 75, 100)
    secs = {"m": 0.004, "a": 0.03, "b": 0.02, "c": 0.01}
    points = [point(of, s, each * 50 / s) for of, each in secs.items() for s in shares]
    points += [
        point("m", s, 0.004 * (1 + size / 8) * 50 / s, together=size)
        for size in (2, 4, 8)
        for s in shares
    ]
    known = [
        Pair(side(a, s, together=n), side(b, t, together=m), DEVICE, exactly(1.1), "a law")
        for a, b in itertools.product(secs, secs)
        for s, t in itertools.product(shares, shares)
        for n, m in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
    ]
    world = World(subjects, Curves(points), Pairs(known, DEVICE), busy=0.8)
    began_at = time.process_time()
    found = answer(world, shares=shares, together=(1, 2, 4, 8))
    took_secs = time.process_time() - began_at
    assert found.is_fit
    assert found.searched is not None
    assert found.searched.is_exact
    names = {each.name for each in found.alternatives}
    assert found.chosen is not None
    assert "launches beside lanes" in names or found.chosen.placement.kind == "space"
    assert took_secs < 10  # 2 s where nothing else runs


def test_members_of_one_lane_are_so_in_the_plan() -> None:
    mix = Mix.model_validate(
        {"members": [{"name": n, "artifact": n, "rate": 30, "slo_ms": 50} for n in "abc"]}
    )
    subjects = [Subject(n, n, 30, 0.05) for n in "abc"]
    secs = {"a": {25: 0.02, 50: 0.008, 100: 0.008}}
    secs |= {n: {25: 0.02, 50: 0.005, 100: 0.005} for n in "bc"}
    found = asked(world_of(subjects, secs))
    assert found.chosen is not None
    plan = plan_of(found, mix, subjects)
    assert plan.policy.kind == "space"
    assert [m.share for m in plan.members] == [50, 50, 50]
    shared = [m.lane for m in plan.members if m.lane]
    assert len(shared) == 2
    assert len(set(shared)) == 1


def test_where_nothing_was_measured_nothing_is_said() -> None:
    world = World([ONE], Curves(), Pairs([], "a device"), busy=0.9)
    assert asked(world).said == "unknown"
    assert queueing.utilisation([]) == 0
