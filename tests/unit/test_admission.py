"""What `ordered` says of what arrives: the same, soon, as by a look at all that waits."""

import random
from collections.abc import Iterator

import pytest

from tunerd.colocation.estimates import Estimates
from tunerd.colocation.margin import Margin
from tunerd.colocation.policies import forecast, policy_of
from tunerd.colocation.policies.forecast import Outlook
from tunerd.colocation.policies.ordered import Ordered
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.work import Refuse, Request, Seat, Start, Waiting
from tunerd.testing.simulation import member

NAMES = ("one", "two", "three")
SECS = {"one": 0.0004, "two": 0.001, "three": 0.0007}


def scheduler(**parameters: object) -> Scheduler:
    members = [member(name, slo_ms=50) for name in NAMES]
    policy = policy_of("ordered", parameters)
    lanes = policy.lay_out(members)
    segments = {Seat(m, lane.name): 1 for lane in lanes for m in lane.members}
    estimates = Estimates()
    for seat in segments:
        estimates.observe(seat, 0, SECS[seat.member], now=0.0)
    return Scheduler(members, lanes, policy, segments, estimates, depth=1)


def admits(world: Scheduler, request: Request, now: float) -> bool:
    return not any(isinstance(out, Refuse) for out in world.arrive(request, now))


def by_all(world: Scheduler, request: Request, now: float) -> tuple[bool, bool]:
    """Say whether a request would be in time, and whether any would be late by it, of all."""
    policy = policy_of("ordered", {})
    assert isinstance(policy, Ordered)
    world.now = now
    seen, waits = policy._forecast(world), [*world.waiting]
    asked = Waiting(request)
    before, then = Outlook(seen, waits), Outlook(seen, [*waits, asked])
    pushed = [
        w
        for w in waits
        if before.ends[w.request.request_id] <= w.request.deadline_at
        and then.ends[w.request.request_id] > w.request.deadline_at
    ]
    return not then.late_secs(asked), bool(pushed)


def arrivals(
    count: int, *, within: tuple[float, ...], seed: int, names: tuple[str, ...] = NAMES
) -> Iterator[Request]:
    rng = random.Random(seed)
    for number in range(count):
        yield Request(number, rng.choice(names), "default", 0.0, rng.choice(within))


@pytest.mark.parametrize("seed", range(5))
def test_what_comes_last_in_turn_is_admitted_as_by_a_look_at_all(seed: int) -> None:
    world, found = scheduler(), []
    for request in arrivals(300, within=(0.03,), seed=seed, names=("one",)):
        in_time, pushes = by_all(world, request, 0.0)
        found.append((admits(world, request, 0.0), in_time and not pushes))
    assert set(found) == {(True, True), (False, False)}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_admitted_before_others_is_in_time_and_makes_nobody_late(seed: int) -> None:
    world, found = scheduler(), []
    for request in arrivals(400, within=(0.004, 0.012, 0.03), seed=seed):
        in_time, pushes = by_all(world, request, 0.0)
        found.append((admits(world, request, 0.0), in_time and not pushes))
    assert (True, False) not in found
    # A short look may refuse what a long one would not: seldom.
    assert found.count((True, True)) > 20
    assert found.count((False, True)) <= 0.1 * found.count((True, True))


