"""The scheduler: events in, instructions out."""

from __future__ import annotations

import math

import pytest
from colocation_world import member

from tunerd.colocation.estimates import Estimates
from tunerd.colocation.policies import policy_of
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.work import (
    Complete,
    Evict,
    Fail,
    Queue,
    Refuse,
    Reload,
    Request,
    Seat,
    Start,
)

ONE, TWO = Seat("one", "stream-0"), Seat("two", "stream-1")


def scheduler(kind: str = "streams", **said: object) -> Scheduler:
    members = [member("one", **said), member("two", **said)]
    policy = policy_of(kind, {})
    lanes = policy.lay_out(members)
    segments = {Seat(m, lane.name): 1 for lane in lanes for m in lane.members}
    estimates = Estimates()
    for seat in segments:
        estimates.observe(seat, 0, 0.01, now=0.0)
    return Scheduler(members, lanes, policy, segments, estimates)


def request(number: int, name: str) -> Request:
    return Request(number, name, "default", 0.0)


def test_a_request_starts_and_ends() -> None:
    world = scheduler()
    assert world.arrive(request(0, "one"), 0.0) == [Start(0, 0, ONE, 0)]
    assert world.arrive(request(1, "one"), 0.0) == []
    assert world.ended(0, ONE, 0.01, 0.01) == [Complete(0), Start(1, 1, ONE, 0)]
    assert world.ended(1, ONE, 0.01, 0.02) == [Complete(1)]
    assert world.is_empty


def test_an_end_that_comes_after_an_eviction_is_nothing() -> None:
    world = scheduler(limit_ms=100)
    world.arrive(request(0, "one"), 0.0)
    assert world.next_tick() == pytest.approx(0.1)
    assert world.tick(0.05) == []
    evict, fail, reload = world.tick(0.2)
    assert isinstance(evict, Evict)
    assert isinstance(fail, Fail)
    assert "exceeded its time of 0.1 s" in fail.reason
    assert reload == Reload(ONE)
    assert world.ended(0, ONE, 0.2, 0.2) == []
    assert world.next_tick() == math.inf


def test_a_fault_fails_its_own_request_and_gives_others_a_second_try() -> None:
    world = scheduler()
    for number, name in enumerate(("one", "two", "two")):
        world.arrive(request(number, name), 0.0)
    out = world.lost((ONE, TWO), 1.0, culprit="one", reason="illegal address")
    assert out == [Fail(0, "illegal address"), Reload(ONE), Reload(TWO)]
    assert world.ready(ONE, 2.0) == []
    assert world.ready(TWO, 3.0) == [Start(2, 1, TWO, 0)]  # before the one that came after it
    (fault,) = world.faults
    assert (fault.member, fault.retried, fault.recovered_secs) == ("one", 1, 2.0)


def test_a_request_that_is_lost_twice_fails() -> None:
    world = scheduler()
    world.arrive(request(0, "two"), 0.0)
    world.lost((TWO,), 1.0, culprit="", reason="the runner got SIGKILL")
    assert world.ready(TWO, 2.0) == [Start(1, 0, TWO, 0)]
    out = world.lost((TWO,), 3.0, culprit="", reason="the runner got SIGKILL")
    assert out == [Fail(0, "it was lost twice, at last to this: the runner got SIGKILL"),
                   Reload(TWO)]  # fmt: skip


def test_seats_that_are_fenced_already_are_lost_once() -> None:
    world = scheduler()
    assert world.lost((ONE,), 1.0, culprit="one", reason="x") == [Reload(ONE)]
    assert world.lost((ONE,), 1.0, culprit="one", reason="x") == []
    assert len(world.faults) == 1


def test_a_member_that_is_down_refuses_what_waits_and_what_comes() -> None:
    world = scheduler()
    world.lost((ONE,), 1.0, culprit="one", reason="x")
    world.arrive(request(0, "one"), 1.0)
    (refused,) = world.given_up(ONE, "no memory", 2.0)
    assert refused == Refuse(0, "one is down: no memory", was_admitted=True)
    assert isinstance(world.arrive(request(1, "one"), 3.0)[0], Refuse)
    assert isinstance(world.arrive(request(2, "two"), 3.0)[0], Start)


def test_a_request_that_is_withdrawn_leaves_its_lane() -> None:
    world = scheduler()
    world.arrive(request(0, "one"), 0.0)
    world.arrive(request(1, "one"), 0.0)
    assert world.withdrawn(0, ONE, 0.0) == [Complete(0), Start(1, 1, ONE, 0)]


def test_being_idle_saves_nothing_up() -> None:
    world = scheduler("time")
    seat = Seat("one", "whole")
    for number in range(3):
        world.arrive(request(number, "one"), 0.0)
    for number in range(2):
        world.ended(number, seat, 1.0, number + 1.0)
    world.arrive(request(3, "two"), 2.0)
    assert world.lag_secs(Queue("two", "default")) == 0.0
