"""The scheduler: events in, instructions out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.lib.colocation_world import member
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.policies import policy_of
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.work import (
    Complete,
    Evict,
    Fail,
    Pause,
    Queue,
    Refuse,
    Reload,
    Request,
    Reshared,
    Seat,
    Start,
    TryApart,
)

ONE, TWO = Seat("one", "stream-0"), Seat("two", "stream-1")


def scheduler(
    kind: str = "streams",
    *,
    of_one: int = 1,
    depth: int = 1,
    parameters: Mapping[str, object] | None = None,
    tries_apart: bool = False,
    **said: object,
) -> Scheduler:
    """Return one for two members; the first has `of_one` segments, each of 10 ms."""
    members = [member("one", **said), member("two", **said)]
    policy = policy_of(kind, parameters or {})
    lanes = policy.lay_out(members)
    counts = {"one": of_one, "two": 1}
    segments = {Seat(m, lane.name): counts[m] for lane in lanes for m in lane.members}
    estimates = Estimates()
    for seat, count in segments.items():
        for segment in range(count):
            estimates.observe(seat, segment, 0.01, now=0.0)
    return Scheduler(
        members, lanes, policy, segments, estimates, depth=depth, tries_apart=tries_apart
    )


def request(number: int, name: str) -> Request:
    return Request(number, name, "default", 0.0)


def test_a_request_starts_and_ends() -> None:
    world = scheduler()
    assert world.arrive(request(0, "one"), 0.0) == [Start(0, 0, ONE, 0)]
    assert world.arrive(request(1, "one"), 0.0) == []
    assert world.ended(0, ONE, 0.01, 0.01) == [Complete(0), Start(1, 1, ONE, 0)]
    assert world.ended(1, ONE, 0.01, 0.02) == [Complete(1)]
    assert world.is_empty


LONG, SHORT = Seat("one", "whole-0"), Seat("two", "whole-0")


def test_what_runs_pauses_for_whom_the_policy_prefers_and_goes_on_after_it() -> None:
    world = scheduler("regulated", of_one=5)
    assert world.arrive(request(0, "one"), 0.0) == [Start(0, 0, LONG, 0)]
    assert world.arrive(request(1, "two"), 0.001) == [Pause(LONG)]
    assert world.arrive(request(2, "two"), 0.002) == []  # it was asked already
    assert world.ended(0, LONG, 0.02, 0.02, segments=2) == [Start(1, 1, SHORT, 0)]
    assert world.ended(1, SHORT, 0.01, 0.03) == [Complete(1), Start(2, 2, SHORT, 0)]
    assert world.ended(2, SHORT, 0.01, 0.04) == [Complete(2), Start(3, 0, LONG, 2)]
    assert world.ended(3, LONG, 0.03, 0.07, segments=3) == [Complete(0)]
    assert world.is_empty


def test_what_runs_does_not_pause_for_whom_the_policy_would_not_start() -> None:
    world = scheduler("regulated", of_one=5, tenants=("default", "other"))
    world.arrive(Request(0, "one", "default", 0.0, 0.1), 0.0)
    assert world.arrive(request(1, "two"), 0.001) == []
    urgent = Request(2, "two", "other", 0.002, 0.03)
    assert world.arrive(urgent, 0.002) == [Pause(LONG)]


def test_a_deadline_is_met_behind_one_segment_of_what_runs() -> None:
    world = scheduler("regulated", of_one=50)
    world.arrive(Request(0, "one", "default", 0.0, 10.0), 0.0)
    assert world.arrive(Request(1, "two", "default", 0.1, 0.121), 0.1) == [Pause(LONG)]
    (refuse,) = world.arrive(Request(2, "two", "default", 0.1, 0.121), 0.1)
    assert isinstance(refuse, Refuse)


def test_a_request_that_is_lost_between_segments_begins_anew() -> None:
    world = scheduler("regulated", of_one=5)
    world.arrive(request(0, "one"), 0.0)
    world.arrive(request(1, "two"), 0.001)
    world.ended(0, LONG, 0.02, 0.02, segments=2)
    said = world.lost((LONG, SHORT), 0.021, culprit="two", reason="illegal address")
    assert said == [Fail(1, "illegal address"), Reload(LONG), Reload(SHORT)]
    assert world.ready(LONG, 0.03, segments=4) == [Start(2, 0, LONG, 0)]
    assert world.ended(2, LONG, 0.04, 0.07, segments=4) == [Complete(0)]


def test_who_ran_in_a_fault_that_nobody_can_name_runs_alone_until_it_has_a_name() -> None:
    world = scheduler()
    world.arrive(request(0, "one"), 0.0)
    world.arrive(request(1, "two"), 0.0)
    world.arrive(request(2, "two"), 0.0)
    said = world.lost((ONE, TWO), 0.1, culprit="", reason="illegal address")
    assert said == [Reload(ONE), Reload(TWO)]
    assert world.ready(TWO, 1.0) == [Start(2, 1, TWO, 0)]
    assert world.ready(ONE, 1.1) == []  # not beside the other
    assert world.ended(2, TWO, 0.01, 1.2) == [Complete(1), Start(3, 0, ONE, 0)]
    said = world.lost((ONE, TWO), 1.3, culprit="one", reason="illegal address")
    assert said == [Fail(0, "illegal address"), Reload(ONE), Reload(TWO)]
    assert world.ready(TWO, 2.0) == [Start(4, 2, TWO, 0)]
    assert world.ready(ONE, 2.1) == []
    assert world.ended(4, TWO, 0.01, 2.2) == [Complete(2)]
    assert world.is_empty


def test_where_the_place_can_who_ran_in_such_a_fault_is_tried_apart_while_others_serve() -> None:
    world = scheduler(tries_apart=True)
    for number, name in enumerate(("one", "two", "two")):
        world.arrive(request(number, name), 0.0)
    assert world.lost((ONE, TWO), 0.1, culprit="", reason="illegal address") == [
        Reload(ONE),
        Reload(TWO),
        TryApart(((0, ONE), (1, TWO))),
    ]
    assert world.ready(TWO, 1.0) == [Start(2, 2, TWO, 0)]  # nothing waits for the suspects
    assert world.ready(ONE, 1.1) == []
    (fault,) = world.faults
    assert (fault.member, fault.recovered_secs, fault.retried) == ("", 1.0, 2)
    assert world.tried_apart(1, 1.2) == [Complete(1)]
    assert world.ended(2, TWO, 0.01, 1.3) == [Complete(2)]
    said = world.tried_apart(0, 1.4, reason="illegal address")
    assert said == [Fail(0, "illegal address")]
    assert (fault.member, fault.reason) == ("one", "illegal address")
    assert world.tried_apart(0, 1.5) == []
    assert world.is_empty


def with_two_suspects() -> Scheduler:
    """Return one whose two members ran in a fault without a name; no seat is there again."""
    world = scheduler(tries_apart=True)
    world.arrive(request(0, "one"), 0.0)
    world.arrive(request(1, "two"), 0.0)
    world.lost((ONE, TWO), 0.1, culprit="", reason="illegal address")
    return world


def test_who_need_not_be_tried_apart_runs_where_it_ran_first_in_line() -> None:
    world = with_two_suspects()
    world.arrive(request(2, "two"), 0.2)
    world.ready(ONE, 1.0)
    assert world.tried_apart(0, 1.1, reason="illegal address") == [Fail(0, "illegal address")]
    assert world.not_tried([1], 1.1) == []
    assert world.ready(TWO, 1.2) == [Start(2, 1, TWO, 0)]
    assert world.not_tried([1], 1.3) == []
    assert world.ended(2, TWO, 0.01, 1.4) == [Complete(1), Start(3, 2, TWO, 0)]
    world.ended(3, TWO, 0.01, 1.5)
    assert world.is_empty


def test_who_began_last_is_tried_first_and_before_them_who_has_faulted_before() -> None:
    world = scheduler(tries_apart=True)

    def tried(now: float, first: int, *names: str) -> TryApart:
        for number, name in enumerate(names):
            world.arrive(request(first + number, name), now + number / 100)
        *_, said = world.lost((ONE, TWO), now + 0.1, culprit="", reason="illegal address")
        assert isinstance(said, TryApart)
        return said

    assert tried(1.0, 0, "one", "two").suspects == ((1, TWO), (0, ONE))
    world.tried_apart(0, 1.2, reason="illegal address")
    world.not_tried([1], 1.2)
    world.ready(ONE, 1.3)
    world.ready(TWO, 1.3)
    world.ended(2, TWO, 0.01, 1.4)
    assert tried(2.0, 2, "one", "two").suspects == ((2, ONE), (3, TWO))


def test_who_cannot_be_tried_apart_runs_alone() -> None:
    world = with_two_suspects()
    world.ready(TWO, 1.0)
    world.ready(ONE, 1.1)
    world.arrive(request(2, "two"), 1.1)
    world.ended(2, TWO, 0.01, 1.15)
    start = world.tried_apart(0, 1.2, reason="no memory", is_fault=False)
    assert start == [Start(3, 0, ONE, 0)]
    assert world.arrive(request(3, "two"), 1.25) == []  # not beside it
    assert world.tried_apart(1, 1.3) == [Complete(1)]
    assert world.ended(3, ONE, 0.01, 1.4) == [Complete(0), Start(4, 3, TWO, 0)]
    world.ended(4, TWO, 0.01, 1.5)
    assert world.is_empty


def test_who_cannot_be_tried_apart_and_has_no_seat_left_is_refused() -> None:
    world = with_two_suspects()
    world.given_up(ONE, "no memory", 1.0)
    assert world.ready(TWO, 1.1) == []
    (refuse,) = world.tried_apart(0, 1.2, reason="no memory", is_fault=False)
    assert isinstance(refuse, Refuse)
    assert "one is down" in refuse.reason


def test_two_of_one_queue_that_ran_in_such_a_fault_run_one_after_the_other() -> None:
    members = [member("one")]
    policy = policy_of("regulated", {"lanes": 2})
    lanes = policy.lay_out(members)
    here, there = (Seat("one", lane.name) for lane in lanes)
    world = Scheduler(members, lanes, policy, {here: 1, there: 1}, Estimates())
    world.arrive(request(0, "one"), 0.0)
    world.arrive(request(1, "one"), 0.0)
    world.lost((here, there), 0.1, culprit="", reason="illegal address")
    (start,) = world.ready(there, 1.0)
    assert isinstance(start, Start)
    assert world.ready(here, 1.1) == []
    complete, start = world.ended(2, start.seat, 0.01, 1.2)
    assert isinstance(complete, Complete)
    assert isinstance(start, Start)
    assert world.ended(3, start.seat, 0.01, 1.3) == [Complete(start.request_id)]
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


def of_two_that_run() -> Scheduler:
    world = scheduler(limit_ms=100)
    world.arrive(request(0, "one"), 0.0)
    world.arrive(request(1, "two"), 0.01)
    return world


def test_of_two_that_exceed_their_time_the_one_that_began_first_is_evicted_alone() -> None:
    world = of_two_that_run()
    evict, *_ = out = world.tick(0.2)
    assert isinstance(evict, Evict)
    assert (evict.seat, len(out)) == (ONE, 3)
    assert world.ended(1, TWO, 0.5, 0.5) == [Complete(1)]  # it had waited for the device


def test_the_time_of_others_stops_while_a_seat_is_loaded_again() -> None:
    world = of_two_that_run()
    world.tick(0.1)
    assert world.tick(5.0) == []
    world.ready(ONE, 5.1)
    world.arrive(request(2, "one"), 5.1)
    assert world.next_tick() == pytest.approx(5.11)  # it had 90 ms before, of 100
    assert world.tick(5.1) == []
    assert isinstance(world.tick(5.12)[0], Evict)
    assert [fault.member for fault in world.faults] == ["one", "two"]


@pytest.mark.parametrize(("began_at", "due_at"), [(0.01, 30.11), (10.0, 30.2)])
def test_what_lets_nobody_be_loaded_again_is_evicted_in_the_end(
    began_at: float, due_at: float
) -> None:
    world = scheduler(limit_ms=100)
    world.arrive(request(0, "one"), 0.0)
    events = [lambda: world.tick(0.1), lambda: world.arrive(request(1, "two"), began_at)]
    for event in events if began_at > 0.1 else reversed(events):
        event()
    assert world.next_tick() == pytest.approx(due_at)
    assert world.tick(due_at - 0.001) == []
    assert isinstance(world.tick(due_at + 0.001)[0], Evict)


def test_a_seat_that_is_given_up_stops_no_time_any_more() -> None:
    world = of_two_that_run()
    world.tick(0.1)
    world.given_up(ONE, "it cannot be loaded", 1.1)
    assert world.next_tick() == pytest.approx(1.11)


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


def test_as_many_are_started_as_the_place_and_the_policy_take() -> None:
    world = scheduler(depth=3)
    started = [world.arrive(request(number, "one"), 0.0) for number in range(3)]
    assert started == [[Start(0, 0, ONE, 0)], [Start(1, 1, ONE, 0)], []]  # streams takes two
    assert world.ended(0, ONE, 0.01, 0.01) == [Complete(0), Start(2, 2, ONE, 0)]
    ordered = scheduler("ordered", depth=3)
    home = Seat("one", "one")
    assert ordered.arrive(request(0, "one"), 0.0) == [Start(0, 0, home, 0)]
    assert ordered.arrive(request(1, "one"), 0.0) == [Start(1, 1, Seat("one", "two"), 0)]
    assert ordered.arrive(request(2, "one"), 0.0) == [Start(2, 2, home, 0)]  # and none as a guest
    assert ordered.arrive(request(3, "one"), 0.0) == []


def test_nothing_is_started_behind_what_is_long_beside_an_objective() -> None:
    # A segment takes 10 ms; who comes to the other member is to wait for one of them at most.
    world = scheduler("ordered", depth=2, slo_ms=39)
    for number in range(2):
        world.arrive(request(number, "one"), 0.0)
    assert world.arrive(request(2, "one"), 0.0) == []
    world = scheduler("ordered", depth=2, slo_ms=41)
    for number in range(2):
        world.arrive(request(number, "one"), 0.0)
    assert world.arrive(request(2, "one"), 0.0) == [Start(2, 2, Seat("one", "one"), 0)]


def test_what_is_long_is_queued_in_a_share_whose_members_have_no_objective() -> None:
    members = [member("short", slo_ms=5), member("long")]
    policy = policy_of("ordered", {"borrow": False})
    lanes, home = policy.lay_out(members), Seat("long", "long")
    estimates, segments = Estimates(), {home: 1, Seat("short", "short"): 1}
    for seat in segments:
        estimates.observe(seat, 0, 0.02, now=0.0)
    world = Scheduler(members, lanes, policy, segments, estimates, depth=2)
    assert world.arrive(request(0, "long"), 0.0) == [Start(0, 0, home, 0)]
    assert world.arrive(request(1, "long"), 0.0) == [Start(1, 1, home, 0)]


def test_a_share_is_lent_to_whom_it_serves_sooner_than_their_own() -> None:
    """A long model takes 20 ms in its own share and `guest_secs` in that of the short one."""
    members = [member("short"), member("long")]
    policy = policy_of("ordered", {})
    lanes = policy.lay_out(members)
    for guest_secs, is_lent in ((0.03, True), (0.05, False)):
        estimates, segments = Estimates(), {}
        for name, lane, secs in (
            ("short", "short", 0.001), ("short", "long", 0.001),
            ("long", "long", 0.02), ("long", "short", guest_secs),
        ):  # fmt: skip
            segments[Seat(name, lane)] = 1
            estimates.observe(Seat(name, lane), 0, secs, now=0.0)
        world = Scheduler(members, lanes, policy, segments, estimates)
        home = Seat("long", "long")
        assert world.arrive(request(0, "long"), 0.0) == [Start(0, 0, home, 0)]
        lent = [Start(1, 1, Seat("long", "short"), 0)]
        assert world.arrive(request(1, "long"), 0.0) == (lent if is_lent else [])
        if not is_lent:
            assert world.ended(0, home, 0.02, 0.02) == [Complete(0), Start(1, 1, home, 0)]


def test_a_request_in_segments_has_its_seat_for_itself() -> None:
    members = [member("one")]
    lanes = policy_of("streams", {}).lay_out(members)
    world = Scheduler(members, lanes, policy_of("streams", {}), {ONE: 2}, Estimates(), depth=2)
    assert world.arrive(request(0, "one"), 0.0) == [Start(0, 0, ONE, 0)]
    assert world.arrive(request(1, "one"), 0.0) == []
    assert world.ended(0, ONE, 0.01, 0.01) == [Start(1, 0, ONE, 1)]
    assert world.ended(1, ONE, 0.01, 0.02) == [Complete(0), Start(2, 1, ONE, 0)]


def test_a_fault_fails_what_ran_and_not_what_was_started_behind_it() -> None:
    world = scheduler(depth=2)
    for number in range(3):
        world.arrive(request(number, "one"), 0.0)
    out = world.lost((ONE,), 1.0, culprit="one", reason="illegal address")
    assert out == [Fail(0, "illegal address"), Reload(ONE)]
    assert world.ready(ONE, 2.0) == [Start(2, 1, ONE, 0), Start(3, 2, ONE, 0)]
    assert world.faults[0].retried == 1


def test_the_time_of_what_was_started_behind_another_begins_when_that_ends() -> None:
    world = scheduler(depth=2, limit_ms=100)
    for number in range(2):
        world.arrive(request(number, "one"), 0.0)
    assert world.ended(0, ONE, 0.09, 0.09) == [Complete(0)]
    assert world.next_tick() == pytest.approx(0.19)
    assert world.tick(0.15) == []
    assert isinstance(world.tick(0.2)[0], Evict)


def test_what_goes_on_and_what_is_behind_it_in_its_queue_start_at_one_moment() -> None:
    world = scheduler("regulated", of_one=2, parameters={"lanes": 2})
    first, second = Seat("one", "whole-0"), Seat("one", "whole-1")
    assert world.arrive(request(0, "one"), 0.0) == [Start(0, 0, first, 0)]
    assert world.arrive(request(1, "two"), 0.0) == [Start(1, 1, Seat("two", "whole-1"), 0)]
    assert world.arrive(request(2, "one"), 0.0) == []
    out = world.turn(
        [
            lambda s, at: s.ended(0, first, 0.01, at),
            lambda s, at: s.ended(1, Seat("two", "whole-1"), 0.01, at),
        ],
        0.01,
    )
    assert out == [Complete(1), Start(2, 0, first, 1), Start(3, 2, second, 0)]


def test_requests_that_start_at_one_moment_do_so_in_the_order_of_their_arrival() -> None:
    world = scheduler("time", depth=2)
    names = ("one", "one", "two", "one")
    arrivals = [
        lambda s, at, n=n, name=name: s.arrive(request(n, name), at) for n, name in enumerate(names)
    ]
    one, two = Seat("one", "whole"), Seat("two", "whole")
    assert world.turn(arrivals, 0.0) == [Start(0, 0, one, 0), Start(1, 1, one, 0)]
    ends = [lambda s, at, n=n: s.ended(n, one, 0.01, at) for n in (0, 1)]
    out = world.turn(ends, 0.02)
    assert out == [Complete(0), Complete(1), Start(2, 2, two, 0), Start(3, 3, one, 0)]


def test_what_came_together_is_decided_about_together() -> None:
    world = scheduler("time", depth=1)
    world.arrive(request(0, "two"), 0.0)
    whole = Seat("two", "whole")
    out = world.turn(
        [
            lambda s, at: s.arrive(request(1, "one"), at),
            lambda s, at: s.ended(0, whole, 0.01, at),
            lambda s, at: s.arrive(request(2, "two"), at),
        ],
        1.0,
    )
    assert out == [Complete(0), Start(1, 1, Seat("one", "whole"), 0)]


def resharing() -> Scheduler:
    """Two members in lanes of their own, which may be others."""
    members = [member("one", share=50, shares=[80]), member("two", share=50, shares=[20])]
    policy = policy_of("space", {})
    first = policy.lay_out(members)
    second = [replace(lane, name=f"{lane.name}/1") for lane in first]
    seats = [Seat(m, lane.name) for lane in (*first, *second) for m in lane.members]
    segments = dict.fromkeys(seats, 1)
    return Scheduler(members, first, policy, segments, Estimates(), other_lanes=[second], depth=2)


def test_other_lanes_are_in_use_when_what_runs_has_ended_and_nothing_starts_before() -> None:
    world = resharing()
    for number in range(3):
        world.arrive(request(number, "one"), 0.0)
    assert world.reshare(1, 1.0) == []
    assert world.arrive(request(3, "two"), 1.001) == []
    assert not world.can_start(world.heads[-1], world.lanes["two"])
    assert world.ended(0, Seat("one", "one"), 0.1, 1.002) == [Complete(0)]
    assert world.ended(1, Seat("one", "one"), 0.1, 1.003) == [
        Complete(1),
        Reshared(1, pytest.approx(0.003)),  # type: ignore[arg-type]
        Start(2, 2, Seat("one", "one/1"), 0),
        Start(3, 3, Seat("two", "two/1"), 0),
    ]
    assert list(world.lanes) == ["one/1", "two/1"]


def test_other_lanes_are_in_use_at_once_where_nothing_runs_and_back_again() -> None:
    world = resharing()
    assert world.reshare(1, 1.0) == [Reshared(1, 0.0)]
    assert world.arrive(request(0, "two"), 2.0) == [Start(0, 0, Seat("two", "two/1"), 0)]
    assert world.reshare(0, 2.0) == []
    assert world.reshare(1, 2.5) == []  # what was asked for last counts, since the first
    assert world.ended(0, Seat("two", "two/1"), 0.1, 3.0) == [Complete(0), Reshared(1, 1.0)]


def test_a_fault_while_lanes_change_loses_no_request() -> None:
    world = resharing()
    world.arrive(request(0, "one"), 0.0)
    world.reshare(1, 1.0)
    out = world.lost((Seat("one", "one"),), 1.1, culprit="", reason="the context died")
    assert [type(each) for each in out] == [Reload, Reshared, Start]


def test_a_member_is_down_in_the_lanes_that_cannot_be_loaded_and_not_in_others() -> None:
    world = resharing()
    here, there = Seat("one", "one"), Seat("one", "one/1")
    world.lost((here, there), 1.0, culprit="one", reason="x")
    world.arrive(request(0, "one"), 1.0)
    (refused,) = world.given_up(here, "no memory", 2.0)
    assert isinstance(refused, Refuse)
    assert world.ready(there, 3.0) == []
    assert isinstance(world.arrive(request(1, "one"), 3.0)[0], Refuse)
    assert world.reshare(1, 4.0) == [Reshared(1, 0.0)]
    assert isinstance(world.arrive(request(2, "one"), 4.0)[0], Start)
