"""Groups whose weights have less memory than all of them take: who finds them, who waits."""

from __future__ import annotations

import dataclasses
import io
import math
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.lib.planning_world import DEVICE, SHARES, point
from tunerd.colocation.planning.answer import Answer, answer, plan_of
from tunerd.colocation.planning.columns import kinds_of
from tunerd.colocation.planning.curves import Curves
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.pairs import Pairs
from tunerd.colocation.planning.placement import Lane, Placement, Subject
from tunerd.colocation.planning.planned import PlannedMix
from tunerd.colocation.planning.queueing import Stream, launches, wait_of
from tunerd.colocation.planning.residency import Residency, hit_ratios
from tunerd.colocation.planning.search import lanes_of
from tunerd.colocation.planning.world import World
from tunerd.report.mix import mix_json, mix_table

ONE = 1 << 30  # bytes of one member's weights
NAMES = ("hot-0", "hot-1", "cold-0", "cold-1")


def lru_hits(rates: list[float], pieces: int, *, requests: int = 100_000) -> np.ndarray:
    """Return which part of each one's requests finds it in a cache under LRU that is run."""
    rng = np.random.default_rng(1)
    weights = np.array(rates) / sum(rates)
    there: OrderedDict[int, None] = OrderedDict()
    asked, found = np.zeros(len(rates)), np.zeros(len(rates))
    for nth, who in enumerate(rng.choice(len(rates), requests, p=weights).tolist()):
        counts = nth >= requests // 10
        asked[who] += counts
        if who in there:
            found[who] += counts
            there.move_to_end(who)
            continue
        if len(there) == pieces:
            there.popitem(last=False)
        there[who] = None
    return found / asked


@pytest.mark.parametrize(
    ("rates", "pieces"),
    [
        ([10.0] * 10, 4),
        ([100 / nth for nth in range(1, 51)], 10),
        ([100 / nth for nth in range(1, 51)], 40),
        ([200.0, 50.0, 20.0, 10.0, 5.0, 5.0], 3),
    ],
)
def test_who_finds_its_weights_is_told_within_some_percent_of_a_cache_that_is_run(
    rates: list[float], pieces: int
) -> None:
    told = np.array(hit_ratios(rates, pieces))
    assert told.sum() == pytest.approx(pieces)  # as many as there is room for, at any time
    ran = lru_hits(rates, pieces)
    assert np.abs(told - ran).max() < 0.05  # the rarest are asked some hundred times
    weights = np.array(rates) / sum(rates)
    assert float(weights @ told) == pytest.approx(float(weights @ ran), abs=0.02)


def test_where_all_have_room_everyone_finds_its_weights_and_without_any_nobody() -> None:
    assert hit_ratios([3.0, 2.0], 2) == (1.0, 1.0)
    assert hit_ratios([3.0, 2.0], 0) == (0.0, 0.0)
    assert hit_ratios([], 1) == ()


def residency(pieces: int, **said: object) -> Residency:
    known = Residency(
        "hot-0+3", NAMES, frozenset(["hot-0"]), 4, pieces * ONE, ONE, True, measured_secs=0.02
    )
    return dataclasses.replace(known, **said)  # type: ignore[arg-type]


def test_the_kernels_own_weights_are_always_there_and_take_a_piece() -> None:
    rates = {"hot-0": 1.0, "hot-1": 20.0, "cold-0": 2.0, "cold-1": 2.0}
    colds = residency(3).colds(rates)
    assert colds["hot-0"].part == 0
    hits = [1 - colds[name].part for name in NAMES[1:]]
    assert sum(hits) == pytest.approx(2)
    assert hits == pytest.approx(hit_ratios([20.0, 2.0, 2.0], 2))
    assert colds["cold-0"].secs == pytest.approx(0.02)


def group(pieces: int | None, **said: object) -> list[Subject]:
    """Return two members that are often asked and two that are not, and a model by itself."""
    of = None if pieces is None else residency(pieces, **said)
    hot, cold = Subject("", "hot", 40, 0.2), Subject("", "cold", 2, 0.2)
    return [
        dataclasses.replace(
            hot if name.startswith("hot") else cold,
            name=name, residency=of, shared_bytes=ONE + 1024,
        )
        for name in NAMES
    ] + [Subject("other", "other", 5, 0.5, shared_bytes=2 * ONE)]  # fmt: skip


