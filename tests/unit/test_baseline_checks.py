"""Baselines: when they run, what they may cost, and what their times say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.coordinator_world import (
    COLLATERAL,
    World,
    build,
    candidates,
    failed,
    measured,
    of_type,
    task,
)
from tunerd.coordinator.baseline_checks import COST, INTERVAL_SECS
from tunerd.coordinator.budget import Limits
from tunerd.coordinator.coordinator import Coordinator
from tunerd.coordinator.events import (
    BaselineChecked,
    BuildsEnded,
    BuildThem,
    CheckBaseline,
    Instruction,
    Measure,
    MeasurementsEnded,
    Propose,
    Proposed,
    StopRequested,
    StoreBaselineCheck,
    StoreEnded,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from tunerd.records import RunFacts, Store
from tunerd.report import html
from tunerd.report.drift_section import drift_json, drift_section, drift_warnings
from tunerd.report.view import View
from tunerd.stats.drift import BaselineCheck, SliceDrift, drift
from tunerd.vocabulary import Measurement, TargetSpec, default_candidate

LIGHT, HEAVY = task("light"), task("heavy", weight=8)


def running(*, slices: int = 1) -> Coordinator:
    """Return a search whose defaults were just measured: 1 ms each, so that HEAVY costs most."""
    coordinator = Coordinator([LIGHT, HEAVY], Limits(trials=1000))
    defaults = [default_candidate(t) for t in (LIGHT, HEAVY)]
    coordinator.start(defaults)
    coordinator.handle(WorkerJoined("tuner", "tuner"))
    coordinator.handle(BuildsEnded("tuner", tuple((c, build(c)) for c in defaults)))
    (first,) = of_type(Measure, coordinator.handle(WorkerJoined("slice-0", "slice")))
    ended = tuple((b.candidate, measured(1e-3)) for b in first.builds)
    coordinator.handle(MeasurementsEnded("slice-0", ended))
    for i in range(1, slices):
        coordinator.handle(WorkerJoined(f"slice-{i}", "slice"))
    return coordinator


def checks_at(coordinator: Coordinator, elapsed_secs: float) -> list[CheckBaseline]:
    return of_type(CheckBaseline, coordinator.handle(Tick(elapsed_secs)))


def checked(coordinator: Coordinator, worker_id: str, secs: float = 0.02) -> list[Instruction]:
    return coordinator.handle(BaselineChecked(worker_id, measured(1e-3), secs))


def test_the_baseline_is_the_default_of_the_costliest_task_in_every_slice() -> None:
    coordinator = running(slices=3)
    found = checks_at(coordinator, 100.0)
    assert {c.worker_id for c in found} == {"slice-0", "slice-1", "slice-2"}
    assert {c.build.candidate for c in found} == {default_candidate(HEAVY)}


def test_a_slice_is_checked_again_after_the_interval_and_not_before() -> None:
    coordinator = running()
    assert checks_at(coordinator, 100.0)
    (stored,) = of_type(StoreBaselineCheck, checked(coordinator, "slice-0"))
    assert stored.task_id == HEAVY.task_id
    assert not checks_at(coordinator, 100.0 + INTERVAL_SECS - 1)
    assert checks_at(coordinator, 100.0 + INTERVAL_SECS)


@pytest.mark.parametrize("check_secs", [0.01, 0.3, 2.0])
def test_checks_take_at_most_their_part_of_a_slice_s_time(check_secs: float) -> None:
    coordinator = running()
    spent = 0.0
    for second in range(1, 3000):
        if checks_at(coordinator, float(second)):
            checked(coordinator, "slice-0", check_secs)
            spent += check_secs
        # The first is sent before anybody knows what one costs.
        assert spent <= max(COST * second, check_secs)
    assert spent >= 0.5 * min(COST, check_secs / INTERVAL_SECS) * 3000


def test_a_check_waits_while_builds_do_and_not_for_ever() -> None:
    coordinator = running()
    found = candidates(HEAVY, range(64))
    coordinator.handle(Proposed("tuner", HEAVY.task_id, found, exhausted=False))
    coordinator.handle(Tick(50.0))
    checked(coordinator, "slice-0")

    def end_builds() -> None:
        work = coordinator.workers["tuner"].work
        assert isinstance(work, BuildThem)
        coordinator.handle(BuildsEnded("tuner", tuple((c, build(c)) for c in work.candidates)))

    def end_measuring(elapsed_secs: float) -> list[Instruction]:
        work = coordinator.workers["slice-0"].work
        assert isinstance(work, Measure)
        coordinator.handle(Tick(elapsed_secs))
        ended = tuple((b.candidate, measured(1e-3)) for b in work.builds)
        return coordinator.handle(MeasurementsEnded("slice-0", ended))

    end_builds()  # the slice measures them
    end_builds()  # and these wait
    out = end_measuring(50.0 + 1.2 * INTERVAL_SECS)
    assert of_type(Measure, out)
    assert not of_type(CheckBaseline, out)
    end_builds()
    assert of_type(CheckBaseline, end_measuring(50.0 + 2.1 * INTERVAL_SECS))


def test_checks_are_no_trials() -> None:
    coordinator = running()
    before = coordinator.ended_trials
    checks_at(coordinator, 100.0)
    out = checked(coordinator, "slice-0")
    assert not of_type(StoreEnded, out)
    assert coordinator.ended_trials == before


def test_a_baseline_that_fails_by_itself_is_run_no_more_and_a_neighbour_s_fault_is_forgiven() -> (
    None
):
    coordinator = running()
    checks_at(coordinator, 100.0)
    assert not of_type(
        StoreBaselineCheck, coordinator.handle(BaselineChecked("slice-0", COLLATERAL, 0.02))
    )
    assert checks_at(coordinator, 200.0)
    coordinator.handle(BaselineChecked("slice-0", failed(), 0.02))
    assert not checks_at(coordinator, 300.0)


def test_a_slice_lost_in_a_check_leaves_nothing_behind() -> None:
    coordinator = running()
    checks_at(coordinator, 100.0)
    out = coordinator.handle(WorkerLost("slice-0", "it was killed"))
    assert not of_type(StoreEnded, out)
    coordinator.handle(WorkerJoined("slice-0", "slice"))
    assert checks_at(coordinator, 200.0)


def test_nothing_is_checked_once_the_search_is_to_stop() -> None:
    coordinator = running()
    coordinator.handle(StopRequested("enough"))
    assert not checks_at(coordinator, 100.0)


def going_on() -> Coordinator:
    """Return a session that goes on: it has measured defaults and no build of them."""
    coordinator = Coordinator([LIGHT, HEAVY], Limits(trials=1000))
    defaults = [default_candidate(t) for t in (LIGHT, HEAVY)]
    coordinator.restore([(c, measured(1e-3)) for c in defaults], [])
    coordinator.start(defaults)
    coordinator.handle(WorkerJoined("slice-0", "slice"))
    coordinator.handle(WorkerJoined("tuner", "tuner"))
    coordinator.handle(Tick(20.0))
    return coordinator


def test_a_session_that_goes_on_builds_the_same_baseline_again() -> None:
    coordinator = going_on()
    out = coordinator.handle(Proposed("tuner", HEAVY.task_id, candidates(HEAVY, [1]), False))
    (wanted,) = of_type(BuildThem, out)
    baseline = default_candidate(HEAVY)
    assert wanted.candidates == (baseline,)
    out = coordinator.handle(BuildsEnded("tuner", ((baseline, build(baseline)),)))
    assert not of_type(Measure, out)  # it is no trial
    assert [c.build.candidate for c in checks_at(coordinator, 100.0)] == [baseline]


def test_a_baseline_whose_tuner_is_lost_is_built_by_another() -> None:
    coordinator = going_on()
    coordinator.handle(Proposed("tuner", HEAVY.task_id, candidates(HEAVY, [1]), False))
    coordinator.handle(WorkerLost("tuner", "it was killed"))
    (again,) = of_type(BuildThem, coordinator.handle(WorkerJoined("tuner-1", "tuner")))
    assert again.candidates == (default_candidate(HEAVY),)


def test_a_baseline_that_cannot_be_built_stops_nothing() -> None:
    coordinator = going_on()
    coordinator.handle(Proposed("tuner", HEAVY.task_id, candidates(HEAVY, [1]), False))
    out = coordinator.handle(BuildsEnded("tuner", ((default_candidate(HEAVY), failed()),)))
    assert not of_type(StoreEnded, out)
    assert of_type(BuildThem, out) or of_type(Propose, out)
    assert not checks_at(coordinator, 100.0)


def test_a_search_with_checks_and_losses_ends_with_every_trial_once() -> None:
    world = World(Coordinator([LIGHT, HEAVY], Limits(trials=60)), random.Random(7), fault_rate=0.1)
    world.take(world.coordinator.start([default_candidate(t) for t in (LIGHT, HEAVY)]))
    for i in range(3):
        world.join(f"slice-{i}", "slice")
        world.join(f"tuner-{i}", "tuner")
    for turn in range(20_000):
        if world.finished or not world.working:
            break
        world.take(world.coordinator.handle(Tick(2.0 * turn)))
        if world.working:
            world.step()
    assert world.finished
    assert of_type(StoreBaselineCheck, world.log)
    assert all(count == 1 for count in world.ends.values())


# --- what their times say ----------------------------------------------------------------------


def spots(*ratios: float, slice_id: str = "mps-0-0") -> Iterator[BaselineCheck]:
    for i, ratio in enumerate(ratios):
        result = Measurement((1e-3 * ratio,), 1, "baseline-v2", slice_id, 52)
        yield BaselineCheck(100.0 + 10 * i, 1, "t", 0.02, result)


def only(*ratios: float) -> SliceDrift:
    (found,) = drift(spots(*ratios))
    return found


def test_drift_is_the_ratio_to_the_first_check() -> None:
    found = only(1.0, 1.02, 1.04, 0.99)
    assert found.median_ratio == pytest.approx(1.02)
    assert (found.lowest, found.highest) == (pytest.approx(0.99), pytest.approx(1.04))
    assert found.ratios[-1][0] == pytest.approx(30.0)
    assert not found.warns


def test_a_slice_that_is_off_for_long_or_at_the_end_warns_and_one_slow_check_does_not() -> None:
    assert only(1.0, 1.07, 1.08, 1.09).warns
    assert only(1.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.2).warns
    assert only(1.0, 0.9, 0.9, 0.9).warns
    assert not only(1.0, 1.0, 1.4, 1.0, 1.0, 1.0, 1.0).warns
    assert not only(1.0).warns


def test_each_slice_is_told_with_its_warning() -> None:
    found = drift([*spots(1.0, 1.0, slice_id="b"), *spots(1.0, 1.3, slice_id="a")])
    assert [d.slice_id for d in found] == ["a", "b"]
    (warning,) = drift_warnings(found)
    assert warning.startswith("a drifted by more than 5.0%")
    assert "4 spot checks in 2 slices" in html.page(View("drift", [drift_section(found)]))
    assert [s["warns"] for s in drift_json(found)["slices"]] == [True, False]
    assert drift_section(()) is None


def test_baseline_checks_are_in_the_store_and_are_no_trials(tmp_path: Path) -> None:
    facts = RunFacts("n", "d" * 64, TargetSpec("llvm", "{}"), "CPU", "cpu", 50, "0.27.0")
    (spot,) = spots(1.0)
    with Store.create_or_open(tmp_path, facts=facts) as store:
        store.add_baseline_check("t", spot.measurement, 0.02, now=100.0)
        assert store.baseline_checks() == [spot]
        assert list(store.records()) == []
        with pytest.raises(ValueError, match="finite samples"):
            store.add_baseline_check("t", Measurement((), 1, "p", "s", 1), 0.02)
