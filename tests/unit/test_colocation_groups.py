"""What the scheduler does with a launch of several requests: of a group, each with its own end."""

from __future__ import annotations

import math

import pytest

from tests.lib.colocation_world import member
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.policies import policy_of
from tunerd.colocation.policies.base import Choice, Policy, Together, View
from tunerd.colocation.policies.space_time import SpaceTime
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.work import (
    Complete,
    Evict,
    Fail,
    Group,
    Queue,
    Refuse,
    Reload,
    Request,
    Seat,
    Start,
)

GROUP = Group("one+1", ("one", "two"), 4)
SEAT, OTHER = Seat("one+1", "slice-0"), Seat("other", "slice-0")


def scheduler(policy: Policy | None = None, **said: object) -> Scheduler:
    """Return one for a group of two members and one beside it; a launch takes 10 ms, or 16."""
    members = [member("one", weight=2, **said), member("two", **said), member("other")]
    policy = policy or policy_of("space-time", {"window_ms": 0})
    lanes = policy.lay_out(members)
    known = estimated(SEAT, OTHER)
    return Scheduler(members, lanes, policy, {SEAT: 1, OTHER: 1}, known, groups=[GROUP])


def estimated(seat: Seat, other: Seat) -> Estimates:
    """Return what is known of the group's seat and of the one beside it."""
    estimates = Estimates()
    estimates.compiled_for(seat, (1, 4))
    for count, secs in ((1, 0.01), (4, 0.016)):
        estimates.observe(seat, 0, secs, now=0.0, count=count)
    estimates.observe(other, 0, 0.01, now=0.0)
    return estimates


def request(number: int, name: str, *, at: float = 0.0) -> Request:
    return Request(number, name, "default", at)


def with_a_launch_of_three(**said: object) -> Scheduler:
    """Return one in which requests 1, 2 and 3 run together since 10 ms, and 0 is done."""
    world = scheduler(**said)
    assert world.arrive(request(0, "one"), 0.0) == [Start(0, 0, SEAT, 0)]
    for number, name in ((1, "two"), (2, "one"), (3, "two")):
        assert world.arrive(request(number, name), 0.001 * number) == []
    assert world.ended(0, SEAT, 0.01, 0.01) == [Complete(0), Start(1, 1, SEAT, 0, (2, 3))]
    return world


def test_what_waits_of_a_group_starts_in_one_launch_and_each_has_its_end() -> None:
    world = with_a_launch_of_three()
    assert world.ended(1, SEAT, 0.016, 0.026) == [Complete(1), Complete(2), Complete(3)]
    assert world.is_empty


def test_each_queue_is_charged_its_part_over_its_weight() -> None:
    world = with_a_launch_of_three()
    world.arrive(request(4, "other"), 0.011)
    world.ended(1, SEAT, 0.018, 0.028)
    one = 0.01 / 2 + 0.006 / 2  # it ran alone before
    world.arrive(request(5, "one"), 0.028)
    world.arrive(request(6, "two"), 0.028)
    assert world.lag_secs(Queue("two", "default")) == pytest.approx(0.0)
    assert world.lag_secs(Queue("one", "default")) == pytest.approx(2 * 0.006 - one)


def test_how_long_a_launch_takes_is_learned_by_the_number_for_which_its_kernels_are() -> None:
    world = with_a_launch_of_three()
    world.ended(1, SEAT, 0.5, 0.51)
    world.arrive(request(4, "one"), 0.51)
    (running,) = world.running
    lane = world.lanes["slice-0"]
    taken = [world.left_secs(running.waiting, lane, likely=True, count=n) for n in (1, 2, 3, 4, 9)]
    assert taken[0] == pytest.approx(0.01)
    assert len(set(taken[1:])) == 1
    assert world.left_secs(running.waiting, lane, count=2) >= 0.016


