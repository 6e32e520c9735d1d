"""What every policy of colocation promises, in a simulation."""

from __future__ import annotations

import random

import pytest

from tunerd.colocation.policies.base import Policy
from tunerd.testing.simulation import World, member

MEMBERS = (
    member("short", share=30, tenants=["shop", "press"]),
    member("long", share=30),
    member("other", share=40, weight=2),
)
SECS = {"short": 0.001, "long": 0.02, "other": 0.004}


class PolicyContract:
    """Derive from it, with a fixture `policy`."""

    @pytest.fixture
    def policy(self) -> Policy:
        raise NotImplementedError

    @pytest.fixture
    def patience_secs(self) -> float | None:
        """Return how long a request may wait beside others that never end, where that is said."""
        return None

    def busy_world(self, policy: Policy, *, seed: int, segments: int = 1, depth: int = 1) -> World:
        """Return a second of random arrivals, about as many as one lane can take."""
        rng = random.Random(seed)
        world = World(MEMBERS, policy, secs=SECS, segments={"long": segments}, depth=depth)
        for name, rate in (("short", 200), ("long", 15), ("other", 100)):
            at = 0.0
            while (at := at + rng.expovariate(rate)) < 1:
                tenant = rng.choice(["shop", "press"]) if name == "short" else "default"
                world.ask(at, name, tenant=tenant)
        return world

    @pytest.mark.parametrize("segments", [1, 10])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_every_request_is_answered_once_and_no_lane_is_idle_beside_work(
        self, policy: Policy, segments: int, depth: int
    ) -> None:
        world = self.busy_world(policy, seed=1, segments=segments, depth=depth)
        story = world.run()
        assert story.ended.keys() == story.arrived.keys()
        assert not story.refused
        assert world.is_conserving
        assert world.scheduler.is_empty

    @pytest.mark.parametrize("depth", [1, 2])
    def test_requests_of_a_tenant_start_in_the_order_of_their_arrival(
        self, policy: Policy, depth: int
    ) -> None:
        story = self.busy_world(policy, seed=2, depth=depth).run()
        by_queue: dict[object, list[int]] = {}
        for request_id in story.order:
            by_queue.setdefault(story.arrived[request_id].queue, []).append(request_id)
        assert len(by_queue) == 4
        for ids in by_queue.values():
            assert ids == sorted(ids)

    def test_nobody_starves_beside_a_member_that_always_waits(
        self, policy: Policy, patience_secs: float | None
    ) -> None:
        world = World(MEMBERS, policy, secs=SECS)
        for i in range(4000):
            world.ask(i * 0.0005, "short", tenant="shop")  # twice what a lane can take
        world.ask(0.5, "long")
        world.ask(0.5, "short", tenant="press")
        story = world.run()
        for name, tenant in (("long", "default"), ("short", "press")):
            (request,) = (
                r for r in story.arrived.values() if (r.member, r.tenant) == (name, tenant)
            )
            waited_secs = story.started[request.request_id] - 0.5
            assert patience_secs is None or waited_secs < patience_secs
            assert request.request_id in story.ended

    def test_the_same_events_give_the_same_decisions(self, policy: Policy) -> None:
        first, second = (self.busy_world(policy, seed=3).run() for _ in range(2))
        assert first == second
