"""Policies decide in a simulation: the same promises of all, and what each is for."""

from __future__ import annotations

import random

import pytest

from tunerd.colocation.policies import POLICIES, policy_of
from tunerd.colocation.policies.base import Policy
from tunerd.errors import InputError
from tunerd.testing import PolicyContract, World
from tunerd.testing.policies import MEMBERS, SECS
from tunerd.testing.simulation import member


def policy(kind: str, **parameters: object) -> Policy:
    return policy_of(kind, parameters)


class TestPolicies(PolicyContract):
    @pytest.fixture(params=POLICIES)
    def policy(self, request: pytest.FixtureRequest) -> Policy:
        return policy_of(request.param, {})

    @pytest.fixture
    def patience_secs(self, policy: Policy) -> float | None:
        """Return the patience of those that have one, and what runs meanwhile."""
        return 0.2 if policy.kind in ("ordered", "regulated") else None


class TestSpaceTimeInLanes(PolicyContract):
    @pytest.fixture
    def policy(self) -> Policy:
        return policy_of("space-time", {"slices": "lanes"})


def test_time_is_one_after_the_other() -> None:
    world = World(MEMBERS, policy("time"), secs=SECS)
    ids = [world.ask(0.0, name) for name in ("long", "other", "short")[:2]]
    story = world.run()
    assert story.started[ids[1]] == pytest.approx(story.ended[ids[0]])


def test_streams_deal_members_out_in_turn() -> None:
    lanes = policy("streams", streams=2).lay_out(MEMBERS)
    assert [lane.members for lane in lanes] == [("short", "other"), ("long",)]
    assert len(policy("streams").lay_out(MEMBERS)) == 3


def test_in_space_a_member_does_not_wait_for_another() -> None:
    world = World(MEMBERS, policy("space"), secs=SECS)
    world.ask(0.0, "long")
    short = world.ask(0.0, "short", tenant="shop")
    assert world.run().started[short] == 0.0


def test_ordered_meets_a_deadline_by_passing_over_what_has_time() -> None:
    world = World(MEMBERS, policy("ordered", borrow=False), secs=SECS)
    world.ask(0.0, "short", tenant="shop")
    world.ask(0.0001, "short", tenant="shop", within=1.0)
    urgent = world.ask(0.0002, "short", tenant="press", within=0.0025)
    story = world.run()
    assert story.ended[urgent] <= 0.0027
    assert story.order[1] == urgent


def test_ordered_refuses_at_once_what_cannot_be_met_and_says_why() -> None:
    world = World(MEMBERS, policy("ordered", borrow=False), secs=SECS)
    for i in range(5):
        world.ask(0.0, "long", within=1.0 + i)
    hopeless = world.ask(0.001, "long", within=0.03)
    world.ask(0.002, "long", within=0.2)
    story = world.run()
    assert list(story.refused) == [hopeless]
    assert not story.late
    assert "after its deadline" in story.refused[hopeless] or "of work" in story.refused[hopeless]
    assert len(story.ended) == 6


def test_what_ordered_admits_is_met_under_bursts() -> None:
    rng = random.Random(4)
    world = World(MEMBERS, policy("ordered"), secs=SECS)
    at = 0.0
    while at < 5:
        at += rng.expovariate(600 if int(at * 2) % 4 == 0 else 100)  # bursts, six times as many
        name = rng.choice(["short", "long", "other"])
        tenant = "shop" if name == "short" else "default"
        world.ask(at, name, tenant=tenant, within=4 * SECS[name] + 0.01)
    story = world.run()
    admitted = [r for i, r in story.arrived.items() if i not in story.refused or i in story.late]
    met = [r for r in admitted if story.ended.get(r.request_id, 9e9) <= r.deadline_at + 1e-9]
    assert len(story.refused) > 50  # there was more than could be met
    assert len(met) >= 0.995 * len(admitted)


def test_ordered_lends_an_idle_share_and_takes_its_own_first() -> None:
    world = World(MEMBERS, policy("ordered"), secs=SECS)
    ids = [world.ask(0.0, "long") for _ in range(3)]
    story = world.run()
    assert [story.started[i] for i in ids] == [0.0, 0.0, 0.0]  # its own share and two idle ones


def test_what_takes_long_borrows_no_share_where_the_plan_forbids_it() -> None:
    world = World(MEMBERS, policy("ordered", borrow_ms=5), secs=SECS)
    ids = [world.ask(0.0, "long") for _ in range(2)]
    short = [world.ask(0.0, "short", tenant="shop") for _ in range(2)]
    story = world.run()
    assert story.started[ids[1]] == pytest.approx(0.02)
    assert [story.started[i] for i in short] == [0.0, 0.0]


def test_shares_of_busy_members_follow_their_weights() -> None:
    members = (member("one", weight=1), member("two", weight=3))
    world = World(members, policy("regulated"), secs={"one": 0.01, "two": 0.01})
    for _ in range(200):
        world.ask(0.0, "one")
        world.ask(0.0, "two")
    story = world.run(until=1.0)
    assert story.busy_secs["two"] == pytest.approx(3 * story.busy_secs["one"], rel=0.25)


def test_regulated_lets_a_short_model_in_between_segments_of_a_long_one() -> None:
    worst = {}
    for segments in (1, 100):
        members = (member("short"), member("long"))
        secs = {"short": 0.0002, "long": 0.02}
        world = World(members, policy("regulated"), secs=secs, segments={"long": segments})
        for i in range(40):
            world.ask(i * 0.02, "long", within=0.1)
            world.ask(i * 0.02 + 0.005, "short", within=0.021)
        story = world.run()
        assert len(story.ended) == 80
        worst[segments] = max(story.latencies("short"))
    assert worst[1] > 0.01
    assert worst[100] < 0.0002 + 2 * 0.0002


def test_regulated_lets_a_short_model_in_where_neither_has_a_deadline() -> None:
    members = (member("short"), member("long"))
    secs = {"short": 0.0002, "long": 0.02}
    world = World(members, policy("regulated"), secs=secs, segments={"long": 100})
    for i in range(40):
        world.ask(i * 0.021, "long")
        world.ask(i * 0.021 + 0.005, "short")
    story = world.run()
    assert len(story.ended) == 80
    assert max(story.latencies("short")) < 0.0002 + 2 * 0.0002


@pytest.mark.parametrize(
    ("kind", "parameters", "said"),
    [
        ("fair", {}, "there is no policy 'fair'; there are time, streams"),
        ("time", {"patience_ms": 3}, "its parameters are none"),
        ("ordered", {"patience_ms": -1}, "policy ordered: patience_ms"),
    ],
)
def test_a_policy_that_cannot_be_used_says_what_can(
    kind: str, parameters: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        policy_of(kind, parameters)


def test_a_member_that_was_slow_for_a_while_is_not_refused_for_ever() -> None:
    world = World((member("one"),), policy("ordered"), secs={"one": 0.001})
    slow = iter([0.5] * 3)
    normal = world.secs_of
    world.secs_of = lambda seat: next(slow, normal(seat))
    for i in range(200):
        world.ask(i * 0.05, "one", within=0.01)
    story = world.run()
    assert len(story.refused) < 60
    assert all(i in story.ended for i in range(150, 200))
