"""What the engine takes: what requests took beyond their model, their neighbours and waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.planning_world import DEVICE, point, world_of
from tunerd.colocation.load.generator import DONE, Observed, Sample
from tunerd.colocation.plan import Member, Plan, PolicyChoice
from tunerd.colocation.planning import engine_cost, queueing
from tunerd.colocation.planning.engine_cost import EngineCost, Served
from tunerd.colocation.planning.placement import Forecast, Lane, Placement, Subject
from tunerd.colocation.planning.world import World

RATES = {"one": 100.0, "two": 50.0}
SECS = {"one": {50: 0.001, 100: 0.0008}, "two": {50: 0.002, 100: 0.0016}}
SLO_MS = {"one": 20.0, "two": None}
MIDDLE, TAIL = 3e-4, 9e-4  # what an engine takes here


def plan_of(kind: str = "time") -> Plan:
    members = tuple(
        Member(name=n, artifact=Path(n), rate=rate, slo_ms=SLO_MS[n]) for n, rate in RATES.items()
    )
    return Plan(members=members, policy=PolicyChoice(kind=kind))


def models() -> list[Served]:
    return [
        Served(
            name,
            Path(name),
            f"of {name}",
            point(name, 100, SECS[name][100]),
            rate,
            SLO_MS[name],
        )
        for name, rate in RATES.items()
    ]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Have each request answered as `answers` says; return the plans that were served."""
    seen: list[Plan] = []

    def bench(plan: Plan, *_: Any) -> Any:
        seen.append(plan)
        samples = tuple(
            Sample(member.name, "default", at / 1000, at / 1000, at / 1000 + secs, DONE)
            for member in plan.members
            for at, secs in enumerate(answers(member.name, plan))
        )
        return SimpleNamespace(
            rounds=[SimpleNamespace(together=[Observed(samples, (0.0, 9.0))] * 3)]
        )

    monkeypatch.setattr(engine_cost, "bench", bench)
    return seen


def answers(name: str, plan: Plan) -> list[float]:
    """98 of 100 in the middle and two in the tail, by what the placement lets expect."""
    (expected,) = (e for e in forecast_of(plan.policy.kind).expected if e.member == name)
    middle, tail = expected.p50_secs + MIDDLE, expected.tail_secs + TAIL
    return ([middle] * 98 + [tail] * 2) * 3


def forecast_of(kind: str, costs: Mapping[str, EngineCost] | None = None) -> Forecast:
    subjects = [Subject(name, name, rate) for name, rate in RATES.items()]
    world = world_of(subjects, SECS)
    world = World(subjects, world.curves, world.pairs, busy=0.9, costs=costs or {})
    lanes = [Lane(100, ("one", "two"))] if kind == "time" else [Lane(50, (n,)) for n in RATES]
    return world.forecast(Placement("time" if kind == "time" else "space", tuple(lanes)))


def test_what_is_beyond_work_and_waiting_is_the_engines(served: list[Plan]) -> None:
    found = engine_cost.measure(models(), device=DEVICE, like=plan_of(), say=lambda _: None)
    (plan,) = served
    assert (plan.policy.kind, plan.load.kind) == ("time", "poisson")
    assert [member.slo_ms for member in plan.members] == [20_000, None]  # nobody is refused
    for name, rate in RATES.items():
        assert found[name].p50_secs == pytest.approx(MIDDLE)
        assert found[name].tail_secs == pytest.approx(TAIL)
        assert found[name].key == (f"of {name}", DEVICE, rate, 150.0, 0)


@pytest.mark.parametrize("known_secs", [None, 1e-4])
def test_a_rehearsal_finds_what_the_plan_itself_takes_whatever_was_known(
    served: list[Plan], known_secs: float | None
) -> None:
    costs = {
        name: EngineCost(f"of {name}", DEVICE, 1.0, known_secs, known_secs)
        for name in RATES
        if known_secs is not None
    }
    forecast = forecast_of("space", costs)
    found = engine_cost.rehearse(
        plan_of("space"), forecast, models(), device=DEVICE, say=lambda _: None
    )
    (plan,) = served
    assert plan.policy.kind == "space"
    assert [member.slo_ms for member in plan.members] == [20_000, None]  # nobody is refused
    for name, rate in RATES.items():
        assert found[name].p50_secs == pytest.approx(MIDDLE)
        assert found[name].tail_secs == pytest.approx(TAIL)
        assert found[name].key == (f"of {name}", DEVICE, rate, 150.0, 2)


def test_rates_are_lowered_where_the_engine_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(plan: Plan, *_: Any) -> Any:
        grows = 0.5 if sum(m.rate or 0.0 for m in plan.members) > 40 else 0.0
        samples = [
            Sample(m.name, "default", at, at, at + 0.01 + grows * at, DONE)
            for m in plan.members
            for at in (n / 100 for n in range(300))
        ]
        observed = Observed(tuple(samples), (0.0, 9.0))
        return SimpleNamespace(rounds=[SimpleNamespace(together=[observed] * 3)])

    monkeypatch.setattr(engine_cost, "bench", bench)
    found = engine_cost.measure(models(), device=DEVICE, like=plan_of(), say=lambda _: None)
    assert {name: cost.rate for name, cost in found.items()} == {"one": 25.0, "two": 12.5}
    assert found["one"].all_rate == 37.5
    assert found["one"].key in [
        engine_cost.key_of(each[0], each, DEVICE) for each in engine_cost.slower(models())
    ]


def test_a_pause_in_one_round_counts_for_nothing(
    served: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine_cost.bench

    def paused(plan: Plan, *_: Any) -> Any:
        (rounds,) = whole(plan, (), lambda _: None).rounds
        late = [replace(s, ended_at=s.ended_at + 1.0) for s in rounds.together[0].samples]
        first = Observed(tuple(late), (0.0, 9.0))
        return SimpleNamespace(rounds=[SimpleNamespace(together=[first, *rounds.together[1:]])])

    monkeypatch.setattr(engine_cost, "bench", paused)
    found = engine_cost.measure(models(), device=DEVICE, like=plan_of(), say=lambda _: None)
    assert found["one"].tail_secs == pytest.approx(TAIL)


def test_rates_are_lowered_where_the_device_were_too_busy() -> None:
    calm = models()
    assert engine_cost.at_most_busy(calm) == tuple(calm)
    busy = [Served(m.name, m.kernels, m.architecture, m.point, 50 * m.rate) for m in calm]
    lowered = engine_cost.at_most_busy(busy)
    assert queueing.utilisation([each.stream for each in lowered]) == pytest.approx(0.5)
    assert lowered[0].rate / lowered[1].rate == pytest.approx(2.0)


def test_costs_are_kept_with_what_they_were_measured_of(tmp_path: Path) -> None:
    path = tmp_path / engine_cost.COSTS
    first = EngineCost("a", DEVICE, 10.0, 1e-4, 2e-4, 20.0)
    rehearsed = EngineCost("a", DEVICE, 10.0, 3e-4, 4e-4, 20.0, lanes=2)
    for each in (first, rehearsed):
        engine_cost.append(path, each)
    assert [*engine_cost.read_costs(path)] == [first, rehearsed]
    assert first.key != rehearsed.key
    path.write_text(  # as it was before plans were rehearsed
        '{"architecture": "a", "device": "a device", "rate": 10.0, "p50_secs": 0.0001, '
        '"tail_secs": 0.0002, "all_rate": 20.0, "origin": null}\n'
    )
    assert [*engine_cost.read_costs(path)] == [first]
