"""The coordinator: lists of events, lists of instructions."""

from __future__ import annotations

import random

import pytest

from tests.lib.coordinator_world import (
    CONV,
    DENSE,
    World,
    build,
    candidate,
    candidates,
    failed,
    measured,
    measuring,
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
from tunerd.vocabulary import Kind, Stage, TrainingRow, default_candidate


def test_the_heaviest_default_is_built_first() -> None:
    light, heavy, middle = task("light", flops=1e6), task("heavy", weight=9), task("middle")
    coordinator = Coordinator([light, heavy, middle], Limits(trials=8))
    (stored,) = coordinator.start([default_candidate(t) for t in (light, heavy, middle)])
    assert isinstance(stored, StoreProposed)
    (work,) = coordinator.handle(WorkerJoined("tuner-0", "tuner"))
    assert isinstance(work, BuildThem)
    assert work.candidates == tuple(default_candidate(t) for t in (heavy, middle, light))


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


def test_a_tuner_is_told_each_result_once() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    started(coordinator)
    told = []
    work = measuring(coordinator, CONV, is_exhausted=False)
    ended = tuple((b.candidate, measured(1e-4)) for b in work.builds)
    coordinator.handle(MeasurementsEnded("slice-0", ended))
    for _ in range(3):
        out = coordinator.handle(Proposed("tuner-0", CONV.task_id, (), False))
        told += [t.candidate for p in of_type(Propose, out) for t in p.results]
    assert sorted(c.candidate_id for c in told) == sorted(c.candidate_id for c, _ in ended)


def test_what_is_under_way_elsewhere_is_named_to_a_tuner() -> None:
    coordinator = Coordinator([CONV], Limits(trials=1000))
    started(coordinator)
    work = measuring(coordinator, CONV, is_exhausted=False)
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
    work = measuring(coordinator, CONV, 1)
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
