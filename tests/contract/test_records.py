"""The trials of a run in its store, and what else it keeps."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses

import pytest

from tests.lib.record_samples import (  # noqa: F401  fixtures
    COLLATERAL,
    FACTS,
    OTHER_TASK,
    TASK,
    WRONG,
    candidate,
    disturbed,
    ids_of,
    measurement,
    outcome_of,
    place,
    store,
)
from tests.lib.store_places import StorePlace, proposed
from tunerd.records import Store
from tunerd.records.tally import Disturbed
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Activity,
    Build,
    CapProof,
    Failure,
    Kind,
    SliceSpec,
    Span,
    Stage,
    TrialState,
)


def test_a_trial_goes_from_its_proposal_to_its_measurement(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)], now=10.0)
    assert store.record(trial).state is TrialState.PROPOSED
    store.built([Build(candidate(1), b"", "ab" * 32, 0.5, TASK.args, (0,), "llvm")])
    store.start([trial], "cpu-0-0", now=11.0)
    running = store.record(trial)
    assert (running.state, running.attempts, running.started_at) == (TrialState.RUNNING, 1, 11.0)
    store.finish(trial, measurement(3e-3, 1e-3, 2e-3), now=12.0)
    ended = store.record(trial)
    assert ended.result == measurement(3e-3, 1e-3, 2e-3)
    assert (ended.run_secs, ended.ended_at) == (2e-3, 12.0)
    assert (ended.build_secs, ended.library_sha256) == (0.5, "ab" * 32)
    assert ended.candidate == candidate(1)


def test_a_known_candidate_gets_no_second_trial(store: Store) -> None:
    ids = proposed(store, [candidate(1), candidate(2), candidate(1)])
    first = store.trial_ids(ids)
    assert len(set(first.values())) == 2
    again = proposed(store, [candidate(3), candidate(2)])
    assert store.trial_ids(again)[again[1]] == first[ids[1]]
    assert sum(store.counts().values()) == 3


def test_a_candidate_of_an_unknown_task_is_refused(store: Store) -> None:
    with pytest.raises(Exception, match=r"(?i)foreign key"):
        store.propose([candidate(1, task_id="nope")])
    assert sum(store.counts().values()) == 0


def test_a_trial_ends_once_and_the_error_tells_its_history(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.start([trial], "cpu-0-0")
    store.finish(trial, WRONG)
    with pytest.raises(ValueError, match="failed in run: wrong-answer") as error:
        store.finish(trial, measurement(1.0))
    assert "started in cpu-0-0, attempt 1" in str(error.value)
    assert store.record(trial).result == WRONG
    with pytest.raises(ValueError, match="cannot start"):
        store.start([trial], "cpu-0-0")


def test_what_was_not_started_is_not_measured_but_may_fail_in_the_build(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    with pytest.raises(ValueError, match="is proposed and cannot be measured"):
        store.finish(trial, measurement(1.0))
    store.finish(trial, Failure(Stage.BUILD, Kind.COMPILE, "no"))
    assert store.counts()[TrialState.FAILED] == 1


def test_a_collateral_trial_goes_back_without_blame(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.start([trial], "mps-0-0")
    store.finish(trial, COLLATERAL)
    back = store.record(trial)
    assert (back.state, back.result, back.slice_id) == (TrialState.PROPOSED, None, None)
    store.start([trial], "mps-0-1")
    store.finish(trial, measurement(1.0))
    assert store.record(trial).attempts == 2
    assert "collateral in run, attempt 1 in mps-0-0" in store.history(trial)


def test_results_are_stored_all_or_none(store: Store) -> None:
    ids = proposed(store, [candidate(1), candidate(2)])
    store.start(ids[:1], "cpu-0-0")
    with pytest.raises(ValueError, match=f"trial {store.trial_ids(ids)[ids[1]]} is proposed"):
        store.finish_all({i: measurement(1.0) for i in ids})
    assert store.counts()[TrialState.RUNNING] == 1


@pytest.mark.parametrize("samples", [(), (float("nan"),), (1.0, float("inf"))])
def test_what_is_no_time_is_no_measurement(store: Store, samples: tuple[float, ...]) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.start([trial], "cpu-0-0")
    with pytest.raises(ValueError, match="is a Failure"):
        store.finish(trial, measurement(*samples))
    assert store.record(trial).state is TrialState.RUNNING


def test_a_build_of_another_candidate_is_refused(store: Store) -> None:
    proposed(store, [candidate(1)])
    build = Build(candidate(9), b"", "ab" * 32, 0.5, TASK.args, (0,), "llvm")
    with pytest.raises(ValueError, match="has no trial of"):
        store.built([build])


def test_the_best_trial_is_the_one_of_least_median(store: Store) -> None:
    assert store.best("t0") is None
    origins = [DEFAULT_SOURCE, METASCHEDULE, METASCHEDULE]
    ids = proposed(store, [candidate(i, source=o) for i, o in enumerate(origins)])
    store.start(ids, "cpu-0-0")
    store.finish(ids[0], measurement(2.0))
    store.finish(ids[1], measurement(0.1, 1.5, 9.0))
    store.finish(ids[2], WRONG)
    assert store.best("t0").candidate.candidate_id == ids[1]
    assert store.best("t0", is_default=True).candidate.candidate_id == ids[0]
    assert store.best("t1") is None


def test_records_are_filtered_by_task_and_state_over_many_pages(store: Store) -> None:
    ids = proposed(store, [candidate(i, f"t{i % 2}") for i in range(1200)])
    store.start(ids[:700], "cpu-0-0")
    assert ids_of(store.records()) == ids
    assert len(list(store.records("t1"))) == 600
    assert len(list(store.records("t1", TrialState.RUNNING))) == 350
    assert store.counts("t1")[TrialState.PROPOSED] == 250


def test_tasks_proofs_spans_and_facts_come_back_as_they_were(store: Store) -> None:
    store.register_tasks([OTHER_TASK, TASK])
    assert store.tasks() == [TASK, OTHER_TASK]
    assert store.tasks()[0].mod_json == TASK.mod_json
    proof = CapProof("mps-0-0", "NVIDIA H200", 52, 132, "mps", True, "580", "9.0", 123)
    store.save_slices([SliceSpec("mps-0-0", "mps", 40)] * 2)
    store.save_proof(proof)
    assert store.proofs() == [proof]
    spans = [Span("tuner-0", Activity.SEARCH, 1.0, 2.5), Span("cpu-0-0", Activity.IDLE, 0.0, 1.0)]
    store.add_spans(iter(spans))
    assert store.spans() == spans
    assert store.facts() == FACTS


def test_a_tasks_outcome_comes_back_with_its_winners_trace(store: Store) -> None:
    store.propose([candidate(1), candidate(2)])
    outcome = outcome_of(candidate(2))
    store.save_task_outcome(dataclasses.replace(outcome, note="first"))
    store.save_task_outcome(outcome)
    assert store.task_outcomes() == [outcome]
    assert store.task_outcomes()[0].winner.recipe == candidate(2).recipe
    assert store.outcome() is None


def test_a_reader_sees_one_moment_while_the_writer_goes_on(store: Store, place: StorePlace) -> None:
    store.propose([candidate(1)])
    with place.read() as before:
        assert sum(before.counts().values()) == 1
        store.propose([candidate(2)])
        assert sum(before.counts().values()) == 1
        with place.read() as after:
            assert sum(after.counts().values()) == 2
        with pytest.raises(Exception, match=r"read-?only"):
            before.propose([candidate(3)])


def test_disturbed_trials_are_counted_with_what_disturbed_most_of_them(store: Store) -> None:
    assert store.disturbed() == Disturbed()
    results = [measurement(1e-3), disturbed(1e-3), disturbed(1e-3, "hot"), disturbed(1e-3, "hot")]
    ids = proposed(store, [candidate(n) for n in range(5)])
    store.start(ids, "cpu-0-0")
    failed = Failure(Stage.RUN, Kind.TIMEOUT, "10 s")
    store.finish_all(dict(zip(ids, [*results, failed], strict=True)))
    assert store.disturbed() == Disturbed(3, 4, "hot")
