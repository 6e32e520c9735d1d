"""Placement: a contract over all policies, properties of the placer, laws of the simulation."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.placement import jobs as trace
from lab.placement import placement_trace, simulation
from lab.placement.simulation import Outcome, Simulation, Truth, Try
from tests.lib import ROOT
from tunerd.colocation.placement.placer import GRACE_SECS, MOST_PASSED, Placer
from tunerd.colocation.placement.policies import POLICIES, Policy
from tunerd.colocation.placement.policies.estimated import Estimated, estimate_from
from tunerd.colocation.placement.policies.exclusive import Exclusive
from tunerd.colocation.placement.policies.least_utilised import LeastUtilised
from tunerd.colocation.placement.policies.most_free_memory import MostFreeMemory
from tunerd.colocation.placement.policies.round_robin import RoundRobin
from tunerd.colocation.placement.values import (
    Device,
    Fail,
    Instruction,
    Job,
    Place,
    Reading,
    State,
    View,
)
from tunerd.colocation.planning.pairs import Pairs

KEPT = ROOT / "results" / "placement-trace"
ONE = Device("one", 80, 100)
THREE = tuple(Device(name, 80, 100) for name in ("one", "two", "three"))
MIXED = (ONE, Device("instance", 20, 28), Device("large", 140, 132))
POLICY = [*(policy() for policy in POLICIES.values()), Estimated(lambda of, beside: 1.1)]
every_policy = pytest.mark.parametrize("policy", POLICY, ids=lambda p: p.kind)


def job(name: str, memory: int = 10, units: float = 10) -> Job:
    return Job(name, memory, units)


def places(instructions: Sequence[Instruction]) -> list[tuple[str, str]]:
    return [(each.job, each.device) for each in instructions if isinstance(each, Place)]


def state(device: Device, *jobs: Job) -> State:
    return State(device, jobs, sum(j.memory_bytes for j in jobs), sum(j.units for j in jobs))


# --- policies ----------------------------------------------------------------------------------


@every_policy
@given(data=st.data())
def test_a_policy_chooses_what_can_take_the_job_and_leaves_nothing_empty(
    policy: Policy, data: st.DataObject
) -> None:
    neighbours = st.lists(st.builds(job, st.just("other"), units=st.floats(1, 90)), max_size=3)
    states = [state(device, *data.draw(neighbours)) for device in THREE]
    open_ones = data.draw(st.lists(st.sampled_from(states), min_size=1, unique_by=id))
    last = data.draw(st.sampled_from([None, "one", "two", "three"]))
    view = View(open_ones, [device.name for device in THREE], last)
    choice = policy.choose(job("new"), view)
    if choice is None:
        assert all(each.jobs for each in open_ones)
    else:
        assert choice.device in {each.device.name for each in open_ones}
    assert policy.choose(job("again"), view) == choice


def test_each_policy_has_a_name_and_a_line_of_its_own() -> None:
    assert all(policy.kind == name for name, policy in POLICIES.items())
    assert len({policy.about for policy in POLICIES.values()}) == len(POLICIES)


def test_exclusive_waits_for_an_empty_device() -> None:
    placer = Placer([ONE], Exclusive())
    assert places(placer.arrive(job("a"), 0)) == [("a", "one")]
    assert placer.arrive(job("b"), 1000) == ()
    assert places(placer.ended("a", 1001)) == [("b", "one")]


def test_round_robin_takes_turns() -> None:
    placer = Placer(THREE, RoundRobin(), grace_secs=0)
    got = [places(placer.arrive(job(str(nth)), nth))[0][1] for nth in range(5)]
    assert got == ["one", "two", "three", "one", "two"]


def test_least_utilised_goes_by_what_is_seen_once_the_grace_is_over() -> None:
    placer = Placer(THREE[:2], LeastUtilised())
    placer.arrive(job("a", units=60), 0)
    placer.arrive(job("b", units=50), 0)
    placer.tick(GRACE_SECS, {"a": Reading(10, 5), "b": Reading(10, 50)})
    assert places(placer.arrive(job("c"), GRACE_SECS)) == [("c", "one")]


def test_least_utilised_waits_where_all_are_busy() -> None:
    placer = Placer([ONE], LeastUtilised())
    placer.arrive(job("a", units=85), 0)
    assert placer.arrive(job("b"), 1000) == ()
    assert places(placer.ended("a", 1001)) == [("b", "one")]


def test_most_free_memory_counts_what_is_promised() -> None:
    placer = Placer(THREE[:2], MostFreeMemory(), grace_secs=0)
    placer.arrive(job("a", memory=60), 0)
    placer.arrive(job("b", memory=30), 1)
    assert places(placer.arrive(job("c"), 2)) == [("c", "two")]


def test_estimated_avoids_the_neighbour_that_costs_more() -> None:
    def slowdown(of: Job, beside: Job) -> float:
        return 1.6 if {of.name, beside.name} & {"loud"} else 1.1

    placer = Placer(THREE[:2], Estimated(slowdown), grace_secs=0)
    placer.arrive(job("loud"), 0)
    placer.arrive(job("quiet", memory=40), 1)
    assert places(placer.arrive(job("new"), 2)) == [("new", "two")]


def test_estimated_waits_where_sharing_does_not_pay() -> None:
    placer = Placer([ONE], Estimated(lambda of, beside: 2.5))
    placer.arrive(job("a"), 0)
    assert placer.arrive(job("b"), 1000) == ()
    assert places(placer.ended("a", 1001)) == [("b", "one")]


def test_estimated_goes_by_free_memory_where_it_would_have_to_extrapolate_and_says_so() -> None:
    pairs = trace.measured(0)
    placer = Placer(trace.DEVICES[:2], Estimated(estimate_from(pairs)), grace_secs=0)
    known, unseen = trace.of_kind("encoder").job, trace.of_kind(trace.UNSEEN).job
    placer.arrive(replace(known, name="a"), 0)
    placer.arrive(replace(known, name="b"), 1)
    (told,) = placer.arrive(replace(known, name="c", memory_bytes=1), 2)
    assert isinstance(told, Place)
    assert told.note == ""
    (told,) = placer.arrive(replace(unseen, name="d"), 3)
    assert isinstance(told, Place)
    assert told.device == "gpu-1"  # where c is not
    assert "outside of what was measured" in told.note


def test_without_features_or_measured_pairs_the_reason_is_said() -> None:
    estimate = estimate_from(Pairs([], "none"))
    assert estimate(job("a"), job("b")) == "a has no features"
    side = trace.of_kind("encoder").job
    assert estimate(side, side) == "no pair was measured, and none to learn from"


# --- the placer --------------------------------------------------------------------------------


@every_policy
def test_a_job_that_fits_nowhere_fails_when_it_comes(policy: Policy) -> None:
    (failed,) = Placer(MIXED, policy).arrive(job("huge", memory=141), 0)
    assert failed == Fail("huge", "it needs 141 bytes of 140")


@every_policy
def test_a_job_that_runs_out_of_memory_alone_fails_by_name(policy: Policy) -> None:
    placer = Placer(THREE, policy)
    placer.arrive(job("a"), 0)
    (failed,) = placer.out_of_memory("a", 30)
    assert isinstance(failed, Fail)
    assert failed.job == "a"
    assert "alone on one" in failed.reason
    assert placer.waiting == ()


@every_policy
def test_it_goes_to_a_larger_device_where_there_is_one(policy: Policy) -> None:
    placer = Placer([MIXED[0], MIXED[2]], policy)
    placer.arrive(job("first", memory=130, units=90), 0)
    ((name, device),) = places(placer.arrive(job("a"), 0))
    assert (name, device) == ("a", "one")
    assert placer.out_of_memory("a", 30) == ()  # the larger one has no room
    assert places(placer.ended("first", 40)) == [("a", "large")]


def test_each_further_try_has_half_of_the_neighbours_and_the_last_none() -> None:
    placer = Placer([ONE], RoundRobin(), grace_secs=0)
    for nth in range(4):
        placer.arrive(job(str(nth)), nth)
    assert placer.out_of_memory("3", 10) == ()  # it had three: one may be there
    assert placer.ended("0", 11) == ()
    assert places(placer.ended("1", 12)) == [("3", "one")]
    assert placer.arrive(job("late"), 13) == ()  # it would be a second one
    assert placer.out_of_memory("3", 14) == (Place("late", "one"),)
    assert placer.ended("2", 15) == ()
    assert places(placer.ended("late", 16)) == [("3", "one")]
    (failed,) = placer.out_of_memory("3", 17)
    assert isinstance(failed, Fail)


def test_after_a_placement_a_shared_device_gets_nothing_for_a_window_of_grace() -> None:
    placer = Placer([ONE], RoundRobin())
    placer.arrive(job("a"), 0)
    assert placer.look_at == math.inf
    assert placer.arrive(job("b"), 1) == ()
    assert placer.look_at == GRACE_SECS
    assert placer.tick(GRACE_SECS - 1) == ()
    assert places(placer.tick(GRACE_SECS)) == [("b", "one")]


def test_a_job_that_holds_more_than_was_said_has_that_promised() -> None:
    placer = Placer([ONE], RoundRobin())
    placer.arrive(job("a", memory=10), 0)
    placer.tick(GRACE_SECS, {"a": Reading(75, 10)})
    assert placer.arrive(job("b", memory=10), GRACE_SECS) == ()
    assert places(placer.ended("a", 100)) == [("b", "one")]


def test_a_large_job_is_passed_only_so_often_however_many_small_ones_come() -> None:
    placer = Placer([ONE], MostFreeMemory(), grace_secs=0)
    placer.arrive(job("first"), 0)
    assert placer.arrive(job("large", memory=80), 1) == ()
    running, started = ["first"], []
    for nth in range(50):
        told = [*placer.arrive(job(str(nth)), nth), *placer.ended(running.pop(0), nth)]
        started += [name for name, _ in places(told)]
        running += [name for name, _ in places(told)]
    assert started.index("large") == MOST_PASSED


def test_who_ran_out_of_memory_keeps_its_turn() -> None:
    placer = Placer([ONE], RoundRobin(), grace_secs=0)
    placer.arrive(job("a"), 0)
    placer.arrive(job("b"), 1)
    assert placer.arrive(job("c", memory=75), 2) == ()
    assert placer.out_of_memory("b", 3) == ()
    assert places(placer.ended("a", 4)) == [("b", "one")]


def test_it_may_have_half_of_the_neighbours_that_it_had_at_most() -> None:
    placer = Placer([ONE], RoundRobin(), grace_secs=0)
    for name in "abcd":
        placer.arrive(job(name), 0)
    for name in "bcd":
        placer.ended(name, 1)
    placer.arrive(job("e"), 2)
    assert places(placer.out_of_memory("a", 3)) == [("a", "one")]  # e alone is there


def test_what_it_was_seen_to_hold_is_what_it_needs_the_next_time() -> None:
    placer = Placer([ONE, MIXED[1]], RoundRobin(), grace_secs=0)
    for name, device in [("a", "one"), ("b", "instance"), ("c", "one")]:
        assert places(placer.arrive(job(name), 0)) == [(name, device)]
    placer.tick(1, {"c": Reading(60, 10)})
    assert placer.out_of_memory("c", 2) == ()
    assert placer.ended("b", 3) == ()  # an instance of 20 bytes is idle
    assert places(placer.ended("a", 4)) == [("c", "one")]


def test_what_was_seen_in_one_try_is_not_held_in_the_next() -> None:
    placer = Placer([ONE], RoundRobin(), grace_secs=0)
    placer.arrive(job("a"), 0)
    placer.arrive(job("b"), 0)
    placer.tick(1, {"b": Reading(90, 10)})
    placer.out_of_memory("b", 2)
    placer.ended("a", 3)
    assert placer.states(3)[0].free_bytes == 0


def test_names_are_unique_and_known() -> None:
    placer = Placer([ONE], RoundRobin())
    placer.arrive(job("a"), 0)
    with pytest.raises(ValueError, match="has come before"):
        placer.arrive(job("a"), 1)
    with pytest.raises(ValueError, match="no job of the name b runs"):
        placer.ended("b", 1)
    with pytest.raises(ValueError, match="each its own"):
        Placer([ONE, ONE], RoundRobin())


@dataclass
class World:
    """Carries out what a placer says, and checks what holds of every policy."""

    policy: Policy
    now: float = 0.0
    needs: dict[str, int] = field(default_factory=dict)  # as last known
    limits: dict[str, int] = field(default_factory=dict)  # of neighbours
    beside: dict[str, int] = field(default_factory=dict)
    on: dict[str, list[str]] = field(default_factory=dict)
    placed_at: dict[str, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    fresh: list[str] = field(default_factory=list)  # jobs of 10 bytes as they first start

    def __post_init__(self) -> None:
        self.placer = Placer(MIXED, self.policy)
        self.on = {device.name: [] for device in MIXED}

    @property
    def running(self) -> list[str]:
        return [name for names in self.on.values() for name in names]

    def follow(self, instructions: Sequence[Instruction]) -> None:
        for told in instructions:
            if isinstance(told, Fail):
                self.failed.add(told.job)
                continue
            assert told.job not in self.running
            names = self.on[told.device]
            if names:  # the window of grace
                assert all(self.now >= self.placed_at[name] + GRACE_SECS for name in names)
            names.append(told.job)
            size = next(device.memory_bytes for device in MIXED if device.name == told.device)
            assert sum(max(self.needs[name], self.seen.get(name, 0)) for name in names) <= size
            for name in names:
                self.beside[name] = max(self.beside.get(name, 0), len(names) - 1)
                assert self.beside[name] <= self.limits.get(name, 99)
            self.placed_at[told.job] = self.now
            if told.job not in self.limits and self.needs[told.job] == 10:
                self.fresh.append(told.job)

    def leave(self, name: str) -> None:
        next(names for names in self.on.values() if name in names).remove(name)
        self.seen.pop(name, None)

    def end(self, name: str) -> None:
        self.leave(name)
        self.ended.add(name)
        self.follow(self.placer.ended(name, self.now))

    def out_of_memory(self, name: str) -> None:
        self.leave(name)
        self.limits[name] = self.beside.pop(name) // 2
        self.follow(self.placer.out_of_memory(name, self.now))

    def tick(self, readings: dict[str, Reading]) -> None:
        self.seen |= {name: reading.memory_bytes for name, reading in readings.items()}
        self.follow(self.placer.tick(self.now, readings))


@every_policy
@settings(max_examples=60)
@given(data=st.data())
def test_memory_is_promised_once_and_nobody_waits_for_ever(
    policy: Policy, data: st.DataObject
) -> None:
    world = World(policy)
    count = 0
    for _ in range(data.draw(st.integers(1, 40))):
        world.now += data.draw(st.sampled_from([0.0, 1.0, 30.0, 61.0]))
        step = data.draw(st.sampled_from(["arrive", "arrive", "end", "out of memory", "tick"]))
        if step == "arrive":
            new = job(str(count), data.draw(st.sampled_from([10, 10, 25, 70, 130])), 30)
            world.needs[new.name] = new.memory_bytes
            count += 1
            world.follow(world.placer.arrive(new, world.now))
        elif step == "tick":
            held = st.integers(0, 90)
            world.tick({name: Reading(data.draw(held), 20) for name in world.running})
        elif world.running:
            name = data.draw(st.sampled_from(world.running))
            world.end(name) if step == "end" else world.out_of_memory(name)
    for _ in range(20 * count + 20):  # what runs ends, one after the other
        world.now += 61
        if world.running:
            world.end(world.running[0])
        world.tick({})
    assert world.placer.waiting == ()
    assert world.ended | world.failed == {str(nth) for nth in range(count)}
    assert not world.ended & world.failed
    assert world.fresh == sorted(world.fresh, key=int)  # order of arrival among equals


@every_policy
@given(data=st.data())
def test_who_runs_out_of_memory_again_and_again_fails_and_takes_nobody_along(
    policy: Policy, data: st.DataObject
) -> None:
    world = World(policy)
    names = [str(nth) for nth in range(8)]
    for name in names:
        world.needs[name] = 10
        world.follow(world.placer.arrive(job(name), world.now))
    greedy = data.draw(st.sampled_from(names))
    tries = 0
    while len(world.ended) + len(world.failed) < len(names):
        world.now += 61
        world.tick({})
        if greedy in world.running and data.draw(st.booleans()):
            world.out_of_memory(greedy)
            tries += 1
        elif [name for name in world.running if name != greedy]:
            world.end(next(name for name in world.running if name != greedy))
        elif greedy in world.running:
            world.out_of_memory(greedy)
            tries += 1
    assert world.failed == {greedy}
    assert tries <= 7  # halved down to none, then on each larger device


# --- the simulation ----------------------------------------------------------------------------


def simulated(kind: str, seed: int, **how: int) -> Outcome:
    return Simulation(trace.trace(seed, **how), trace.DEVICES, POLICIES[kind]()).outcome


def pieces(outcome: Outcome) -> Iterator[tuple[float, list[Try]]]:
    """Yield the lengths of times in which nothing changes, each with what runs then."""
    moments = sorted({0.0, *(at for each in outcome.tries for at in (each.start, each.end))})
    for since, until in itertools.pairwise(moments):
        yield until - since, [e for e in outcome.tries if e.start <= since and until <= e.end]


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_work_is_neither_lost_nor_made_and_the_energy_is_that_of_the_schedule(
    kind: str, seed: int
) -> None:
    outcome = simulated(kind, seed)
    done: Counter[int] = Counter()
    joules = busy = 0.0
    for secs, running in pieces(outcome):
        joules += secs * simulation.IDLE_WATTS * len(trace.DEVICES)
        joules += secs * simulation.HELD_WATTS * len({each.device for each in running})
        for each in running:
            beside = [e.truth for e in running if e.device == each.device and e is not each]
            pace = simulation.slowdown(each.truth, beside)
            done[id(each)] += secs / pace
            busy += secs * each.truth.compute / pace
    for each in outcome.ended:
        assert done[id(each)] == pytest.approx(each.truth.work_secs, abs=1e-3)
    assert busy == pytest.approx(outcome.busy_secs)
    assert joules + simulation.BUSY_WATTS * busy == pytest.approx(outcome.joules)
    assert 0 < outcome.utilisation < 1


@pytest.mark.parametrize("kind", POLICIES)
def test_every_job_of_a_trace_ends_once_or_fails_and_none_starts_before_it_comes(kind: str) -> None:
    outcome = simulated(kind, 3)
    ends = Counter(each.truth.job.name for each in outcome.ended)
    assert set(ends.values()) == {1}
    assert set(ends) | set(outcome.failed) == {truth.job.name for truth in outcome.trace}
    assert min(outcome.waits) >= 0
    assert outcome.makespan_secs == max(each.end for each in outcome.tries)


def test_exclusive_never_shares_and_so_never_runs_out_of_memory() -> None:
    outcome = simulated("exclusive", 1)
    for _, running in pieces(outcome):
        assert len({each.device for each in running}) == len(running)
    assert outcome.recovered == 0


def test_a_job_that_wants_more_than_a_device_has_fails_in_the_end() -> None:
    device = trace.DEVICES[0]
    kind = trace.of_kind("mobile")
    right = [replace(kind, job=replace(kind.job, name=str(n)), work_secs=900.0) for n in range(3)]
    wrong = replace(
        right[0], job=replace(kind.job, name="wrong"), arrives=90.0, shows_secs=5.0,
        memory_bytes=device.memory_bytes + 1,
    )  # fmt: skip
    outcome = Simulation([*right, wrong], [device], RoundRobin()).outcome
    assert set(outcome.failed) == {"wrong"}
    assert len(outcome.ended) == 3
    assert sum(each.is_out_of_memory for each in outcome.tries) >= 2


def test_alone_nothing_is_slower_and_a_neighbour_costs_something() -> None:
    kinds = [trace.of_kind(kind) for kind in trace.KINDS]
    assert {simulation.slowdown(kind, []) for kind in kinds} == {1.0}
    assert all(simulation.slowdown(kind, [other]) > 1 for kind in kinds for other in kinds)


def test_a_trace_and_its_schedule_are_those_of_the_seed() -> None:
    assert trace.trace(4) == trace.trace(4) != trace.trace(5)
    one, two = simulated("most-free-memory", 4), simulated("most-free-memory", 4)
    assert one == two
    assert len(one.trace) == trace.JOBS


def test_a_trace_has_bursts_and_long_jobs() -> None:
    jobs: list[Truth] = trace.trace(1, count=2000)
    gaps = [two.arrives - one.arrives for one, two in itertools.pairwise(jobs)]
    secs = sorted(truth.work_secs for truth in jobs)
    assert secs[len(secs) * 95 // 100] > 5 * secs[len(secs) // 2]
    assert sorted(gaps)[len(gaps) // 2] < 0.25 * sum(gaps) / len(gaps)
    said = [truth.memory_bytes > truth.job.memory_bytes for truth in jobs]
    assert 0.1 < sum(said) / len(said) < 0.2


# --- what was simulated ------------------------------------------------------------------------


@pytest.mark.parametrize("between", [900, 600])
def test_what_is_kept_is_what_the_seeds_give(between: int) -> None:
    kept = KEPT / f"between-{between}"
    traces = json.loads((kept / "placement-trace.json").read_bytes())["traces"]
    assert (kept / "placement-trace.txt").read_text() == placement_trace.shown(traces)
    assert placement_trace.shown(traces) in (KEPT / "README.md").read_text()
    jobs = trace.trace(1, between_secs=between)
    outcomes = {
        kind: Simulation(jobs, trace.DEVICES, POLICIES[kind]()).outcome
        for kind in traces
        if kind != "estimated"  # it learns, and what comes of that is XGBoost's
    }
    for kind, outcome in outcomes.items():
        again = placement_trace.figures(outcome, outcomes["exclusive"])
        assert again == pytest.approx(traces[kind][0], abs=2e-3)
