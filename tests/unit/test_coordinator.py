"""The coordinator: lists of events, lists of instructions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.coordinator_world import (
    COLLATERAL,
    World,
    build,
    candidate,
    candidates,
    failed,
    measured,
    of_type,
    started,
    task,
)
from tunerd.candidates.base import BATCH
from tunerd.coordinator.budget import Limits
from tunerd.coordinator.coordinator import Coordinator
from tunerd.coordinator.events import (
    BuildsEnded,
    BuildThem,
    Finish,
    Hurry,
    Measure,
    MeasurementsEnded,
    Propose,
    Proposed,
    StopRequested,
    StoreBuilt,
    StoreEnded,
    StoreProposed,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from tunerd.coordinator.isolation import MAX_ATTEMPTS
from tunerd.vocabulary import METASCHEDULE, Failure, Kind, Stage, TrainingRow, default_candidate

CONV = task("conv", weight=4)
DENSE = task("dense", weight=1, flops=1e8)


def test_the_heaviest_default_is_built_first() -> None:
    light, heavy, middle = task("light", flops=1e6), task("heavy", weight=9), task("middle")
    coordinator = Coordinator([light, heavy, middle], Limits(trials=8))
    (stored,) = coordinator.start([default_candidate(t) for t in (light, heavy, middle)])
    assert isinstance(stored, StoreProposed)
    (work,) = coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    assert isinstance(work, BuildThem)
    assert work.candidates == tuple(default_candidate(t) for t in (heavy, middle, light))


def test_the_task_with_most_to_gain_gets_the_next_batch() -> None:
    coordinator = Coordinator([DENSE, CONV], Limits(trials=100))
    (work,) = of_type(Propose, started(coordinator))
    assert work.task == CONV


def test_a_search_of_few_trials_waits_until_each_default_says_what_there_is_to_gain() -> None:
    slow, quick = task("slow"), task("quick")
    coordinator = Coordinator([slow, quick], Limits(trials=BATCH))
    coordinator.start([default_candidate(t) for t in (slow, quick)])
    coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    coordinator.handle(WorkerJoined("slice-0", "slice"))
    defaults = [default_candidate(t) for t in (slow, quick)]
    built = tuple((c, build(c)) for c in defaults)
    assert not of_type(Propose, coordinator.handle(BuildsEnded("tuner-0", built)))
    both = coordinator.handle(
        MeasurementsEnded("slice-0", ((defaults[1], measured(1e-3)), (defaults[0], measured(1e-1))))
    )
    (work,) = of_type(Propose, both)
    assert work.task == slow


def test_a_search_of_many_trials_does_not_wait_for_the_defaults() -> None:
    first, second = task("first"), task("second")
    coordinator = Coordinator([first, second], Limits(trials=10 * BATCH))
    coordinator.start([default_candidate(t) for t in (first, second)])
    coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    built = tuple((c, build(c)) for c in map(default_candidate, (first, second)))
    assert of_type(Propose, coordinator.handle(BuildsEnded("tuner-0", built)))


def test_a_new_run_goes_on_with_the_heaviest_task_after_a_batch_of_each() -> None:
    heavy, light = task("heavy"), task("light")
    coordinator = Coordinator([light, heavy], Limits(trials=1000))
    coordinator.restore([], [])
    coordinator.start([default_candidate(t) for t in (light, heavy)])
    for state, secs in (
        (coordinator.tasks[t.task_id], s) for t, s in ((heavy, 1e-2), (light, 1e-5))
    ):
        state.end(default_candidate(state.task), measured(10 * secs))
        first = candidate(state.task, 1)
        state.opened(first)
        state.sources[METASCHEDULE].batches += 1
        state.end(first, measured(secs))
    states = coordinator.tasks.values()
    assert all(0 < s.gain_secs() < s.reference_secs for s in states)
    assert max(states, key=lambda s: s.gain_secs()).task == heavy


def test_a_task_whose_batches_bring_nothing_gives_way_to_the_others() -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(trials=1000))
    (work,) = of_type(Propose, started(coordinator))
    asked = []
    for number in range(12):
        asked.append(work.task.name)
        fresh = candidates(work.task, [number])
        (building,) = of_type(
            BuildThem,
            coordinator.handle(Proposed("tuner-0", work.task.task_id, fresh, False)),
        )
        after = coordinator.handle(BuildsEnded("tuner-0", ((fresh[0], build(fresh[0])),)))
        coordinator.handle(MeasurementsEnded("slice-0", ((fresh[0], measured(2e-3)),)))
        assert building.candidates == fresh
        (work,) = of_type(Propose, after)
    assert asked[0] == "conv"
    assert "dense" in asked


def test_a_tuner_is_taught_what_became_of_every_tasks_candidates() -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(trials=1000))
    first, other = of_type(Propose, started(coordinator, tuners=2))
    assert {first.task, other.task} == {CONV, DENSE}
    a, b = candidates(first.task, [0, 1])
    proposed = Proposed(first.worker_id, first.task.task_id, (a, b), False, "", (b"a", b"b"))
    (work,) = of_type(BuildThem, coordinator.handle(proposed))
    built = ((a, build(a)), (b, failed(Stage.BUILD, Kind.COMPILE)))
    coordinator.handle(BuildsEnded(work.worker_id, built))
    coordinator.handle(MeasurementsEnded("slice-0", ((a, measured(2e-3)),)))
    out = coordinator.handle(Proposed(other.worker_id, other.task.task_id, (), False))
    (asked,) = (p for p in of_type(Propose, out) if p.worker_id == other.worker_id)
    assert set(asked.rows) == {
        TrainingRow(first.task.task_id, a.candidate_id, b"a", 2e-3),
        TrainingRow(first.task.task_id, b.candidate_id, b"b", None),
    }
    out = coordinator.handle(Proposed(other.worker_id, asked.task.task_id, (), False))
    assert all(not p.rows for p in of_type(Propose, out))  # it knows them


def test_the_first_batch_of_a_task_is_proposed_by_one_tuner() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    assert len(of_type(Propose, started(coordinator, tuners=3))) == 1


def test_a_search_of_few_trials_reaches_every_task() -> None:
    tasks = [task(f"t{i}", weight=1 + i % 4) for i in range(12)]
    coordinator = Coordinator(tasks, Limits(trials=len(tasks) * BATCH // 2))
    out = started(coordinator)
    while not of_type(Finish, out):
        match coordinator.workers["tuner-0"].work:
            case Propose(task=of, count=count):
                first = coordinator.tasks[of.task_id].committed
                found = candidates(of, range(first, first + count))
                out = coordinator.handle(Proposed("tuner-0", of.task_id, found, False))
            case BuildThem(candidates=found):
                out = coordinator.handle(
                    BuildsEnded("tuner-0", tuple((c, build(c)) for c in found))
                )
        while isinstance(work := coordinator.workers["slice-0"].work, Measure):
            ended = tuple((b.candidate, measured(1e-4)) for b in work.builds)
            out += coordinator.handle(MeasurementsEnded("slice-0", ended))
    assert not coordinator.unsearched()
    assert {s.ended for s in coordinator.tasks.values()} == {BATCH // 2}


def test_the_first_batch_of_a_task_comes_in_two_halves() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    out, counts = started(coordinator, slices=0), []
    while len(counts) < 4:
        (asked,) = of_type(Propose, out)
        first = sum(counts)
        counts.append(asked.count)
        found = candidates(CONV, range(first, first + asked.count))
        out = coordinator.handle(Proposed("tuner-0", CONV.task_id, found, False))
        while isinstance(work := coordinator.workers["tuner-0"].work, BuildThem):
            ended = tuple((c, failed(Stage.BUILD, Kind.COMPILE)) for c in work.candidates)
            out = coordinator.handle(BuildsEnded("tuner-0", ended))
    assert counts == [BATCH // 2, BATCH // 2, BATCH, BATCH]


def test_a_later_session_begins_with_the_task_that_has_no_trials() -> None:
    known, fresh = task("known"), task("fresh")
    coordinator = Coordinator([known, fresh], Limits(trials=1000))
    ended = [(c, measured(1e-3)) for c in candidates(known, range(BATCH // 2))]
    ended += [(default_candidate(t), measured(1e-3)) for t in (known, fresh)]
    coordinator.restore(ended, [])
    (work,) = of_type(Propose, coordinator.handle(WorkerJoined("tuner-0", "tuner")))
    assert work.task == fresh


def test_a_third_batch_of_a_task_waits_for_what_the_first_two_taught() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    (first,) = of_type(Propose, started(coordinator, tuners=24))
    batch = candidates(CONV, range(BATCH))
    (second,) = of_type(
        Propose, coordinator.handle(Proposed(first.worker_id, CONV.task_id, batch, False))
    )
    more = candidates(CONV, range(BATCH, 2 * BATCH))
    out = coordinator.handle(Proposed(second.worker_id, CONV.task_id, more, False))
    assert of_type(Propose, out) == []
    ended = 0
    while not (third := of_type(Propose, out)):
        (work, *_) = (w.work for w in coordinator.workers.values() if isinstance(w.work, BuildThem))
        failed = tuple((c, Failure(Stage.BUILD, Kind.COMPILE, "no")) for c in work.candidates)
        out = coordinator.handle(BuildsEnded(work.worker_id, failed))
        ended += len(failed)
    assert 0 < ended <= BATCH
    assert len(third[0].results) == ended


@pytest.mark.parametrize("trials", [1, BATCH - 1, BATCH, 3 * BATCH + 5])
def test_no_more_trials_are_proposed_than_were_asked_for(trials: int) -> None:
    world = World(Coordinator([CONV, DENSE], Limits(trials=trials)), random.Random(1))
    world.take(world.coordinator.start([default_candidate(t) for t in (CONV, DENSE)]))
    for i in range(3):
        world.join(f"tuner-{i}", "tuner")
    world.join("slice-0", "slice")
    world.run()
    assert world.finished == f"{trials} trials were measured"
    assert not world.coordinator.is_cut_short
    assert world.coordinator.ended_trials == trials
    assert len(world.proposed) == trials + 2


def test_a_spent_budget_measures_what_is_built_and_stops() -> None:
    coordinator = Coordinator([CONV], Limits(budget_secs=10.0))
    started(coordinator)
    fresh = candidates(CONV, range(6))
    (building,) = of_type(
        BuildThem, coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, False))
    )
    assert coordinator.handle(Tick(9.9)) == []
    assert coordinator.handle(Tick(10.0)) == [Hurry("the budget of 10 s is spent")]
    assert coordinator.handle(Tick(10.1)) == []
    builds = tuple((c, build(c)) for c in building.candidates)
    out = coordinator.handle(BuildsEnded("tuner-0", builds))
    (work,) = of_type(Measure, out)
    assert not of_type(BuildThem, out)
    assert not of_type(Propose, out)
    ended = tuple((b.candidate, measured(1e-4)) for b in work.builds)
    out = coordinator.handle(MeasurementsEnded("slice-0", ended))
    assert out[-1] == Finish("the budget of 10 s is spent")
    assert coordinator.is_cut_short
    assert coordinator.ended_trials == len(building.candidates)


def test_a_stop_request_drains_and_names_its_reason() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator)
    assert coordinator.handle(StopRequested("Ctrl-C")) == [Hurry("Ctrl-C")]
    fresh = candidates(CONV, range(3))
    stored, finish = coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, False))
    assert stored == StoreProposed(fresh)
    assert finish == Finish("Ctrl-C")


def test_a_tuner_that_hangs_does_not_keep_a_stopped_run_and_nothing_is_blamed() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator)
    fresh = candidates(CONV, range(3))
    coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, False))
    assert coordinator.handle(StopRequested("Ctrl-C")) == [Hurry("Ctrl-C")]
    out = coordinator.handle(WorkerLost("tuner-0", "it has not ended build after 15 s"))
    assert all(not r.kind.ends_trial for _, r in of_type(StoreEnded, out)[0].results)
    assert out[-1] == Finish("Ctrl-C")
    assert coordinator.failed_trials == 0


def test_workers_of_a_lane_take_turns() -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(trials=100))
    coordinator.start([default_candidate(CONV), default_candidate(DENSE)])
    coordinator.handle(WorkerJoined("slice-0", "slice", "cores-0"))
    (building,) = coordinator.handle(WorkerJoined("tuner-0", "tuner", "cores-0"))
    assert isinstance(building, BuildThem)
    builds = tuple((c, build(c)) for c in building.candidates)
    out = coordinator.handle(BuildsEnded("tuner-0", builds))
    assert [type(i) for i in out[1:]] == [Measure]
    assert coordinator.workers["tuner-0"].work is None


def test_measuring_takes_precedence_over_building_in_a_lane() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator, slices=0, tuners=0)
    coordinator.handle(WorkerJoined("slice-0", "slice", "cores-0"))
    coordinator.handle(WorkerJoined("tuner-0", "tuner", "cores-0"))
    fresh = candidates(CONV, range(10))
    (building,) = of_type(
        BuildThem, coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, False))
    )
    builds = tuple((c, build(c)) for c in building.candidates)
    out = coordinator.handle(BuildsEnded("tuner-0", builds))
    assert [i.worker_id for i in of_type(Measure, out)] == ["slice-0"]
    assert not of_type(BuildThem, out)


def test_a_lane_does_not_hold_up_another_one() -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(trials=100))
    coordinator.start([default_candidate(CONV), default_candidate(DENSE)])
    coordinator.handle(WorkerJoined("tuner-0", "tuner", "cores-0"))
    out = coordinator.handle(WorkerJoined("tuner-1", "tuner", "cores-1"))
    assert [i.worker_id for i in of_type(BuildThem, out) + of_type(Propose, out)] == ["tuner-1"]


def measuring(coordinator: Coordinator, count: int = 3) -> Measure:
    """Propose, build and begin to measure `count` candidates of CONV."""
    fresh = candidates(CONV, range(count))
    coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, True))
    out = coordinator.handle(BuildsEnded("tuner-0", tuple((c, build(c)) for c in fresh)))
    (work,) = of_type(Measure, out)
    return work


def test_a_slice_is_told_the_best_that_another_one_has_measured() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator, slices=2)  # the default took 1 ms
    fresh = candidates(CONV, range(2))
    coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, True))
    out = coordinator.handle(BuildsEnded("tuner-0", tuple((c, build(c)) for c in fresh)))
    one, other = of_type(Measure, out)
    assert one.best_secs == other.best_secs == (1e-3,)
    found = ((other.builds[0].candidate, measured(0.5e-3)),)
    coordinator.handle(MeasurementsEnded(other.worker_id, found))
    for worker_id in (one.worker_id, other.worker_id):
        coordinator.handle(WorkerLost(worker_id, "it was killed"))
    coordinator.handle(WorkerJoined("slice-2", "slice"))
    again = one.builds[0].candidate
    out = coordinator.handle(BuildsEnded("tuner-0", ((again, build(again)),)))
    (work,) = of_type(Measure, out)
    assert (work.worker_id, work.best_secs) == ("slice-2", (0.5e-3,))


def test_trials_of_a_lost_slice_are_built_again_without_blame() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator)
    work = measuring(coordinator)
    out = coordinator.handle(WorkerLost("slice-0", "it was killed"))
    (stored,) = of_type(StoreEnded, out)
    assert [c for c, _ in stored.results] == [b.candidate for b in work.builds]
    kinds = {r.kind for _, r in stored.results if isinstance(r, Failure)}
    assert kinds == {Kind.COLLATERAL}
    assert coordinator.failed_trials == coordinator.ended_trials == 0
    (again,) = of_type(BuildThem, out)
    assert again.candidates[0] in [b.candidate for b in work.builds]


def test_what_was_lost_with_a_worker_is_tried_again_alone() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator)
    measuring(coordinator)
    out = coordinator.handle(WorkerLost("slice-0", "it was killed"))
    coordinator.handle(WorkerJoined("slice-0", "slice"))
    seen = []
    while building := of_type(BuildThem, out):
        (one,) = building[0].candidates
        out = coordinator.handle(BuildsEnded("tuner-0", ((one, build(one)),)))
        (work,) = of_type(Measure, out) or [coordinator.workers["slice-0"].work]
        assert isinstance(work, Measure)
        seen.append(len(work.builds))
        if not of_type(Measure, out):
            continue
    assert set(seen) == {1}


def test_what_was_under_way_at_a_fault_is_measured_again_alone_on_its_device() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator, slices=0)
    gpus = {"slice-0": "gpu-0", "slice-1": "gpu-0", "slice-2": "gpu-1"}
    for slice_id, gpu in gpus.items():
        coordinator.handle(WorkerJoined(slice_id, "slice", None, gpu))
    coordinator.handle(Proposed("tuner-0", CONV.task_id, candidates(CONV, range(12)), True))

    def works() -> dict[str, Measure]:
        """Build all that can be built; return what the slices work on."""
        while isinstance(building := coordinator.workers["tuner-0"].work, BuildThem):
            ended = tuple((c, build(c)) for c in building.candidates)
            coordinator.handle(BuildsEnded("tuner-0", ended))
        measuring = {s: coordinator.workers[s].work for s in gpus}
        return {s: w for s, w in measuring.items() if isinstance(w, Measure)}

    lost = set()
    for slice_id, work in list(works().items())[:2]:  # of one GPU, whose fault ends both
        first, *rest = (b.candidate for b in work.builds)
        lost.add(first)
        ended = ((first, COLLATERAL), *((c, measured(1e-3)) for c in rest))
        coordinator.handle(MeasurementsEnded(slice_id, ended))
    alone = []
    while here := {s: w for s, w in works().items() if gpus[s] == "gpu-0"}:
        assert "slice-2" in works()  # of another GPU: it goes on
        for slice_id, work in here.items():
            repeated = {b.candidate for b in work.builds} & lost
            assert work.is_alone == bool(repeated)
            if work.is_alone:
                assert (len(here), len(work.builds)) == (1, 1)
                alone += repeated
            results = tuple((b.candidate, measured(1e-3)) for b in work.builds)
            coordinator.handle(MeasurementsEnded(slice_id, results))
    assert set(alone) == lost
    assert len(alone) == 2


def test_neighbours_are_the_other_slices_at_work_on_the_same_device() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator, slices=0)
    devices = {"slice-0": "gpu-0", "slice-1": "gpu-1", "slice-2": "gpu-0", "slice-3": "gpu-0"}
    for slice_id, device in devices.items():
        faults_alone = slice_id == "slice-3"
        coordinator.handle(WorkerJoined(slice_id, "slice", None, device, faults_alone))
    coordinator.handle(Proposed("tuner-0", CONV.task_id, candidates(CONV, range(16)), True))
    out = []
    while isinstance(building := coordinator.workers["tuner-0"].work, BuildThem):
        ended = tuple((c, build(c)) for c in building.candidates)
        out += of_type(Measure, coordinator.handle(BuildsEnded("tuner-0", ended)))
    neighbours = {work.worker_id: work.neighbours for work in out}
    assert sorted(neighbours) == sorted(devices)
    of_gpu_0 = [n for slice_id, n in neighbours.items() if devices[slice_id] == "gpu-0"]
    assert sorted(of_gpu_0) == [0, 1, 2]  # one began after the other
    assert neighbours["slice-1"] == 0


def test_what_an_earlier_session_lost_at_a_fault_is_measured_alone_in_the_next() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    unfinished = candidates(CONV, range(6))
    lost = unfinished[4]
    coordinator.restore(
        [(default_candidate(CONV), measured(1e-3))], unfinished, {lost.candidate_id}
    )
    coordinator.start([default_candidate(CONV)])
    for slice_id in ("slice-0", "slice-1"):
        coordinator.handle(WorkerJoined(slice_id, "slice", None, "gpu-0"))
    coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    alone = []
    while isinstance(building := coordinator.workers["tuner-0"].work, BuildThem):
        ended = tuple((c, build(c)) for c in building.candidates)
        coordinator.handle(BuildsEnded("tuner-0", ended))
        for slice_id in ("slice-0", "slice-1"):
            while isinstance(work := coordinator.workers[slice_id].work, Measure):
                of = [b.candidate for b in work.builds]
                assert work.is_alone == (of == [lost])
                alone += of if work.is_alone else []
                results = tuple((c, measured(1e-3)) for c in of)
                coordinator.handle(MeasurementsEnded(slice_id, results))
    assert alone == [lost]


def test_a_trial_that_is_lost_too_often_ends_as_a_crash() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator)
    measuring(coordinator, 1)
    lone = candidate(CONV, 0)
    for _ in range(MAX_ATTEMPTS - 1):
        out = coordinator.handle(MeasurementsEnded("slice-0", ((lone, COLLATERAL),)))
        assert of_type(StoreEnded, out) == [StoreEnded(((lone, COLLATERAL),))]
        out = coordinator.handle(BuildsEnded("tuner-0", ((lone, build(lone)),)))
    out = coordinator.handle(MeasurementsEnded("slice-0", ((lone, COLLATERAL),)))
    (stored,) = of_type(StoreEnded, out)
    ((_, result),) = stored.results
    assert isinstance(result, Failure)
    assert result.kind is Kind.CRASH
    assert "lost 3 times, the last: a fault in a neighbour" in result.message
    assert out[-1] == Finish("every task's search space is exhausted")
    assert coordinator.failed_trials == 1


def test_builds_of_a_lost_tuner_go_to_another_one() -> None:
    coordinator = Coordinator([CONV], Limits(trials=3))
    started(coordinator)
    fresh = candidates(CONV, range(3))
    (lost,) = of_type(
        BuildThem, coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, False))
    )
    out = coordinator.handle(WorkerLost("tuner-0", "it was killed"))
    stages = {r.stage for _, r in out[0].results if isinstance(r, Failure)}  # type: ignore[union-attr]
    assert stages == {Stage.BUILD}
    (again,) = of_type(BuildThem, coordinator.handle(WorkerJoined("tuner-1", "tuner")))
    assert again.candidates[0] in lost.candidates


def test_a_replaced_tuner_is_told_all_results_again() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    started(coordinator)
    work = measuring_open(coordinator)
    ended = tuple((b.candidate, measured(1e-4)) for b in work.builds)
    coordinator.handle(MeasurementsEnded("slice-0", ended))
    coordinator.handle(WorkerLost("tuner-0", "it was killed"))
    (asked,) = of_type(Propose, coordinator.handle(WorkerJoined("tuner-0", "tuner")))
    assert [t.candidate for t in asked.results] == [c for c, _ in ended]


def measuring_open(coordinator: Coordinator) -> Measure:
    """As `measuring`, with more to be proposed afterwards."""
    fresh = candidates(CONV, range(3))
    coordinator.handle(Proposed("tuner-0", CONV.task_id, fresh, False))
    out = coordinator.handle(BuildsEnded("tuner-0", tuple((c, build(c)) for c in fresh)))
    (work,) = of_type(Measure, out)
    return work


def test_a_tuner_is_told_each_result_once() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    started(coordinator)
    told = []
    work = measuring_open(coordinator)
    ended = tuple((b.candidate, measured(1e-4)) for b in work.builds)
    coordinator.handle(MeasurementsEnded("slice-0", ended))
    for _ in range(3):
        out = coordinator.handle(Proposed("tuner-0", CONV.task_id, (), False))
        told += [t.candidate for p in of_type(Propose, out) for t in p.results]
    assert sorted(c.candidate_id for c in told) == sorted(c.candidate_id for c, _ in ended)


def test_what_is_under_way_elsewhere_is_named_to_a_tuner() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    started(coordinator)
    work = measuring_open(coordinator)
    running = coordinator.workers["tuner-0"].work
    assert isinstance(running, Propose)
    assert running.exclude == tuple(sorted(b.candidate.candidate_id for b in work.builds))


def test_an_exhausted_task_is_not_asked_again() -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(trials=1000))
    started(coordinator)
    out = coordinator.handle(Proposed("tuner-0", CONV.task_id, (), True, "no space"))
    for _ in range(3):
        (asked,) = of_type(Propose, out)
        assert asked.task == DENSE
        out = coordinator.handle(Proposed("tuner-0", DENSE.task_id, (), False))
    assert coordinator.unsearched() == {
        CONV.task_id: "no candidates: no space",
        DENSE.task_id: "not reached before the search ended",
    }


def test_a_run_ends_when_every_task_is_exhausted() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    started(coordinator)
    out = coordinator.handle(Proposed("tuner-0", CONV.task_id, (), True))
    assert out == [Finish("every task's search space is exhausted")]


def test_a_run_does_not_end_while_its_tuners_still_start() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    coordinator.restore([(default_candidate(CONV), measured(1e-3))], [])
    coordinator.start([default_candidate(CONV)])
    assert coordinator.handle(WorkerJoined("slice-0", "slice")) == []
    assert coordinator.handle(Tick(1.0)) == []
    assert of_type(Propose, coordinator.handle(WorkerJoined("tuner-0", "tuner")))


def test_a_task_that_ends_every_tuner_which_searches_it_is_left_alone() -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(trials=1000))
    started(coordinator, tuners=0)
    asked = []
    for number in range(MAX_ATTEMPTS + 1):
        tuner = f"tuner-{number}"
        (work,) = of_type(Propose, coordinator.handle(WorkerJoined(tuner, "tuner")))
        asked.append(work.task.name)
        if work.task == CONV:
            coordinator.handle(WorkerLost(tuner, "segmentation fault"))
    assert asked == ["conv"] * MAX_ATTEMPTS + ["dense"]
    assert "segmentation fault" in coordinator.tasks[CONV.task_id].message


def test_a_candidate_that_two_islands_propose_is_built_once() -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(trials=1000))
    started(coordinator, tuners=2)
    coordinator.handle(Proposed("tuner-0", CONV.task_id, (), False))
    shared = candidates(CONV, range(2))
    working = {w.worker_id: w.work for w in coordinator.workers.values()}
    out = []
    for worker_id, work in working.items():
        if isinstance(work, Propose):
            found = shared if work.task == CONV else ()
            out += coordinator.handle(Proposed(worker_id, work.task.task_id, found, False))
    for worker_id in ("tuner-0", "tuner-1"):
        work = coordinator.workers[worker_id].work
        if isinstance(work, Propose) and work.task == CONV:
            out += coordinator.handle(Proposed(worker_id, CONV.task_id, shared, False))
    stored = [c for i in of_type(StoreProposed, out) for c in i.candidates]
    building = [c for i in of_type(BuildThem, out) for c in i.candidates]
    assert stored == list(shared)
    assert sorted(building, key=lambda c: c.recipe) == list(shared)


def test_what_was_built_before_for_the_target_is_measured_without_a_build() -> None:
    lent = [default_candidate(CONV), candidate(CONV, 1)]
    known = {c.candidate_id: build(c) for c in lent}
    coordinator = Coordinator([CONV], Limits(trials=2), known=lambda c: known.get(c.candidate_id))
    out = coordinator.start([default_candidate(CONV)])
    assert out == [
        StoreProposed((default_candidate(CONV),)),
        StoreBuilt((known[default_candidate(CONV).candidate_id],)),
    ]
    (first,) = of_type(Measure, coordinator.handle(WorkerJoined("slice-0", "slice")))
    assert [b.candidate for b in first.builds] == [default_candidate(CONV)]
    coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    coordinator.handle(MeasurementsEnded("slice-0", ((default_candidate(CONV), measured(1e-3)),)))
    out = coordinator.handle(Proposed("tuner-0", CONV.task_id, candidates(CONV, [0, 1]), False))
    assert of_type(BuildThem, out) == [BuildThem("tuner-0", (candidate(CONV, 0),))]
    (second,) = of_type(Measure, out)
    assert [b.candidate for b in second.builds] == [candidate(CONV, 1)]


def test_a_failed_build_ends_its_trial() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1))
    started(coordinator)
    coordinator.handle(Proposed("tuner-0", CONV.task_id, candidates(CONV, [0]), False))
    problem = failed(Stage.BUILD, Kind.COMPILE)
    out = coordinator.handle(BuildsEnded("tuner-0", ((candidate(CONV, 0), problem),)))
    assert out == [
        StoreEnded(((candidate(CONV, 0), problem),)),
        Finish("1 trials were measured"),
    ]


def test_restored_trials_count_and_unfinished_ones_are_built_again() -> None:
    coordinator = Coordinator([CONV], Limits(trials=5))
    ended = [(candidate(CONV, n), measured(1e-4)) for n in range(2)]
    ended += [(candidate(CONV, 2), failed()), (default_candidate(CONV), measured(1e-3))]  # type: ignore[list-item]
    coordinator.restore(ended, [candidate(CONV, 3)])
    assert coordinator.start([default_candidate(CONV)]) == []
    assert (coordinator.ended_trials, coordinator.failed_trials) == (3, 1)
    coordinator.handle(WorkerJoined("slice-0", "slice"))
    (building,) = coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    assert building == BuildThem("tuner-0", (candidate(CONV, 3),))
    out = coordinator.handle(
        BuildsEnded("tuner-0", ((candidate(CONV, 3), build(candidate(CONV, 3))),))
    )
    (asked,) = of_type(Propose, out)
    assert asked.count == 1
    assert [t.candidate for t in asked.results] == list(candidates(CONV, range(3)))


def test_a_default_that_never_ended_is_proposed_once() -> None:
    coordinator = Coordinator([CONV], Limits(trials=5))
    coordinator.restore([], [default_candidate(CONV)])
    assert coordinator.start([default_candidate(CONV)]) == []
    (building,) = coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    assert building == BuildThem("tuner-0", (default_candidate(CONV),))


@pytest.mark.parametrize("most", [1, BATCH + 3, 2 * BATCH])
def test_no_task_gets_more_trials_than_it_may_have(most: int) -> None:
    world = World(Coordinator([CONV, DENSE], Limits(trials_per_task=most)), random.Random(2))
    world.take(started(world.coordinator, slices=2, tuners=3))
    world.run()
    assert world.finished == f"no task may have more than {most} trials"
    assert [s.ended for s in world.coordinator.tasks.values()] == [most, most]


def test_a_task_that_may_have_no_more_trials_leaves_the_rest_to_the_others() -> None:
    limits = Limits(trials=2 * BATCH + 4, trials_per_task=2 * BATCH)
    world = World(Coordinator([CONV, DENSE], limits), random.Random(3))
    world.take(started(world.coordinator, slices=2, tuners=3))
    world.run()
    ended = [s.ended for s in world.coordinator.tasks.values()]
    assert sum(ended) == 2 * BATCH + 4
    assert max(ended) <= 2 * BATCH


def test_trials_that_a_task_may_not_have_any_more_stay_unfinished() -> None:
    coordinator = Coordinator([CONV], Limits(trials_per_task=2))
    ended = [(c, measured(1e-3)) for c in candidates(CONV, range(2))]
    coordinator.restore(ended, candidates(CONV, range(2, 5)))
    coordinator.start([default_candidate(CONV)])
    world = World(coordinator, random.Random(4))
    world.join("slice-0", "slice")
    world.join("tuner-0", "tuner")
    world.run()
    assert coordinator.ended_trials == 2


def test_fewer_trials_than_in_an_earlier_session_leave_the_rest_unfinished() -> None:
    coordinator = Coordinator([CONV], Limits(trials=3))
    ended = [(candidate(CONV, n), measured(1e-4)) for n in range(2)]
    ended.append((default_candidate(CONV), measured(1e-3)))
    coordinator.restore(ended, list(candidates(CONV, range(2, 9))))
    world = World(coordinator, random.Random(0))
    world.take(coordinator.start([default_candidate(CONV)]))
    world.join("slice-0", "slice")
    world.join("tuner-0", "tuner")
    world.run()
    assert coordinator.ended_trials == 3


def test_ending_a_trial_twice_raises_with_its_history() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator)
    work = measuring(coordinator, 1)
    of = work.builds[0].candidate
    state = coordinator.tasks[CONV.task_id]
    state.end(of, measured(5e-4))
    with pytest.raises(ValueError, match=r"conv had ended: it was measured at 0\.0005 s; now"):
        coordinator.handle(MeasurementsEnded("slice-0", ((of, measured(1e-4)),)))


def test_a_restored_default_cannot_end_again() -> None:
    coordinator = Coordinator([CONV], Limits(trials=5))
    coordinator.restore([(default_candidate(CONV), failed())], [])
    coordinator.start([default_candidate(CONV)])
    with pytest.raises(ValueError, match=r"\(default\) of conv had ended: it failed"):
        coordinator.tasks[CONV.task_id].end(default_candidate(CONV), measured(1e-4))


def test_an_answer_to_nothing_names_what_the_worker_does() -> None:
    coordinator = Coordinator([CONV], Limits(trials=5))
    started(coordinator)
    with pytest.raises(ValueError, match="tuner-0 ended BuildThem, but works on Propose"):
        coordinator.handle(BuildsEnded("tuner-0", ()))


def test_without_limits_a_run_ends_when_little_gain_is_left() -> None:
    world = World(Coordinator([CONV], Limits()), random.Random(3), space=100_000)
    world.take(world.coordinator.start([default_candidate(CONV)]))
    world.join("slice-0", "slice")
    world.join("tuner-0", "tuner")
    world.run()
    assert "no task promises more" in world.finished
    assert set(world.ends) == {c.candidate_id for c in world.proposed}


def play(world: World, tuners: int, slices: int, lanes: bool, gpus: int, losses: list[int]) -> None:
    """Run a world to its end; workers are lost at these steps and replaced a step later."""
    coordinator = world.coordinator
    world.take(coordinator.start([default_candidate(s.task) for s in coordinator.tasks.values()]))

    def lane(i: int) -> str | None:
        return f"cores-{i}" if lanes else None

    for i in range(slices):
        gpu = f"gpu-{i % gpus}" if gpus and not lanes else None
        world.join(f"slice-{i}", "slice", lane(i), gpu)
    for i in range(tuners):
        world.join(f"tuner-{i}", "tuner", lane(i))
    for step in range(max(losses, default=-1) + 1):
        if world.finished or not world.working:
            break
        if step in losses:
            lost = world.rng.choice(sorted(coordinator.workers))
            before = coordinator.workers[lost]
            world.lose(lost)
            if world.working and not world.finished:
                world.step()
            if not world.finished:
                world.join(lost, before.role, before.lane, before.device)
        else:
            world.step()
    world.run()


worlds = st.fixed_dictionaries(
    {
        "tuners": st.integers(1, 4),
        "slices": st.integers(1, 4),
        "lanes": st.booleans(),
        "gpus": st.integers(0, 2),
        "losses": st.lists(st.integers(0, 60), max_size=8, unique=True),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    shape=worlds,
    trials=st.integers(1, 90),
    tasks=st.integers(1, 4),
    fault_rate=st.sampled_from([0.0, 0.2, 0.6]),
    seed=st.integers(0, 1000),
)
def test_any_run_ends_with_every_trial_ended_once(
    shape: dict[str, object], trials: int, tasks: int, fault_rate: float, seed: int
) -> None:
    all_tasks = [task(f"t{i}", weight=i + 1) for i in range(tasks)]
    coordinator = Coordinator(all_tasks, Limits(trials=trials))
    world = World(coordinator, random.Random(seed), space=120, fault_rate=fault_rate)
    play(world, **shape)  # type: ignore[arg-type]
    assert world.finished, "nobody works and the run has not ended"
    assert set(world.ends) == {c.candidate_id for c in world.proposed}
    assert set(world.ends.values()) == {1}
    if not any(
        s.sources[METASCHEDULE].lost_proposals >= MAX_ATTEMPTS for s in coordinator.tasks.values()
    ):
        assert coordinator.ended_trials == trials
    assert len(world.proposed) == coordinator.ended_trials + tasks


@settings(max_examples=50, deadline=None)
@given(shape=worlds, seed=st.integers(0, 1000), at=st.integers(0, 120))
def test_a_run_that_is_stopped_anywhere_ends_without_a_trial_ended_twice(
    shape: dict[str, object], seed: int, at: int
) -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(budget_secs=100.0))
    world = World(coordinator, random.Random(seed), fault_rate=0.1)
    handle, events = coordinator.handle, 0

    def counted(event: object) -> list[object]:
        nonlocal events
        events += 1
        out = handle(event)  # type: ignore[arg-type]
        return out + handle(Tick(101.0)) if events == at else out  # type: ignore[return-value]

    coordinator.handle = counted  # type: ignore[method-assign,assignment]
    play(world, **shape)  # type: ignore[arg-type]
    assert world.finished
    assert set(world.ends.values()) <= {1}
    assert set(world.ends) <= {c.candidate_id for c in world.proposed}


@settings(max_examples=30, deadline=None)
@given(shape=worlds, seed=st.integers(0, 1000))
def test_the_same_events_bring_the_same_instructions(shape: dict[str, object], seed: int) -> None:
    logs = []
    for _ in range(2):
        coordinator = Coordinator([CONV, DENSE], Limits(trials=50))
        world = World(coordinator, random.Random(seed), fault_rate=0.2)
        play(world, **shape)  # type: ignore[arg-type]
        logs.append(world.log)
    assert logs[0] == logs[1]