def world(subjects: list[Subject], *, memory_bytes: int | None = None, busy: float = 0.9) -> World:
    points = [point(of, s, 0.004 * 100 / s) for of in ("hot", "cold", "other") for s in SHARES]
    points += [point(of, s, 0.006 * 100 / s, together=2) for of in ("hot", "cold") for s in SHARES]
    return World(subjects, Curves(points), Pairs([], DEVICE), busy=busy, memory_bytes=memory_bytes)


def whole(of: World) -> Placement:
    return lanes_of([Lane(100, tuple(of.subjects))])


def test_who_is_seldom_asked_waits_for_its_weights_in_the_forecast() -> None:
    made = world(group(3))
    expected = {each.member: each for each in made.forecast(whole(made)).expected}
    assert expected["hot-0"].cold.part == expected["other"].cold.part == 0
    assert 0 < expected["hot-1"].cold.part < 0.1 < expected["cold-0"].cold.part
    assert expected["cold-0"].tail_secs > expected["hot-0"].tail_secs + 0.01
    assert expected["cold-0"].p50_secs > expected["hot-1"].p50_secs
    # The lane is busy while it waits for weights.
    rates = {each.member: each.rate for each in expected.values()}
    waits = sum(each.cold.part * each.cold.secs * each.rate for each in expected.values())
    assert expected["other"].lane_busy == pytest.approx(0.004 * sum(rates.values()) + waits)
    roomy = world(group(None))
    assert all(not each.cold.part for each in roomy.forecast(whole(roomy)).expected)


def test_a_tail_has_a_miss_in_it_only_where_misses_are_as_many_as_lie_beyond_it() -> None:
    wait = wait_of([Stream(1, 0.001)])
    assert wait.latency(0.99, [(0.98, 0.001), (0.02, 0.5)]) == pytest.approx(0.5, abs=0.01)
    assert wait.latency(0.99, [(0.995, 0.001), (0.005, 0.5)]) < 0.01
    assert wait.latency(0.5, [(0.98, 0.001), (0.02, 0.5)]) < 0.01
    assert wait.latency(0.99, [(1.0, 0.001)]) == wait.quantile(0.99) + 0.001
    assert wait_of([Stream(2, 1.0)]).latency(0.99, [(0.5, 1.0), (0.5, 2.0)]) == math.inf


def test_latencies_with_misses_are_those_of_the_queue() -> None:
    warm, miss, cold, bring = 30.0, 0.1, 0.01, 0.03
    times = [(1 - miss, cold), (miss, cold + bring)]
    wait = wait_of([Stream(warm * part, secs) for part, secs in times])
    rng = random.Random(2)
    now = free = 0.0
    latencies = []
    for _ in range(100_000):
        now += rng.expovariate(warm)
        free = max(free, now) + cold + bring * (rng.random() < miss)
        latencies.append(free - now)
    for part in (0.5, 0.99):
        assert wait.latency(part, times) == pytest.approx(np.quantile(latencies, part), rel=0.1)
    ran = launches([warm], [[cold]], slices=1, colds=[(miss, bring)])
    assert ran.latency[0](0.99, miss) == pytest.approx(np.quantile(latencies, 0.99), rel=0.1)
    assert ran.busy == pytest.approx(warm * (cold + miss * bring), rel=0.05)
    assert ran.latency[0](0.5, 0.0) < ran.latency[0](0.5, 0.9)


def test_in_launches_who_is_seldom_asked_waits_for_its_weights_too() -> None:
    made = world(group(4)[:4])
    placement = Placement("space-time", (Lane(100, NAMES, 2),))
    # Two in a launch, and the kernels' own: three at a time.
    assert made.forecast(placement).is_fit
    made = world(group(3)[:4])
    found = made.forecast(placement)
    assert found.is_fit
    expected = {each.member: each for each in found.expected}
    assert expected["cold-0"].tail_secs > expected["hot-0"].tail_secs
    assert expected["cold-0"].busy > 2 * 0.003 + 0.1 * 2 * 0.02
    overloaded = world(group(3, measured_secs=10.0)[:4]).forecast(placement)
    assert overloaded.expected[0].lane_busy > 1
    assert overloaded.expected[0].tail_secs == math.inf