def test_a_member_of_no_group_goes_in_a_launch_of_its_own() -> None:
    world = scheduler()
    for number, name in enumerate(("other", "one", "other", "two")):
        world.arrive(request(number, name), 0.0)
    (done, start) = world.ended(0, OTHER, 0.01, 0.01)
    assert (done, start) == (Complete(0), Start(1, 1, SEAT, 0, (3,)))
    assert world.ended(1, SEAT, 0.016, 0.026)[-1] == Start(2, 2, OTHER, 0)


def test_a_fault_of_a_launch_has_a_name_when_it_comes_again_and_fails_nobody_else() -> None:
    world = with_a_launch_of_three()
    assert world.running[0].culprit == ""
    out = world.lost((SEAT,), 0.02, culprit="", reason="illegal address")
    assert out == [Reload(SEAT)]
    assert world.faults[0].retried == 3
    # one alone after the other, in the order in which they came; nobody has company meanwhile
    assert world.arrive(request(4, "one"), 0.03) == []
    assert world.ready(SEAT, 1.0) == [Start(2, 1, SEAT, 0)]
    assert world.ended(2, SEAT, 0.01, 1.01) == [Complete(1), Start(3, 2, SEAT, 0)]
    assert world.running[0].culprit == "one"
    out = world.lost((SEAT,), 1.02, culprit="one", reason="illegal address")
    assert out == [Fail(2, "illegal address"), Reload(SEAT)]
    assert world.ready(SEAT, 2.0) == [Start(4, 3, SEAT, 0)]
    assert world.ended(4, SEAT, 0.01, 2.01) == [Complete(3), Start(5, 4, SEAT, 0)]
    assert world.ended(5, SEAT, 0.01, 2.02) == [Complete(4)]
    assert world.is_empty


def test_a_request_that_is_alone_in_a_launch_fails_by_its_members_name() -> None:
    world = scheduler()
    world.arrive(request(0, "two"), 0.0)
    assert world.running[0].culprit == "two"
    out = world.lost((SEAT,), 0.01, culprit="two", reason="division by zero")
    assert out == [Fail(0, "division by zero"), Reload(SEAT)]


def test_a_fault_of_another_member_has_a_launch_run_once_more() -> None:
    world = with_a_launch_of_three()
    out = world.lost((SEAT, OTHER), 0.02, culprit="other", reason="illegal address")
    assert out == [Reload(OTHER), Reload(SEAT)] or out == [Reload(SEAT), Reload(OTHER)]
    assert world.ready(SEAT, 1.0) == [Start(2, 1, SEAT, 0, (2, 3))]


def test_a_launch_that_exceeds_its_time_is_evicted_and_its_requests_run_alone() -> None:
    world = with_a_launch_of_three(limit_ms=100)
    assert world.next_tick() == pytest.approx(0.11)
    assert world.tick(0.1) == []
    evict, reload = world.tick(0.12)
    assert isinstance(evict, Evict)
    assert "exceeded its time of 0.1 s" in evict.reason
    assert reload == Reload(SEAT)
    assert world.ready(SEAT, 0.2) == [Start(2, 1, SEAT, 0)]
    evict, fail, *_ = world.tick(0.4)
    assert isinstance(evict, Evict)
    assert isinstance(fail, Fail)


def test_a_request_that_is_given_up_leaves_its_launch_to_the_others() -> None:
    world = with_a_launch_of_three()
    assert world.withdrawn(1, SEAT, 0.011, request_ids=[1, 3]) == [Complete(1), Complete(3)]
    assert world.arrive(request(4, "one"), 0.012) == []  # the seat is taken
    assert world.ended(1, SEAT, 0.01, 0.02) == [Complete(2), Start(2, 4, SEAT, 0)]
    assert world.withdrawn(2, SEAT, 0.021, request_ids=[4]) == [Complete(4)]
    assert world.is_empty


