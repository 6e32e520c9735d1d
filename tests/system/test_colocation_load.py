"""Loads: when requests come, and what is made of what came of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.colocation_plans import inputs, plan_of
from tests.lib.colocation_world import member
from tests.lib.fake_nvml import FakeNvml
from tests.lib.waiting import until
from tunerd.colocation import Engine
from tunerd.colocation.load.alone import against_alone
from tunerd.colocation.load.arrivals import BURST_PERIOD_SECS, BURST_SECS, arrivals_of, read_trace
from tunerd.colocation.load.energy import EnergyMeter
from tunerd.colocation.load.generator import Observed, Sample, run_load
from tunerd.colocation.load.outage import Moments, outage_of
from tunerd.colocation.load.resharing import changes_of
from tunerd.colocation.load.result import attained, late_secs, tenants_of
from tunerd.colocation.plan import LoadChoice
from tunerd.errors import InputError
from tunerd.system import gpus
from tunerd.vocabulary import Arrays

MEMBERS = (member("one", rate=100, tenants=["a", "b"], slo_ms=100), member("two", rate=50))


def load(kind: str, **said: object) -> LoadChoice:
    return LoadChoice.model_validate({"kind": kind, "duration": 100} | said)


# --- arrivals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["poisson", "bursts"])
def test_random_arrivals_have_the_rates_of_the_plan(kind: str) -> None:
    found = arrivals_of(MEMBERS, load(kind))
    assert found == sorted(found) == arrivals_of(MEMBERS, load(kind))
    assert found != arrivals_of(MEMBERS, load(kind, seed=1))
    for name, rate in (("one", 100), ("two", 50)):
        count = sum(a.member == name for a in found)
        assert count == pytest.approx(100 * rate, rel=0.05)
    tenants = [a.tenant for a in found if a.member == "one"]
    assert tenants.count("a") == pytest.approx(tenants.count("b"), rel=0.1)


def test_bursts_have_so_many_times_the_rate_between_them() -> None:
    found = arrivals_of(MEMBERS, load("bursts", burst_times=6))
    within = sum(a.at_secs % BURST_PERIOD_SECS < BURST_SECS for a in found)
    rates = within / BURST_SECS, (len(found) - within) / (BURST_PERIOD_SECS - BURST_SECS)
    assert rates[0] / rates[1] == pytest.approx(6, rel=0.1)


def test_poisson_gaps_are_exponential() -> None:
    moments = [a.at_secs for a in arrivals_of(MEMBERS[1:], load("poisson"))]
    gaps = np.diff(moments)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)


def test_a_member_without_a_rate_is_named() -> None:
    with pytest.raises(InputError, match="three has no `rate`, which a load of kind poisson"):
        arrivals_of([member("three")], load("poisson"))


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("secs,member,tenant\n0.5,two,\n0.25,one,b\n101,one,a\n")
    found = arrivals_of(MEMBERS, load("trace", trace=path))
    assert [(a.at_secs, a.member, a.tenant) for a in found] == [
        (0.25, "one", "b"),
        (0.5, "two", "default"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("member\none\n", "has no column secs"),
        ("", "has no column"),
        ("secs,member\nsoon,one\n", "line 2: 'soon' is no number of seconds"),
        ("secs,member\n-1,one\n", "line 2: '-1' is no number"),
        ("secs,member\n1,three\n", "line 2: there is no member 'three'"),
        ("secs,member,tenant\n1,one,c\n", "line 2: one has no tenant 'c'"),
    ],
)
def test_a_mistake_in_a_trace_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_trace(path, MEMBERS)


# --- results -----------------------------------------------------------------------------------


def sample(meant_at: float, secs: float, end: str = "done", tenant: str = "a") -> Sample:
    return Sample("one", tenant, meant_at, meant_at + 0.01, meant_at + secs, end)


def test_attainment_counts_what_was_refused_and_of_admitted_does_not() -> None:
    samples = (
        *(sample(i / 10, 0.05) for i in range(10, 16)),  # within the SLO of 100 ms
        sample(2.0, 0.2),  # answered late
        sample(2.1, 0.0, "refused"),
        sample(2.2, 0.1, "dropped"),
        sample(2.3, 0.1, "failed"),
        sample(0.5, 0.05),  # before the window
        sample(9.5, 0.05),  # behind it
    )
    observed = Observed(samples, (1.0, 9.0))
    tenants = tenants_of([observed], MEMBERS)
    one = tenants[0]
    assert (one.asked, one.done, one.refused, one.dropped, one.failed) == (10, 7, 1, 1, 1)
    assert one.attainment == pytest.approx(0.6)
    assert one.of_admitted == pytest.approx(6 / 9)
    assert one.per_sec == pytest.approx(7 / 8)
    assert attained(tenants) == (pytest.approx(0.6), pytest.approx(6 / 9))
    assert tenants[1].attainment is None  # nobody asked
    assert tenants[2].slo_secs is None
    assert late_secs([observed]) == pytest.approx(0.01)


def test_a_request_is_lost_by_a_change_unless_its_deadline_refused_it() -> None:
    one = tuple(sample(0.1, 0.1, end) for end in ("done", "refused", "dropped", "failed"))
    two = tuple(replace(each, member="two") for each in one)  # has no SLO
    found = changes_of(
        [0.3, 0.1, 0.2], [Observed(one, (0.5, 1.0)), Observed(two, (0.5, 1.0))], MEMBERS
    )
    assert (found.asked, found.lost) == (8, 1 + 3)
    assert (found.median_secs, found.longest_secs) == (0.2, 0.3)
    none = changes_of([], [], MEMBERS)
    assert (none.median_secs, none.longest_secs) == (None, None)


def test_all_serve_again_when_each_has_answered_what_was_sent_since() -> None:
    def answered(name: str, sent_at: float, ended_at: float, end: str = "done") -> Sample:
        return Sample(name, "a", sent_at, sent_at, ended_at, end)

    killed = (
        answered("one", 0.9, 3.0),  # in flight, and tried again
        answered("one", 3.0, 3.2),
        answered("one", 3.2, 3.4),
        answered("two", 1.1, 1.2, "failed"),
        answered("two", 1.3, 1.4),
    )
    rounds = [Observed(samples, (0.0, 4.0)) for samples in (killed, killed[:1], killed)]
    at = Moments(1.0, 1.0)
    found = outage_of("one", "killed", rounds, [at, at, None], MEMBERS)
    first, second = found.rounds
    assert (first.out_secs, first.served_again_secs) == (pytest.approx(2.2), pytest.approx(2.2))
    assert (second.out_secs, second.served_again_secs) == (None, None)
    assert (found.missed, found.lost, found.lost_own) == (1, 1, 0)
    late = outage_of("one", "faulted", rounds[:1], [Moments(1.0, 3.1)], MEMBERS[:1])
    assert late.rounds[0].out_secs == pytest.approx(2.4)  # who sent before may have been in time
    assert late.neighbours == ()


def test_a_neighbour_has_a_rate_and_a_tail_before_during_and_after_an_outage() -> None:
    def two(meant_at: float, secs: float) -> Sample:
        return replace(sample(meant_at, secs), member="two")

    samples = (
        *(two(i / 1000, 0.01) for i in range(1000)),
        *(two(1 + i / 10, 3.0 - i / 10) for i in range(10)),  # answered when the outage is over
        *(two(4.02 + i / 10, 0.02) for i in range(40)),
        sample(3.92, 0.1),
    )
    found = outage_of("one", "faulted", [Observed(samples, (0.0, 9.0))], [Moments(1, 1)], MEMBERS)
    assert found.rounds[0].served_again_secs == pytest.approx(3.02)
    (other,) = found.neighbours
    assert other.member == "two"
    assert [each.secs for each in (other.before, other.during, other.after)] == [
        1.0,
        pytest.approx(3.02),
        pytest.approx(4.98),
    ]
    assert other.before.per_sec == pytest.approx(990, abs=2)
    assert other.during.per_sec == pytest.approx((10 + 10) / 3.02)
    assert other.before.p99_secs == pytest.approx(0.01)
    assert other.during.p99_secs is None
    assert other.during.longest_secs == pytest.approx(3.0)
    assert other.after.longest_secs == pytest.approx(0.02)
    early = outage_of("one", "killed", [Observed(samples, (2.0, 9.0))], [Moments(1, 1)], MEMBERS)
    assert early.neighbours[0].before.secs == 0.0
    assert early.neighbours[0].before.per_sec is None


def test_percentiles_need_samples_and_count_from_the_moment_that_was_meant() -> None:
    samples = tuple(sample(1 + i / 1000, 0.001 * (i + 1)) for i in range(100))
    (one, *_) = tenants_of([Observed(samples, (0.0, 2.0))], MEMBERS)
    assert one.p50_secs == pytest.approx(0.0505)
    assert one.p95_secs is not None
    assert one.p99_secs is None


def rounds_of(secs: list[float], count: int) -> list[Observed]:
    return [
        Observed(tuple(sample(i / count, each) for i in range(count)), (0.0, 1.0)) for each in secs
    ]


def test_what_a_member_loses_beside_others_is_a_ratio_of_rounds_in_turns() -> None:
    found = against_alone("one", rounds_of([0.11, 0.22], 500), rounds_of([0.1, 0.2], 1000))
    assert found.p99 is not None
    assert found.p50 is not None
    assert found.per_sec is not None
    assert found.p99.value == found.p99.low == found.p99.high == pytest.approx(1.1)
    assert found.per_sec.value == pytest.approx(0.5)
    lane = against_alone("left", rounds_of([0.11], 500), rounds_of([0.1], 500), members=["one"])
    assert lane.p50 is not None
    assert (lane.member, lane.p50.value) == ("left", pytest.approx(1.1))
    few = against_alone("one", rounds_of([0.1], 20), rounds_of([0.1], 20))
    assert few.p50 is not None
    assert few.p99 is None
    none = [*rounds_of([0.1], 500), *rounds_of([0.1], 0)]
    found = against_alone("one", none, rounds_of([0.1, 0.1], 500))
    assert (found.p50, found.p99, found.per_sec) == (None, None, None)


def test_joules_are_the_difference_of_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(FakeNvml):
        counter = 5000

        def nvmlDeviceGetTotalEnergyConsumption(self, _: str) -> int:
            self.counter += 2500
            return self.counter

    gpus._handle.cache_clear()
    monkeypatch.setattr(gpus, "nvml_library", lambda: (Counting(), ""))
    nvml = Counting()
    monkeypatch.setattr(gpus, "nvml_library", lambda: (nvml, ""))
    meter = EnergyMeter("GPU-1")
    assert meter.joules is None
    meter.start()
    meter.stop()
    assert meter.joules == 2.5
    meter.start()
    meter.stop()
    assert meter.joules == 5.0
    gpus._handle.cache_clear()
    assert EnergyMeter(None).joules is None


# --- against an engine -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


@pytest.mark.parametrize("kind", ["closed", "poisson", "bursts", "trace"])
def test_every_request_of_a_load_is_accounted_for(kind: str, root: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("secs,member\n" + "".join(f"{i / 50},one\n{i / 50},two\n" for i in range(50)))
    said = {"kind": kind, "duration": 1} | ({"trace": trace} if kind == "trace" else {})
    names = {"one": {"rate": 50, "tenants": ["a", "b"]}, "two": {"rate": 50}}
    with Engine(plan_of(root, names, kind="streams", load=said)) as engine:
        observed = run_load(engine, engine.plan.load, {name: inputs() for name in names})
        completed = sum(m.completed for m in engine.stats().members.values())
    assert completed == len(observed.samples) > 0
    assert {s.end for s in observed.samples} == {"done"}
    assert all(s.meant_at <= s.sent_at <= s.ended_at for s in observed.samples)
    if kind != "closed":
        assert len(observed.samples) == len(arrivals_of(engine.plan.members, engine.plan.load))
    assert 0 < len(observed.counted) < len(observed.samples)


def test_a_member_with_clients_is_always_busy_beside_an_open_load(root: Path) -> None:
    names = {"open": {"rate": 20}, "busy": {"clients": 2}}
    load = {"kind": "poisson", "duration": 1}
    with Engine(plan_of(root, names, kind="streams", load=load)) as engine:
        given = {name: inputs() for name in names}
        both = run_load(engine, engine.plan.load, given)
        alone = run_load(engine, engine.plan.load, given, members=engine.plan.members[:1])
    assert any(s.member == "open" for s in both.samples)
    busy = [s for s in both.samples if s.member == "busy"]
    answered = sum(s.ended_at < engine.plan.load.duration for s in busy)
    assert len(busy) == pytest.approx(answered + 2, abs=2)  # who ends as the load does
    assert {s.member for s in alone.samples} == {"open"}


@pytest.mark.parametrize("who", ["open", "busy"])
def test_a_load_that_is_interrupted_ends_at_once_and_leaves_no_thread(
    who: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"open": {"rate": 20}, "busy": {"clients": 2}}
    load = {"kind": "poisson", "duration": 3600}
    with Engine(plan_of(root, names, kind="streams", load=load)) as engine:
        submit = engine.submit
        sent: list[str] = []

        def interrupted(model: str, *given: Any, **said: Any) -> Future[Arrays]:
            sent.append(model)
            if model == who and sent.count(who) > 3:
                raise KeyboardInterrupt
            return submit(model, *given, **said)

        monkeypatch.setattr(engine, "submit", interrupted)
        before = set(threading.enumerate())
        with pytest.raises(KeyboardInterrupt):
            run_load(engine, engine.plan.load, {name: inputs() for name in names})
        until(lambda: set(threading.enumerate()) <= before)
