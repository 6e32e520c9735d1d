"""What the coordinator keeps instead of looking at everything: the same answers, in less memory."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.coordinator_world import build, candidate, candidates, measured, task
from tunerd.candidates.base import BATCH
from tunerd.coordinator.build_queue import BuildQueue
from tunerd.coordinator.events import BuildThem, Measure, Proposed
from tunerd.coordinator.results import KnownIds, Results
from tunerd.coordinator.task_scheduler import Ranking, TaskScheduler
from tunerd.coordinator.task_state import TaskState
from tunerd.coordinator.training_rows import TrainingRows
from tunerd.coordinator.worker_pool import Worker, WorkerPool
from tunerd.vocabulary import METASCHEDULE, Result, default_candidate

CONV = task("conv")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 5).map(float)), max_size=200
    )
)
def test_the_highest_of_a_ranking_is_that_of_its_values(
    changes: list[tuple[str, float | None]],
) -> None:
    ranking = Ranking()
    for key, value in changes:
        ranking.put(key, value)
        highest = ranking.highest()
        if highest is None:
            assert not ranking.values
        else:
            assert ranking.values[highest] == max(ranking.values.values())


def test_a_ranking_keeps_nothing_of_what_has_changed() -> None:
    ranking = Ranking()
    for number in range(10_000):
        ranking.put("a", float(number % 7))
        ranking.put("b", float(number % 5))
    assert len(ranking._heap) < 100


@given(
    st.lists(st.integers(1, 700), max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_examples_are_told_once_each_and_the_newest_only(
    batches: list[int], asking: list[int]
) -> None:
    examples = TrainingRows()
    told: dict[int, list[str]] = {n: [] for n in range(4)}
    numbers = dict.fromkeys(told, 0)
    ended: list[str] = []
    for size, who in zip(batches, asking, strict=False):
        fresh = candidates(CONV, range(len(ended), len(ended) + size))
        features = tuple(c.candidate_id.encode() for c in fresh)
        examples.opened(fresh, Proposed("tuner", CONV.task_id, fresh, False, "", features))
        for of in fresh:
            examples.ended(of, measured(1e-3))
            examples.ended(of, measured(1e-3))  # its second end is of another's proposal
        ended += [c.candidate_id for c in fresh]
        new = [e.candidate_id for e in examples.since(numbers[who])]
        assert new == ended[numbers[who] :][-1024:]
        numbers[who] = examples.count
        told[who] += new
        assert len(examples._newest) <= 1024
    assert all(len(set(ids)) == len(ids) for ids in told.values())
    assert not examples._open


def most_to_gain_of_all(states: Collection[TaskState], islands: set[str]) -> float:
    """Return the highest score that any task has, taken over all of them."""

    def score(state: TaskState) -> float:
        under_way = state.proposing + math.ceil(state.open / BATCH)
        at_home = 1.0 if state.task.task_id in islands else 0.3
        return at_home * state.gain_secs() / (1 + under_way) ** 2

    def has_learnt(state: TaskState) -> bool:
        open_trials = state.open + BATCH * state.proposing
        is_known = state.sources[METASCHEDULE].batches or state.ended
        return open_trials <= (BATCH + state.ended // 8 if is_known else 0)

    ready = [s for s in states if not s.exhausted and has_learnt(s)]
    return max(map(score, ready), default=0.0)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_scheduler_find_the_task_that_a_look_at_all_tasks_finds(seed: int) -> None:
    rng = random.Random(seed)
    tasks = [task(f"t{i}", weight=rng.randint(1, 9)) for i in range(6)]
    states = {t.task_id: TaskState(t) for t in tasks}
    scheduler = TaskScheduler(states)
    for number in range(60):
        state = rng.choice(list(states.values()))
        if rng.random() < 0.05:
            state.sources[METASCHEDULE].exhausted = True
        elif rng.random() < 0.4:
            state.sources[METASCHEDULE].batches += 1
            state.sources[METASCHEDULE].proposing = rng.randint(0, 2)
        else:
            trial = candidate(state.task, number)
            state.opened(trial)
            if rng.random() < 0.8:
                state.end(trial, measured(rng.uniform(1e-5, 1e-3)))
        scheduler.changed(state)
        islands = {t.task_id for t in rng.sample(tasks, 2)}
        found = scheduler.most_to_gain(islands)
        assert most_to_gain_of_all([found] if found else [], islands) == most_to_gain_of_all(
            states.values(), islands
        )
        assert scheduler.all_exhausted == all(s.exhausted for s in states.values())


def test_the_weighted_latency_is_known_when_every_default_is() -> None:
    heavy, light = TaskState(task("heavy", weight=3)), TaskState(task("light"))
    scheduler = TaskScheduler({s.task.task_id: s for s in (heavy, light)})
    for state, secs in ((heavy, 2e-3), (light, 1e-3)):
        assert scheduler.weighted_best_secs() is None
        default = default_candidate(state.task)
        state.opened(default)
        state.end(default, measured(secs))
        scheduler.changed(state)
    assert scheduler.weighted_best_secs() == 7e-3
    better = candidate(heavy.task, 1)
    heavy.opened(better)
    heavy.end(better, measured(1e-3))
    scheduler.changed(heavy)
    assert math.isclose(scheduler.weighted_best_secs() or 0.0, 4e-3)


def test_of_many_results_the_best_and_the_newest_are_kept_in_order() -> None:
    results = Results(32)
    for number in range(1000):
        secs = 1e-6 if number == 123 else None if number % 7 == 0 else 1e-3
        results.add(Result(candidate(CONV, number), secs))
    kept = [t.candidate for t in results.since(0)]
    assert len(kept) <= 40
    assert results.count == 1000
    assert candidate(CONV, 123) in kept
    assert kept[-16:] == list(candidates(CONV, range(984, 1000)))
    assert kept == sorted(kept, key=lambda c: int(c.recipe))


def test_a_tuner_that_was_told_all_is_told_only_what_is_new() -> None:
    results = Results(32)
    for number in range(100):
        results.add(Result(candidate(CONV, number), 1e-3))
    told = results.count
    assert results.since(told) == ()
    results.add(Result(candidate(CONV, 100), 1e-3))
    assert [t.candidate for t in results.since(told)] == [candidate(CONV, 100)]


def test_a_known_candidate_takes_eight_bytes_and_is_never_new_again() -> None:
    known = KnownIds()
    ids = [c.candidate_id for c in candidates(CONV, range(2000))]
    assert all(known.add(i) for i in ids)
    assert not any(known.add(i) for i in ids)
    assert candidate(CONV, 2000).candidate_id not in known
    assert all(i in known for i in ids)
    assert known._numbers.itemsize * len(known) == 8 * 2000


def test_a_tuner_builds_what_it_proposed_before_what_others_did() -> None:
    queue = BuildQueue()
    theirs, mine = candidates(CONV, [1, 2]), candidates(CONV, [3])
    queue.add(theirs, "tuner-0")
    queue.add(mine, "tuner-1")
    assert queue.take("tuner-1", 1) == mine
    assert queue.take("tuner-1", 2) == theirs
    assert len(queue) == 0


def test_what_is_nobodys_is_built_first() -> None:
    queue = BuildQueue()
    queue.add(candidates(CONV, [1]), "tuner-0")
    queue.add(candidates(CONV, [2]))
    queue.add_first([default_candidate(CONV)])
    assert queue.take("tuner-0", 2) == (default_candidate(CONV), candidate(CONV, 2))


def test_the_proposals_of_a_lost_tuner_become_nobodys() -> None:
    queue = BuildQueue()
    queue.add(candidates(CONV, [1]), "tuner-0")
    queue.add(candidates(CONV, [2]), "tuner-1")
    queue.disown("tuner-0")
    assert len(queue) == 2
    assert queue.take("tuner-1", 1) == candidates(CONV, [1])


def test_nobody_of_a_lane_is_free_while_one_of_it_works() -> None:
    pool = WorkerPool()
    for worker_id, role in (("slice-0", "slice"), ("tuner-0", "tuner")):
        pool.join(Worker(worker_id, role, "cores-0", worker_id))
    tuner = pool.workers["tuner-0"]
    pool.begin(tuner, BuildThem("tuner-0", ()))
    assert pool.free("slice") is None
    pool.join(Worker("slice-1", "slice", "cores-0", "slice-1"))
    assert pool.free("slice") is None
    pool.end(tuner)
    assert pool.free("slice") is pool.workers["slice-0"]
    assert pool.is_idle


def test_who_has_been_free_the_longest_works_next() -> None:
    pool = WorkerPool()
    for number in range(3):
        pool.join(Worker(f"slice-{number}", "slice", None, "gpu"))
    work = Measure("slice-0", (build(candidate(CONV, 0)),), 0, (None,))
    first = pool.free("slice")
    assert first is not None
    pool.begin(first, work)
    pool.end(first)
    assert first.worker_id == "slice-0"
    assert [w.worker_id for w in [pool.free("slice")] if w] == ["slice-1"]


def test_a_worker_that_leaves_at_work_frees_its_lane() -> None:
    pool = WorkerPool()
    for worker_id, role in (("slice-0", "slice"), ("tuner-0", "tuner")):
        pool.join(Worker(worker_id, role, "cores-0", worker_id))
    pool.begin(pool.workers["tuner-0"], BuildThem("tuner-0", ()))
    pool.leave(pool.workers["tuner-0"])
    assert pool.free("slice") is pool.workers["slice-0"]
    assert pool.free("tuner") is None
    assert (pool.count("tuner"), pool.busy("tuner")) == (0, 0)