def test_a_group_whose_seat_cannot_be_loaded_is_down_with_all_its_members() -> None:
    world = with_a_launch_of_three()
    world.lost((SEAT,), 0.02, culprit="", reason="x")
    refused = world.given_up(SEAT, "no memory", 1.0)
    assert {r.request_id for r in refused if isinstance(r, Refuse)} == {1, 2, 3}
    (refuse,) = world.arrive(request(4, "two"), 2.0)
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "two is down: no memory"
    assert isinstance(world.arrive(request(5, "other"), 2.0)[0], Start)


def test_who_waits_for_company_starts_at_the_moment_that_the_policy_says() -> None:
    world = scheduler(policy_of("space-time", {"window_ms": 1}))
    for number in range(8):  # so often that company is likely, of a rate that is not known yet
        at = 0.0005 * number
        (start,) = world.arrive(request(number, "one", at=at), at)
        assert isinstance(start, Start)
        world.ended(start.start_id, SEAT, 0.01, at)
        assert world.look_at == math.inf
    assert world.arrive(request(8, "one", at=0.004), 0.004) == []
    assert world.look_at == pytest.approx(0.005)
    assert world.turn((), 0.0041) == []
    assert world.arrive(request(9, "two", at=0.0042), 0.0042) == []
    assert world.turn((), world.look_at) == [Start(8, 8, SEAT, 0, (9,))]
    assert world.look_at == math.inf


def test_what_waits_for_company_in_its_lane_keeps_nobody_from_another() -> None:
    group = [member(name, share=50, lane="slice") for name in ("one", "two")]
    members = [*group, member("other", share=50)]
    policy = policy_of("space-time", {"slices": "lanes", "window_ms": 1})
    seat, other = Seat("one+1", "slice"), Seat("other", "other")
    lanes = policy.lay_out(members)
    assert [(lane.name, lane.pct, lane.home) for lane in lanes] == [
        ("slice", 50, ("one", "two")), ("other", 50, ("other",)),
    ]  # fmt: skip
    known = estimated(seat, other)
    world = Scheduler(members, lanes, policy, {seat: 1, other: 1}, known, groups=[GROUP])
    for number in range(8):  # so often that company is likely
        at = 0.0005 * number
        (start,) = world.arrive(request(number, "one", at=at), at)
        assert isinstance(start, Start)
        world.ended(start.start_id, seat, 0.01, at)
    assert world.arrive(request(8, "one", at=0.004), 0.004) == []
    assert world.look_at == pytest.approx(0.005)
    (start,) = world.arrive(request(9, "other", at=0.0041), 0.0041)
    assert isinstance(start, Start)
    assert (start.request_id, start.seat) == (9, other)
    assert world.arrive(request(10, "two", at=0.0042), 0.0042) == []
    (launch,) = world.turn((), 0.005)
    assert isinstance(launch, Start)
    assert (launch.seat, launch.request_ids) == (seat, (8, 10))


class _Careless(SpaceTime):
    """Starts all that waits in one launch."""

    last_first: bool

    def choose(self, view: View) -> Choice | Together | None:
        lines = [line for w in view.heads for line in view.mates(w, view.idle[0]) if line[0] is w]
        waits = tuple(waiting for line in lines for waiting in line)
        return Together(waits[:: -1 if self.last_first else 1], view.idle[0])


@pytest.mark.parametrize(
    ("names", "last_first", "said"),
    [
        (("one", "two", "other"), True, "starts 3 in one launch of other"),
        (("one", "two", "other"), False, "starts other in a launch of one.1"),
        (("one", "one"), True, "passes over"),
        (("one",) * 5, False, "starts 5 in one launch of one.1"),
    ],
)
def test_a_policy_cannot_start_what_does_not_go_together(
    names: tuple[str, ...], last_first: bool, said: str
) -> None:
    world = scheduler(_Careless(last_first=last_first))
    with pytest.raises(ValueError, match=said):
        world.turn(
            [lambda s, at, n=n, x=x: s.arrive(request(n, x), at) for n, x in enumerate(names)], 0.0
        )