def test_in_lanes_that_have_weights_of_their_own_members_these_alone_count() -> None:
    made = world(group(2, is_shared=False))
    lanes = [Lane(50, ("hot-0", "hot-1", "other")), Lane(50, ("cold-0", "cold-1"))]
    expected = {each.member: each for each in made.forecast(lanes_of(lanes)).expected}
    assert expected["hot-1"].cold.part == 0  # beside those of the kernels
    assert expected["cold-0"].cold.part == pytest.approx(0.5)  # one piece is the kernels'
    shared = world(group(2)).forecast(lanes_of(lanes)).expected
    assert {each.member: each for each in shared}["hot-1"].cold.part > 0


def test_a_placement_counts_what_the_weights_of_a_group_may_have() -> None:
    needs = [
        sum(each.memory_bytes for each in made.forecast(whole(made)).expected)
        for made in (world(group(None)), world(group(3)))
    ]
    assert needs == [6 * ONE + 4 * 1024, 5 * ONE + 4 * 1024]
    room = 5 * ONE + (1 << 20)
    refused = asked(world(group(None), memory_bytes=room))
    assert (refused.said, refused.reasons[0][:17]) == ("unfit", "memory: they need")
    found = asked(world(group(3), memory_bytes=room))
    assert found.is_fit


def asked(of: World) -> Answer:
    return answer(of, shares=SHARES, together=(1, 2))


def test_a_launch_for_which_weights_have_no_room_is_not_chosen() -> None:
    made = world(group(2, depth=1)[:4])
    found = made.forecast(Placement("space-time", (Lane(100, NAMES, 2),)))
    (problem,) = [each for each in found.problems if each.startswith("memory:")]
    assert "weights_gib: hot-0+3 has 2.0 GiB of it, and up to 3 of its members may" in problem
    assert "give more, or have fewer requests in a launch or fewer slices" in problem
    chosen = asked(made).chosen
    assert chosen is not None
    assert chosen.placement.together == 1
    assert not any(each.startswith("memory:") for each in chosen.problems)
    two = [Lane(50, NAMES[:2]), Lane(50, NAMES[2:])]
    assert any("may run at once" in each for each in made.forecast(lanes_of(two)).problems)


def test_the_member_whose_weights_stay_is_no_other_ones_like() -> None:
    assert [len(kind) for kind in kinds_of(group(None)[:4])] == [2, 2]
    assert [len(kind) for kind in kinds_of(group(3)[:4])] == [1, 1, 2]


def printed(found: PlannedMix) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(mix_table(found))
    return " ".join(console.export_text().split())


ENTRIES = [
    {"name": "hot", "artifacts": ["/a", "/b"], "rate": 40, "slo_ms": 200},
    {"name": "cold", "artifacts": ["/c", "/d"], "rate": 2, "slo_ms": 200},
    {"name": "other", "artifact": "/e", "rate": 5, "slo_ms": 500},
]


def test_a_plan_has_room_for_weights_where_not_all_fit_and_its_page_says_what_is_estimated() -> (
    None
):
    mix = Mix.model_validate({"members": ENTRIES, "weights_gib": 3})
    subjects = group(3)
    made = world(subjects)
    found = asked(made)
    plan = plan_of(found, mix, subjects)
    assert plan.weights_gib == 3
    planned = PlannedMix(mix, Path("m"), found, plan, None, made.curves, Pairs((), DEVICE), "few")
    text = printed(planned)
    assert "cold starts" in text
    assert "% estimated" in text
    assert "Weights: 3 GiB for those of groups, the least recently used first to go" in text
    assert "and for how long is measured: 20.0 ms." in text
    chosen = mix_json(planned)["chosen"]
    cold = {each["member"]: each["cold"] for each in chosen["expected"]}
    assert cold["hot-0"] is None
    assert cold["cold-0"]["secs_are"] == "measured"

    subjects = group(3, measured_secs=None)
    found = asked(world(subjects))
    text = printed(dataclasses.replace(planned, answer=found))
    assert "and for how long too: 126 ms, by 8.5 GB/s, which was measured on an H200" in text
    document = mix_json(dataclasses.replace(planned, answer=found))
    expected = [e["cold"] for e in document["chosen"]["expected"] if e["member"] == "cold-0"]
    assert expected[0]["secs"] == pytest.approx(ONE / 8.5e9)
    assert expected[0]["secs_are"] == "estimated"

    all_fit = group(None)
    found = asked(world(all_fit))
    plan = plan_of(found, mix, all_fit)
    assert plan.weights_gib is None
    planned = dataclasses.replace(planned, answer=found, plan=plan)
    text = printed(planned)
    assert "cold starts" not in text
    assert "where all fit; the plan does not say `weights_gib`" in text