def test_all_that_waits_is_foreseen_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    usual = Outlook.__init__

    def counted(self: Outlook, *arguments: object) -> None:
        made.append(self)
        usual(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(forecast.Outlook, "__init__", counted)
    world, now = scheduler(), 0.0
    for number in range(1000):  # ten times as many as can be served
        now += 0.00002
        request = Request(number, NAMES[number % 3], "default", now, now + 0.05)
        world.arrive(request, now)
    assert len(made) < 100


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_runs_once_more_comes_before_what_arrives(is_lost: bool) -> None:
    world, two = scheduler(borrow=False), Seat("two", "two")
    for number in range(6):  # of 1 ms each, of which one runs
        assert admits(world, Request(number, "two", "default", 0.0, 0.0068), 0.0)
    if is_lost:
        world.lost((two,), 0.0009, culprit="", reason="the runner ended")
    last = Request(6, "two", "default", 0.0009, 0.0073)
    assert admits(world, last, 0.0009) == (not is_lost)


def test_what_ends_later_than_the_device_says_is_promised_so_much_later() -> None:
    world = scheduler(borrow=False)
    now = 0.0
    for number in range(40):  # the device takes 1 ms, and the host has its lane for 2 ms
        (start,) = (x for x in world.arrive(Request(number, "two", "default", now), now))
        assert isinstance(start, Start)
        now += 0.002
        world.ended(start.start_id, start.seat, 0.001, now)
    assert admits(world, Request(50, "two", "default", now, now + 0.0021), now)
    assert not admits(world, Request(51, "two", "default", now, now + 0.0039), now)
    assert admits(world, Request(52, "two", "default", now, now + 0.0043), now)


def test_what_cannot_be_met_is_known_at_a_glance_while_many_wait() -> None:
    world, found = scheduler(), []
    for number in range(300):
        name, deadline_at = NAMES[number % 3], 0.02 + number * 1e-9
        hopeless = world.hopeless(name, deadline_at, 0.0)
        found.append(
            (bool(hopeless), admits(world, Request(number, name, "default", 0.0, deadline_at), 0.0))
        )
    assert (True, True) not in found
    assert found.count((True, False)) > 10 * found.count((False, False))
    assert not world.hopeless("one", 10.0, 0.0)  # it has time


def test_what_is_refused_at_a_glance_is_refused_no_longer_when_the_engine_has_time() -> None:
    world = scheduler()
    for number in range(300):
        world.arrive(Request(number, "one", "default", 0.0, 0.02), 0.0)
    assert world.hopeless("one", 0.0201, 0.0)
    assert not world.hopeless("one", 0.0201 + 0.02, 0.02)


def ends_late(world: Scheduler, number: int, now: float, late_secs: float) -> float:
    """Have a request run in an idle engine, and end after its deadline; return when."""
    request = Request(number, "two", "default", now, now + 0.04)
    (start,) = (x for x in world.arrive(request, now) if isinstance(x, Start))
    world.ended(start.start_id, start.seat, 0.001, now := request.deadline_at + late_secs)
    return now


def test_what_waits_is_to_end_as_much_earlier_as_others_were_late() -> None:
    found = []
    for late_secs in (0.0, 0.012):
        world = scheduler(borrow=False)
        now = ends_late(world, 0, 0.0, late_secs)
        asked = [Request(1 + nth, "two", "default", now, now + 0.04) for nth in range(100)]
        found.append(sum(admits(world, request, now) for request in asked))
    assert found == [38, 26]  # of 1 ms each, a twentieth of which is doubted


def test_who_comes_to_an_idle_engine_is_not_refused_because_others_were_late() -> None:
    world = scheduler(borrow=False)
    now = ends_late(world, 0, 0.0, 10.0)
    assert world.margin(now) == 0.5
    assert admits(world, Request(1, "two", "default", now, now + 0.0011), now)


def test_a_busy_share_in_which_it_would_take_less_is_nothing_that_it_waits_for() -> None:
    """Where others were late, it would be refused for the difference."""
    world = scheduler()
    now = ends_late(world, 0, 0.0, 10.0)
    for _ in range(40):
        world._estimates.observe(Seat("one", "one"), 0, 0.0004, had_secs=0.003, now=now)
    for number, name in enumerate(["two", "three"], 1):
        for _ in range(40):
            world._estimates.observe(Seat(name, name), 0, 0.1, now=now)
        (start,) = world.arrive(Request(number, name, "default", now, now + 1.0), now)
        assert isinstance(start, Start)
        assert start.seat.lane != "one"
    now += 0.001
    assert world.margin(now) == pytest.approx(0.5, abs=0.001)
    assert admits(world, Request(3, "one", "default", now, now + 0.005), now)


def test_that_others_were_late_is_forgotten_and_what_a_fault_delayed_teaches_nothing() -> None:
    world, two = scheduler(borrow=False), Seat("two", "two")
    now = ends_late(world, 0, 0.0, 0.01)
    assert world.margin(now) == pytest.approx(0.25)
    assert world.margin(now + 5.0) == pytest.approx(0.125)
    world = scheduler(borrow=False)
    world.arrive(Request(0, "two", "default", 0.0, 0.04), 0.0)
    world.lost((two,), 0.001, culprit="", reason="the runner ended")
    (start,) = (x for x in world.ready(two, 0.0385) if isinstance(x, Start))
    world.ended(start.start_id, two, 0.001, 0.05)
    assert world.margin(0.05) == 0.0


def test_who_left_a_margin_and_was_late_asks_for_more() -> None:
    margin, asked = Margin(), Request(0, "two", "default", 0.0, 0.1)
    margin.missed(Waiting(asked), 0.11)
    assert margin.part(0.11) == pytest.approx(0.1)
    margin.missed(Waiting(asked), 0.105)  # less than was needed already
    assert margin.part(0.11) == pytest.approx(0.1)
    margin.missed(Waiting(asked, margin=0.1), 0.105)
    assert margin.part(0.105) == pytest.approx(0.15)
    margin.missed(Waiting(asked, margin=0.3), 1.0)
    assert margin.part(1.0) == 0.5
