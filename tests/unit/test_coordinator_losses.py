"""What is lost with a worker or at a fault: it is tried again, alone, and nobody is blamed."""

from __future__ import annotations

from tests.lib.coordinator_world import (
    COLLATERAL,
    CONV,
    DENSE,
    build,
    candidate,
    candidates,
    measured,
    measuring,
    of_type,
    started,
)
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
    StoreEnded,
    WorkerJoined,
    WorkerLost,
)
from tunerd.coordinator.isolation import MAX_ATTEMPTS
from tunerd.vocabulary import Failure, Kind, Stage, default_candidate


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


def test_trials_of_a_lost_slice_are_built_again_without_blame() -> None:
    coordinator = Coordinator([CONV], Limits(trials=100))
    started(coordinator)
    work = measuring(coordinator, CONV)
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
    measuring(coordinator, CONV)
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
    measuring(coordinator, CONV, 1)
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
    work = measuring(coordinator, CONV, is_exhausted=False)
    ended = tuple((b.candidate, measured(1e-4)) for b in work.builds)
    coordinator.handle(MeasurementsEnded("slice-0", ended))
    coordinator.handle(WorkerLost("tuner-0", "it was killed"))
    (asked,) = of_type(Propose, coordinator.handle(WorkerJoined("tuner-0", "tuner")))
    assert [t.candidate for t in asked.results] == [c for c, _ in ended]


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
