"""The quiet second look: who wins, and what must agree before it does."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import pytest

from tests.lib.finals_world import (  # noqa: F401  fixtures
    COLLATERAL,
    CRASH,
    OTHER,
    WRONG,
    FakeCluster,
    candidate,
    choose,
    decided,
    finalist_ids,
    neighbours_of,
    samples,
    searched,
    store,
    times,
    with_load,
)
from tests.lib.record_samples import TASK
from tests.lib.store_places import proposed
from tunerd.cluster.ray_cluster import Cluster
from tunerd.records import Store
from tunerd.report.library_text import library_times
from tunerd.runs.finals.allowance import FEW_TURNS, Allowance
from tunerd.runs.finals.quiet_slice import Finals, QuietSlice
from tunerd.runs.finals.selection import FINALISTS, choose_winners
from tunerd.vocabulary import (
    CUBLASLT,
    METASCHEDULE,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Stage,
    default_candidate,
)
from tunerd.vocabulary.outcome import TaskOutcome


def test_the_quiet_samples_decide_and_not_the_search_s(store: Store) -> None:
    _, second = searched(store, 1e-3, 2e-3)
    (outcome,) = choose(store, FakeCluster(times(4e-3, 3e-3, 1e-3)))
    assert outcome.winner == second
    assert outcome.best_secs == pytest.approx(1e-3, rel=0.01)


def test_a_wrong_candidate_is_refused_and_the_next_best_wins(store: Store) -> None:
    first, second = searched(store, 1e-3, 2e-3)
    cluster = FakeCluster(times(4e-3, 1e-3, 2e-3), wrong=[first.candidate_id])
    (outcome,) = choose(store, cluster)
    assert outcome.winner == second
    refused = {f.candidate_id: f.measurement for f in outcome.finalists}[first.candidate_id]
    assert refused == WRONG
    assert "a faster candidate was refused" in outcome.note


def test_where_all_finalists_are_wrong_the_next_best_are_measured(store: Store) -> None:
    found = searched(store, 1e-3, 1.1e-3, 1.2e-3, 2e-3, 3e-3)
    wrong = [c.candidate_id for c in found[:3]]
    cluster = FakeCluster(times(4e-3, 1e-3, 1.1e-3, 1.2e-3, 2e-3, 3e-3), wrong=wrong)
    (outcome,) = choose(store, cluster)
    assert outcome.winner == found[3]
    assert "a faster candidate was refused" in outcome.note
    results = {f.candidate_id: f.measurement for f in outcome.finalists}
    assert [results[name] for name in wrong] == [WRONG] * 3
    assert {c.candidate_id for c in found[3:]} <= set(results)


def test_the_default_stays_where_every_faster_candidate_is_wrong(store: Store) -> None:
    found = searched(store, 1e-3, 2e-3)
    cluster = FakeCluster(times(4e-3, 1e-3, 2e-3), wrong=[c.candidate_id for c in found])
    (outcome,) = choose(store, cluster)
    assert not outcome.is_tuned
    assert outcome.best_secs == outcome.default_secs
    assert "refused" in outcome.note


def test_only_a_candidate_that_would_win_is_compared_with_the_default(store: Store) -> None:
    searched(store, 1e-3, 2e-3)
    cluster = FakeCluster(times(4e-3, 5e-3, 6e-3))
    (outcome,) = choose(store, cluster)
    assert not outcome.is_tuned
    assert outcome.note == "the best candidate against the default: slower"
    assert "agree" not in cluster.calls


def test_the_best_few_of_the_search_are_measured_again(store: Store) -> None:
    searched(store, *(1e-3 * i for i in range(1, 8)))
    (outcome,) = choose(store, FakeCluster(times(9e-3, *(1e-3 * i for i in range(1, 8)))))
    assert [f.search_secs is None for f in outcome.finalists] == [True] + [False] * FINALISTS
    assert outcome.trials == 7


def test_a_default_that_cannot_be_built_loses_to_any_candidate_that_runs(store: Store) -> None:
    (only,) = searched(store, 1e-3)
    default = default_candidate(TASK).candidate_id
    (outcome,) = choose(store, FakeCluster(times(1e-3, 2e-3), unbuildable=[default]))
    assert outcome.winner == only
    assert outcome.comparison is None
    assert "default schedule does not run" in outcome.note


def test_a_task_without_measured_trials_stays_at_its_default(store: Store) -> None:
    (outcome,) = choose(store, FakeCluster(times(1e-3)))
    assert (outcome.is_tuned, outcome.note) == (False, "no trial was measured")


def test_a_neighbour_s_fault_is_not_held_against_the_finalists(store: Store) -> None:
    (only,) = searched(store, 1e-3)
    cluster = FakeCluster(times(4e-3, 1e-3), collateral=1)
    (outcome,) = choose(store, cluster)
    assert outcome.winner == only
    assert cluster.calls.count("compare") == 2


def test_a_finalist_that_faults_costs_the_others_nothing(store: Store) -> None:
    first, second, third = searched(store, 1e-3, 2e-3, 3e-3)
    cluster = FakeCluster(times(4e-3, 1e-3, 2e-3, 3e-3), faulty=[first.candidate_id])
    (outcome,) = choose(store, cluster)
    assert outcome.winner == second
    measured = {f.candidate_id: f.measurement for f in outcome.finalists}
    assert measured[first.candidate_id] == CRASH
    assert isinstance(measured[third.candidate_id], Measurement)
    assert cluster.calls.count("compare") == 1 + 4 + 1  # together, each alone, the sound together


def test_a_finalist_that_faults_beside_a_load_is_found_beside_idle_neighbours(
    store: Store,
) -> None:
    first, second, third = searched(store, 1e-3, 2e-3, 3e-3)
    secs = times(4e-3, 1e-3, 2e-3, 3e-3)
    cluster = with_load(FakeCluster(secs, faulty=[first.candidate_id]))
    (outcome,) = decided(store, cluster, Finals(neighbours="busy"))
    assert outcome.winner == second
    measured = {f.candidate_id: f.measurement for f in outcome.finalists}
    assert measured[first.candidate_id] == CRASH
    assert isinstance(measured[third.candidate_id], Measurement)
    assert neighbours_of(outcome) == {2}  # what decides was measured beside the load


def test_a_default_that_faults_loses_to_what_runs(store: Store) -> None:
    (first,) = searched(store, 1e-3)
    default = default_candidate(TASK).candidate_id
    (outcome,) = choose(store, FakeCluster(times(4e-3, 1e-3), faulty=[default]))
    assert outcome.winner == first


@pytest.mark.parametrize("kind", [Kind.COLLATERAL, Kind.INTERRUPTED])
def test_nothing_wins_against_a_default_that_another_s_fault_ended(
    store: Store, kind: Kind
) -> None:
    (only,) = searched(store, 1e-3)
    default = default_candidate(TASK).candidate_id
    spoiled = times(4e-3, 99.0) | {default: Failure(Stage.RUN, kind, "the runner got SIGKILL")}
    (outcome,) = choose(store, FakeCluster(spoiled))
    assert not outcome.is_tuned
    assert outcome.note.startswith("not settled")
    assert "the runner got SIGKILL" in outcome.note
    (again,) = choose(store, FakeCluster(times(4e-3, 1e-3)))
    assert again.winner == only
    assert again.comparison is not None


def test_a_default_stays_for_good_only_if_its_rivals_had_their_turn(store: Store) -> None:
    first, second = searched(store, 1e-3, 2e-3)
    (outcome,) = choose(store, FakeCluster(times(4e-3, 0, 5e-3) | {first.candidate_id: COLLATERAL}))
    assert (outcome.is_tuned, outcome.is_decided) == (False, False)
    (outcome,) = choose(store, FakeCluster(times(4e-3, 0, 2e-3) | {first.candidate_id: COLLATERAL}))
    assert (outcome.winner, outcome.is_decided) == (second, True)
    choose(store, third := FakeCluster(times(4e-3, 1e-3, 2e-3)))
    assert third.calls == []


@pytest.mark.parametrize("kind", [Kind.TIMEOUT, Kind.REFUSED])
def test_what_wins_against_a_default_that_does_not_run_is_said_to_be_compared_with_nothing(
    store: Store, kind: Kind
) -> None:
    (only,) = searched(store, 1e-3)
    default = default_candidate(TASK).candidate_id
    failing = times(4e-3, 99.0) | {default: Failure(Stage.RUN, kind, "it took 10 s")}
    (outcome,) = choose(store, cluster := FakeCluster(failing))
    assert (outcome.winner, outcome.comparison) == (only, None)
    assert "neither its speed nor its results were compared with anything" in outcome.note
    assert "it took 10 s" in outcome.note
    assert "agree" not in cluster.calls
    assert outcome.is_decided


def test_a_task_without_trials_says_what_the_search_said(store: Store) -> None:
    quiet = QuietSlice(cast(Cluster, FakeCluster(times(4e-3))), "quiet")
    (outcome,) = choose_winners(
        [TASK],
        store,
        quiet,
        say=lambda message: None,
        unsearched={TASK.task_id: "the search found no candidate"},
    )
    assert not outcome.is_tuned
    assert outcome.note == "the search found no candidate"


# --- too little time -----------------------------------------------------------------------------


def chosen_within(store: Store, cluster: FakeCluster, secs: float) -> tuple[TaskOutcome, Allowance]:
    """Choose the winner of a task in so much time, on a clock that stands still."""
    searched(store, 1e-3, 1.1e-3, 1.2e-3)
    allowance = Allowance(secs, now=lambda: 0.0)
    (outcome,) = choose(store, cluster, allowance=allowance)
    return outcome, allowance


def measured_in_search(store: Store, secs: float) -> None:
    """Store what the search measured of the default."""
    ids = proposed(store, [default_candidate(TASK)])
    store.start(ids, "cpu-0-0")
    store.finish_all({ids[0]: samples(secs, "search-v1")})


def test_without_time_the_best_of_a_heavy_task_is_measured_and_checked_all_the_same(
    store: Store,
) -> None:
    measured_in_search(store, 4e-3)
    cluster = FakeCluster(times(4e-3, 1e-3, 0.5e-3, 0.5e-3))
    outcome, allowance = chosen_within(store, cluster, -1.0)
    assert outcome.winner == candidate(1)
    assert finalist_ids(outcome) == [candidate(1).candidate_id]
    assert outcome.is_decided
    assert cluster.turns == [FEW_TURNS]
    assert cluster.calls.count("agree") == 1
    assert "1 had fewer finalists or turns" in allowance.remarks()[0]


def test_a_winner_that_is_wrong_is_refused_where_the_time_is_spent(store: Store) -> None:
    measured_in_search(store, 4e-3)
    wrong = [candidate(1).candidate_id]
    cluster = FakeCluster(times(4e-3, 1e-3, 0.5e-3, 0.5e-3), wrong=wrong)
    outcome, _ = chosen_within(store, cluster, -1.0)
    assert not outcome.is_tuned
    assert cluster.calls.count("compare") == 1  # no further heat
    assert "a faster candidate was refused" in outcome.note


def light_and_heavy(
    store: Store, light_secs: float, *, wrong: Sequence[str] = ()
) -> tuple[TaskOutcome, TaskOutcome, FakeCluster, Allowance]:
    """Choose without time between defaults of 1 ms and 2 s and a rival each, after a search."""
    measured_in_search(store, 1e-3)
    searched(store, light_secs, light_secs * 1.01)
    other = candidate(9, OTHER)
    ids = proposed(store, [other])
    store.start(ids, "cpu-0-0")
    store.finish_all({ids[0]: samples(1.0, "search-v1")})
    secs = times(1e-3, light_secs, light_secs * 1.01) | times(2.0, task=OTHER)
    cluster = FakeCluster(secs | {other.candidate_id: 1.0}, wrong=wrong)
    allowance = Allowance(-1.0, now=lambda: 0.0)
    light, heavy = choose_winners(
        [TASK, OTHER],
        store,
        QuietSlice(cast(Cluster, cluster), "quiet"),
        say=lambda m: None,
        unsearched={},
        allowance=allowance,
    )
    assert heavy.winner == other
    return light, heavy, cluster, allowance


def test_a_light_task_that_is_left_out_keeps_its_default_unless_the_search_is_clear(
    store: Store,
) -> None:
    light, _, cluster, allowance = light_and_heavy(store, 0.9e-3)
    assert (light.is_tuned, light.is_decided) == (False, False)
    assert light.note == "not measured again: the time for finalists was spent"
    assert light.default_secs == light.best_secs == pytest.approx(1e-3, rel=0.01)
    assert "1 had the search's times alone" in allowance.remarks()[0]
    assert cluster.calls.count("agree") == 1  # the heavy one's


def test_a_light_task_that_is_left_out_has_the_search_s_best_until_it_is_measured(
    store: Store,
) -> None:
    light, _, cluster, _ = light_and_heavy(store, 0.5e-3)
    assert light.winner == candidate(1)
    assert light.best_secs == pytest.approx(0.5e-3, rel=0.01)
    assert light.comparison is None
    assert not light.is_decided
    assert light.note.startswith("by the search's times, not measured again")
    assert cluster.calls.count("compare") == 1
    light, _ = choose(store, cluster, [TASK, OTHER])
    assert (light.is_tuned, light.is_decided) == (True, True)
    assert light.comparison is not None
    assert cluster.calls.count("compare") == 2  # the heavy one stands


def test_a_left_out_task_does_not_take_what_is_wrong(store: Store) -> None:
    wrong = [candidate(1).candidate_id]
    light, _, _, _ = light_and_heavy(store, 0.5e-3, wrong=wrong)
    assert light.winner == candidate(2)
    assert {f.candidate_id: f.measurement for f in light.finalists}[wrong[0]] == WRONG


# --- neighbours, and candidates that judge the ranking -----------------------------------------


def of_library(store: Store, secs: float) -> Candidate:
    """Store a trial of a library beside four of the search, which are faster there."""
    searched(store, 1e-3, 1.1e-3, 1.2e-3, 1.3e-3)
    found = dataclasses.replace(candidate(9), source=CUBLASLT)
    ids = proposed(store, [found])
    store.start(ids, "cpu-0-0")
    store.finish_all({ids[0]: samples(secs, "search-v1")})
    return found


def test_the_best_of_a_library_is_measured_again_and_may_win(store: Store) -> None:
    found = of_library(store, 2e-3)
    quiet = FakeCluster(times(4e-3, 3e-3, 3e-3, 3e-3) | {found.candidate_id: 1e-3})
    (outcome,) = choose(store, quiet, libraries=(CUBLASLT,))
    assert outcome.winner == found


def test_without_time_a_library_keeps_what_the_search_says_of_it(store: Store) -> None:
    measured_in_search(store, 4e-3)
    found = of_library(store, 2e-3)
    cluster = FakeCluster(times(4e-3, 1e-3, 1.1e-3, 1.2e-3, 1.3e-3) | {found.candidate_id: 2e-3})
    allowance = Allowance(-1.0, now=lambda: 0.0)
    (outcome,) = choose(store, cluster, libraries=(CUBLASLT,), allowance=allowance)
    last = outcome.finalists[-1]
    assert (last.candidate_id, last.may_win) == (found.candidate_id, False)
    assert isinstance(last.measurement, Failure)
    assert last.search_secs == pytest.approx(2e-3, rel=0.01)
    assert library_times(outcome)[CUBLASLT].is_searched
    assert outcome.is_decided


def test_what_a_library_took_before_does_not_ship_without_the_library(store: Store) -> None:
    found = of_library(store, 1e-4)
    quiet = FakeCluster(times(4e-3, 3e-3, 3e-3, 3e-3) | {found.candidate_id: 1e-3})
    (outcome,) = choose(store, quiet, libraries=(CUBLASLT,))
    assert outcome.winner == found
    (outcome,) = choose(store, quiet)
    assert outcome.winner.source == METASCHEDULE
    assert found.candidate_id not in finalist_ids(outcome)
