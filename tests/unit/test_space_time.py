"""The policy space-time in a simulation: several requests of one architecture in a launch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.lib.colocation_world import Story, World, member
from tunerd.colocation.policies import policy_of
from tunerd.colocation.policies.base import Policy
from tunerd.colocation.work import Group, Lane, Request, Seat, Start
from tunerd.errors import InputError

NAMES = tuple(f"m{i}" for i in range(8))
GROUP = Group("m0+7", NAMES, 8)
FIXED_SECS, EACH_SECS = 0.0005, 0.00005  # of a launch, and of each request on the whole device


def policy(**parameters: object) -> Policy:
    return policy_of("space-time", parameters)


def world_of(chosen: Policy, *, groups: bool = True, depth: int = 1, **said: object) -> World:
    """Return a world of eight equal members; a part of a launch is shortened by no share."""
    members = [member(name, tenants=["a", "b"], **said) for name in NAMES]
    lanes = chosen.lay_out(members)
    pct = {lane.name: min(lane.pct, 100 // len(lanes)) for lane in lanes}

    def one_secs(lane: str) -> float:
        return FIXED_SECS + EACH_SECS * 100 / pct[lane]

    def scale(seat: Seat) -> float:
        return one_secs(seat.lane)

    share = min(pct.values())
    return World(
        members,
        chosen,
        secs=dict.fromkeys(NAMES, 1.0),
        scale=scale,
        groups=[GROUP] if groups else [],
        depth=depth,
        grown=lambda count: (
            (FIXED_SECS + count * EACH_SECS * 100 / share) / (FIXED_SECS + EACH_SECS * 100 / share)
        ),
    )


def poisson(world: World, rate: float, *, secs: float, seed: int, within: float = np.inf) -> None:
    """Have requests of all members come at random, `rate` per second in all."""
    rng = random.Random(seed)
    at = 0.0
    while (at := at + rng.expovariate(rate)) < secs:
        world.ask(at, rng.choice(NAMES), tenant=rng.choice("ab"), within=within)


def p99(story: Story) -> float:
    found = [at - story.arrived[i].arrived_at for i, at in story.ended.items()]
    return float(np.percentile(found, 99))


def saturated_per_sec(kind: str, **parameters: object) -> float:
    world = world_of(policy_of(kind, parameters), groups=kind == "space-time")
    poisson(world, 30_000, secs=0.1, seed=1)
    story = world.run(until=0.1)
    return len(story.ended) / 0.1


def test_under_saturation_it_serves_more_than_shares_and_streams() -> None:
    together = saturated_per_sec("space-time", slices=4)
    assert together > 1.5 * saturated_per_sec("space")
    assert together > 1.5 * saturated_per_sec("streams")
    assert together > saturated_per_sec("space-time", slices=1)


@pytest.mark.parametrize("slices", [1, 4])
def test_under_saturation_launches_are_full_and_no_lane_waits(slices: int) -> None:
    world = world_of(policy(slices=slices))
    poisson(world, 30_000, secs=0.1, seed=2)
    world.run(until=0.02)  # the first ones find all idle
    full_from = len(world.story.launches)
    world.story.held.clear()
    story = world.run(until=0.1)
    assert {len(ids) for _, ids in story.launches[full_from:]} == {8}
    assert not story.held


@pytest.mark.parametrize("slices", [1, 4])
def test_under_saturation_a_full_launch_is_queued_behind_each_that_runs(slices: int) -> None:
    world = world_of(policy(slices=slices), depth=2)
    poisson(world, 30_000, secs=0.1, seed=2)
    world.run(until=0.02)
    full_from = len(world.story.launches)
    for turn in range(1, 9):
        story = world.run(until=0.02 + turn * 0.01)
        assert len(world.scheduler.running) == 2 * slices
    assert {len(ids) for _, ids in story.launches[full_from:]} == {8}


def test_nothing_less_than_a_full_launch_is_queued_behind_one() -> None:
    world = world_of(policy(), depth=2)
    poisson(world, 3_000, secs=1, seed=6)
    story, behind = world.story, []
    while world._events:
        before = len(story.launches)
        running = len(world.scheduler.running)
        world.run(until=world._events[0][0])
        if running and len(world.scheduler.running) > running:
            behind += [len(ids) for _, ids in story.launches[before:]]
    assert set(behind) <= {8}
    assert len(story.ended) == len(story.arrived)


def test_nothing_is_queued_where_an_objective_is_hardly_longer_than_a_launch() -> None:
    world = world_of(policy(), depth=2, slo_ms=3)
    poisson(world, 30_000, secs=0.05, seed=2)
    world.run(until=0.02)
    for turn in range(1, 20):
        world.run(until=0.02 + turn * 0.001)
        assert len(world.scheduler.running) <= 1


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("rate", [50, 300])
def test_at_low_load_the_tail_is_that_of_ordered_but_for_the_window(rate: int, slices: int) -> None:
    tails = {}
    for kind, groups in (("ordered", False), ("space-time", True)):
        # the same slices: what differs is whether requests go together
        world = world_of(policy(slices=slices), groups=groups)
        poisson(world, rate, secs=10, seed=3)
        tails[kind] = p99(world.run())
    assert tails["space-time"] <= tails["ordered"] + 0.001


def test_between_requests_that_come_often_an_idle_lane_waits_for_company() -> None:
    held = world_of(policy(window_ms=1))
    poisson(held, 1500, secs=5, seed=4)
    at_once = world_of(policy(window_ms=0))
    poisson(at_once, 1500, secs=5, seed=4)
    story, other = held.run(), at_once.run()
    assert story.held
    assert not other.held
    assert story.per_launch > other.per_launch
    waited = [story.started[i] - story.arrived[i].arrived_at for i in story.held]
    assert max(waited) <= 0.001 + 1e-9
    assert sum(story.busy_secs.values()) < sum(other.busy_secs.values())


def test_who_comes_seldom_waits_for_nobody() -> None:
    world = world_of(policy())
    poisson(world, 100, secs=10, seed=5)
    story = world.run()
    assert len(story.held) < 0.02 * len(story.arrived)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_misses_a_deadline_because_of_company(seed: int) -> None:
    rng = random.Random(seed)
    world = world_of(policy(slices=rng.choice([1, 2, 4])))
    alone = {seat.lane: world.secs_of(seat) for seat in world._secs}
    rate = rng.choice([300, 1000, 3000, 8000])
    at = 0.0
    while (at := at + rng.expovariate(rate)) < 1:
        within = rng.choice([min(alone.values()) * rng.uniform(0.5, 4), 0.05, np.inf])
        world.ask(at, rng.choice(NAMES), tenant=rng.choice("ab"), within=within)
    story = world.run()
    for number, held_at in story.held.items():  # it could have started alone then
        request = story.arrived[number]
        if held_at + max(alone.values()) <= request.deadline_at:
            assert story.ended[number] <= request.deadline_at + 1e-9
    for begins_at, ids in story.launches:  # it would have ended so much later alone
        for number in ids:
            request = story.arrived[number]
            if begins_at + max(alone.values()) <= request.deadline_at:
                assert story.ended[number] <= request.deadline_at + 1e-9


@pytest.mark.parametrize("admission", [True, False])
def test_who_waits_for_company_starts_before_what_comes_meanwhile(admission: bool) -> None:
    members = [*map(member, NAMES), member("other")]
    secs = dict.fromkeys(NAMES, 0.0004) | {"other": 0.002}
    world = World(members, policy(admission=admission), secs=secs, groups=[GROUP])
    for i in range(8):
        world.ask(0.0005 * i, "m0")
    held = world.ask(0.004, "m1", within=0.0016)  # more than it needs with company
    urgent = world.ask(0.0042, "other", within=0.0021)
    story = world.run()
    assert list(story.held) == [held]
    assert story.started[held] == pytest.approx(0.0049 if admission else 0.0042)
    assert (urgent in story.refused) == admission
    assert story.ended[held] <= 0.004 + 0.0016


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("rate", "slices"), [(2000, 1), (6000, 1), (12000, 4)])
def test_what_is_admitted_is_met_and_more_than_alone(rate: int, slices: int, depth: int) -> None:
    met = {}
    for groups in (False, True):
        world = world_of(policy(slices=slices), groups=groups, depth=depth)
        poisson(world, rate, secs=0.3, seed=6, within=0.006)
        story = world.run()
        admitted = story.arrived.keys() - (story.refused.keys() - story.late)
        in_time = [
            i for i in admitted if story.ended.get(i, 9e9) <= story.arrived[i].deadline_at + 1e-9
        ]
        assert len(in_time) >= 0.995 * len(admitted)
        met[groups] = len(in_time)
    assert met[True] >= met[False]


@pytest.mark.parametrize("seed", range(3))
def test_all_are_answered_once_in_the_order_of_their_queues_beside_members_of_no_group(
    seed: int,
) -> None:
    members = [*(member(name, tenants=["a", "b"]) for name in NAMES), member("other")]
    secs = dict.fromkeys(NAMES, 0.001) | {"other": 0.003}
    world = World(members, policy(slices=2), secs=secs, groups=[GROUP])
    rng = random.Random(seed)
    at = 0.0
    while (at := at + rng.expovariate(3000)) < 1:
        name = rng.choice([*NAMES, "other"])
        world.ask(at, name, tenant=rng.choice("ab") if name in NAMES else "default")
    story = world.run()
    assert sorted(i for _, ids in story.launches for i in ids) == sorted(story.arrived)
    assert story.ended.keys() == story.arrived.keys()
    assert world.scheduler.is_empty
    by_queue: dict[object, list[int]] = {}
    for number in story.order:
        by_queue.setdefault(story.arrived[number].queue, []).append(number)
    assert len(by_queue) == 17
    assert all(ids == sorted(ids) for ids in by_queue.values())
    for _, ids in story.launches:
        assert len(ids) == 1 or all(story.arrived[i].member in NAMES for i in ids)
    assert story.per_launch > 1.5


def test_what_comes_together_is_spread_over_idle_slices_first() -> None:
    scheduler = world_of(policy(slices=4)).scheduler
    arrivals = [Request(n, name, "a", 0.0) for n, name in enumerate(NAMES[:6])]
    starts = scheduler.turn([lambda s, at, r=r: s.arrive(r, at) for r in arrivals], 0.0)
    assert [(s.seat.lane, s.request_ids) for s in starts if isinstance(s, Start)] == [
        ("slice-0", (0, 1)),
        ("slice-1", (2, 3)),
        ("slice-2", (4,)),
        ("slice-3", (5,)),
    ]


def test_who_has_had_less_goes_first_and_each_is_charged_its_part() -> None:
    world = world_of(policy())
    for _ in range(2000):
        world.ask(0.0, "m0", tenant="a")
    late = world.ask(0.05, "m1", tenant="b")
    story = world.run()
    assert story.started[late] < 0.05 + 0.05 + 0.002  # the patience, and what runs meanwhile
    assert max(story.ended.values()) > 0.2


def test_slices_may_be_of_different_shares() -> None:
    lanes = policy(slices=[40, 30, 20]).lay_out([member("one")])
    assert lanes == (
        Lane("slice-0", 40, ("one",)),
        Lane("slice-1", 30, ("one",)),
        Lane("slice-2", 20, ("one",)),
    )
    for slices, said in (
        ([60, 50], "come to 110%"),
        (0, "greater than or equal to 1"),
        ([], "come to 0%"),
    ):
        with pytest.raises(InputError, match=said):
            policy(slices=slices)
    with pytest.raises(InputError, match="window_ms"):
        policy(window_ms=2)
