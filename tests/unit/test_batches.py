"""Which task gets the next batch, when, and of how many candidates."""

from __future__ import annotations

import pytest

from tests.lib.coordinator_world import (
    CONV,
    DENSE,
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
    Measure,
    MeasurementsEnded,
    Propose,
    Proposed,
    WorkerJoined,
)
from tunerd.coordinator.source_state import SourceState
from tunerd.vocabulary import METASCHEDULE, Failure, Kind, Stage, default_candidate


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


@pytest.mark.parametrize(("batches", "may_lag"), [(0.5, 2.1), (1, 1.5), (2, 1.2)])
def test_a_source_may_lag_by_less_the_more_it_was_asked_for(batches: float, may_lag: float) -> None:
    source = SourceState("slow", best_secs=may_lag, batches=batches)
    assert source.gain(1.0) > 0
    source.best_secs = may_lag + 0.2
    assert source.gain(1.0) < 0
