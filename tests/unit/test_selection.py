"""The quiet second look: who wins, and what must agree before it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.lib.store_places import proposed
from tunerd.cluster.ray_cluster import Cluster
from tunerd.errors import HostError, Interrupted
from tunerd.records import RunFacts, Store
from tunerd.runner.base import Company
from tunerd.runs.finals.best_builds import BestBuilds
from tunerd.runs.finals.quiet_slice import STEP_SECS, WAIT_SECS, Finals, Patience, QuietSlice
from tunerd.runs.finals.selection import FINALISTS, choose_winners
from tunerd.slices.neighbors import others_on_device, require_neighbours
from tunerd.studies.matrix.levels import finalists_of
from tunerd.vocabulary import (
    CUBLASLT,
    METASCHEDULE,
    Build,
    Candidate,
    Conditions,
    Failure,
    Kind,
    Measurement,
    SliceSpec,
    Stage,
    TargetSpec,
    Task,
    TensorSpec,
    default_candidate,
)
from tunerd.vocabulary.outcome import TaskOutcome

LLVM = TargetSpec("llvm", '{"kind":"llvm"}')
FACTS = RunFacts("net", "d" * 64, LLVM, "CPU X", "cpu", 50, "0.27.0")
TASK = Task("t0", "conv", 3, 1e9, (TensorSpec("a", (1, 2), "float32"),), (0,), LLVM, "{}")
OTHER = dataclasses.replace(TASK, task_id="t1", name="dense")
WRONG = Failure(Stage.VERIFY, Kind.WRONG_ANSWER, "out differs from the default schedule's")
CRASH = Failure(Stage.RUN, Kind.CRASH, "the runner ended: SIGSEGV")
COLLATERAL = Failure(Stage.RUN, Kind.COLLATERAL, "a neighbour's fault")


def candidate(number: int, task: Task = TASK) -> Candidate:
    return Candidate(task.task_id, f"{number:016x}", METASCHEDULE, f"[[{number}],[]]")


def samples(secs: float, profile: str = "final-v1") -> Measurement:
    return Measurement(tuple(secs * (1 + 1e-4 * i) for i in range(20)), 1, profile, "quiet", 1)


class FakeCluster:
    """Answers as a slice would: quiet times and disagreements are given by candidate.

    A candidate that has a failure instead of a time fails so, and fails no other.
    """

    def __init__(
        self,
        quiet_secs: Mapping[str, float | Failure],
        wrong: Sequence[str] = (),
        unbuildable: Sequence[str] = (),
        collateral: int = 0,
        faulty: Sequence[str] = (),
    ) -> None:
        self.quiet_secs, self.wrong, self.unbuildable = quiet_secs, wrong, unbuildable
        self.faulty = faulty  # end every comparison in which they are, named if it is alone
        self.collateral = collateral  # how many comparisons a neighbour spoils
        self.disturbed = 0  # how many comparisons and looks somebody disturbs
        self.calls: list[str] = []
        self.places: list[tuple[str, str]] = []
        self.answers: dict[str, list[Any]] = {}  # of other methods, one after the other

    def build_all(self, candidates: Sequence[Candidate]) -> list[Build | Failure]:
        self.calls.append("build")
        return [
            Failure(Stage.BUILD, Kind.COMPILE, "no")
            if c.candidate_id in self.unbuildable
            else Build(c, b"", "", 0.1, TASK.args, (0,), "llvm")
            for c in candidates
        ]

    def call_all(self, asked: Sequence[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        return [self.call(slice_id, method, *arguments) for slice_id, method, arguments in asked]

    def call(self, slice_id: str, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        self.places.append((slice_id, method))
        if method in self.answers:
            return self.answers[method].pop(0) if self.answers[method] else None
        if method == "agree":
            return WRONG if arguments[1].candidate.candidate_id in self.wrong else None
        if method in ("compare", "conditions"):
            self.disturbed -= 1
        if method == "conditions":
            return Conditions(disturbed_by="pid 7" if self.disturbed >= 0 else "")
        builds, _, company = arguments
        self.collateral -= 1
        if self.collateral >= 0:
            return [COLLATERAL] * len(builds)
        if any(b.candidate.candidate_id in self.faulty for b in builds):
            return [CRASH if company.is_alone else COLLATERAL] * len(builds)
        found = [self.quiet_secs[b.candidate.candidate_id] for b in builds]
        results = [secs if isinstance(secs, Failure) else samples(secs) for secs in found]
        results = [r if isinstance(r, Failure) else taken_in(r, company) for r in results]
        if self.disturbed < 0:
            return results
        return [r if isinstance(r, Failure) else disturbed(r) for r in results]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create_or_open(tmp_path, facts=FACTS) as opened:
        opened.register_tasks([TASK, OTHER])
        yield opened


def taken_in(result: Measurement, company: Company) -> Measurement:
    return dataclasses.replace(result, conditions=company.seen_in(result.conditions))


def disturbed(result: Measurement, by: str = "pid 7") -> Measurement:
    conditions = dataclasses.replace(result.conditions, strangers=1, disturbed_by=by)
    return dataclasses.replace(result, conditions=conditions)


def searched(
    store: Store, *secs: float, task: Task = TASK, noisy: Sequence[int] = ()
) -> list[Candidate]:
    """Store trials with these medians in the search and return their candidates.

    `noisy` are the places of those that were disturbed.
    """
    candidates = [candidate(i + 1, task) for i in range(len(secs))]
    ids = proposed(store, candidates)
    store.start(ids, "cpu-0-0")
    results = [samples(s, "search-v1") for s in secs]
    results = [disturbed(r) if i in noisy else r for i, r in enumerate(results)]
    store.finish_all(dict(zip(ids, results, strict=True)))
    return candidates


def choose(
    store: Store,
    cluster: FakeCluster,
    tasks: Sequence[Task] = (TASK,),
    libraries: Sequence[str] = (),
) -> list[TaskOutcome]:
    quiet = QuietSlice(cast(Cluster, cluster), "quiet")
    chosen = choose_winners(
        tasks, store, quiet, say=lambda message: None, unsearched={}, libraries=libraries
    )
    return list(chosen)


def times(default: float, *of_candidates: float, task: Task = TASK) -> dict[str, float | Failure]:
    named: dict[str, float | Failure] = {default_candidate(task).candidate_id: default}
    return named | {candidate(i + 1).candidate_id: s for i, s in enumerate(of_candidates)}


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


def test_what_an_interrupted_session_decided_is_not_decided_again(store: Store) -> None:
    searched(store, 1e-3)
    secs = times(4e-3, 1e-3) | times(4e-3, task=OTHER)
    told: list[str] = []

    def stop_at_the_second_task(message: str) -> None:
        told.append(message)
        if "task 2" in message:
            raise Interrupted("stopped")

    first = FakeCluster(secs)
    with pytest.raises(Interrupted):
        choose_winners(
            [TASK, OTHER],
            store,
            QuietSlice(cast(Cluster, first), "q"),
            say=stop_at_the_second_task,
            unsearched={},
        )
    second = FakeCluster(secs)
    outcomes = choose(store, second, [TASK, OTHER])
    assert second.calls == ["build", "compare"]  # of the other task
    assert [o.is_tuned for o in outcomes] == [True, False]
    assert choose(store, third := FakeCluster(secs), [TASK, OTHER]) == outcomes
    assert third.calls == []


def test_a_task_with_new_trials_is_decided_again(store: Store) -> None:
    searched(store, 3e-3)
    choose(store, FakeCluster(times(4e-3, 3e-3)))
    searched_again = proposed(store, [better := candidate(2)])
    store.start(searched_again, "cpu-0-0")
    store.finish_all({searched_again[0]: samples(1e-3, "search-v1")})
    (outcome,) = choose(store, FakeCluster(times(4e-3, 3e-3, 1e-3)))
    assert outcome.winner == better


def test_a_finalist_that_faulted_is_not_run_again(store: Store) -> None:
    first, second = searched(store, 1e-3, 2e-3)
    secs = times(4e-3, 1e-3, 2e-3)
    choose(store, FakeCluster(secs, faulty=[first.candidate_id]))
    for l2 in ("cold", "warm", "cold"):  # each measures the task anew
        cluster = FakeCluster(secs)
        (outcome,) = decided(store, cluster, Finals(l2=l2))
        assert outcome.winner == second
        measured = {f.candidate_id: f.measurement for f in outcome.finalists}
        assert measured[first.candidate_id] == CRASH
        assert cluster.calls == ["build", "compare", "agree"]
    assert finalists_of(store) == {TASK.task_id: [second]}  # nor by a matrix, at other shares


@pytest.mark.parametrize("missing", [0, 1])
def test_what_the_search_has_built_is_not_built_again(store: Store, missing: int) -> None:
    candidates = searched(store, 2e-3, 1e-3)
    cluster = FakeCluster(times(4e-3, 2e-3, 1e-3))
    of_search = cluster.build_all([default_candidate(TASK), *candidates])
    built = [b for b in of_search[missing:] if isinstance(b, Build)]
    cluster.calls.clear()
    quiet = QuietSlice(cast(Cluster, cluster), "quiet")
    (outcome,) = choose_winners(
        [TASK], store, quiet, say=lambda message: None, unsearched={}, built=built
    )
    assert outcome.winner == candidates[1]
    assert cluster.calls == ["build"] * missing + ["compare", "agree"]


def test_the_best_builds_are_kept_of_quiet_and_of_disturbed_trials() -> None:
    kept = BestBuilds(2)
    default, *others = [default_candidate(TASK), *(candidate(i) for i in range(7))]
    secs = [9e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3, 6e-3, 7e-3]
    builds = [Build(c, b"", "", 0.1, TASK.args, (0,), "llvm") for c in (default, *others)]
    results = [samples(s) for s in secs]
    noisy = [disturbed(r) if i in (5, 6) else r for i, r in enumerate(results)]
    kept.note(builds[:3], noisy[:3])
    kept.note(builds[3:], [*noisy[3:-1], CRASH])
    ids = {b.candidate.candidate_id for b in kept.all()}
    assert ids == {c.candidate_id for c in (default, *(candidate(i) for i in (2, 3, 4, 5)))}


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


def test_what_a_library_took_before_does_not_ship_without_the_library(store: Store) -> None:
    found = of_library(store, 1e-4)
    quiet = FakeCluster(times(4e-3, 3e-3, 3e-3, 3e-3) | {found.candidate_id: 1e-3})
    (outcome,) = choose(store, quiet, libraries=(CUBLASLT,))
    assert outcome.winner == found
    (outcome,) = choose(store, quiet)
    assert outcome.winner.source == METASCHEDULE
    assert found.candidate_id not in finalist_ids(outcome)


def with_load(cluster: FakeCluster, *ends: Any) -> FakeCluster:
    """Have the neighbours' load begin, and end in these ways."""
    cluster.answers = {"load": [0.1] * 99, "repeat": [], "stop": list(ends)}
    return cluster


def decided(
    store: Store, cluster: FakeCluster, finals: Finals, tasks: Sequence[Task] = (TASK,)
) -> list[TaskOutcome]:
    quiet = QuietSlice(cast(Cluster, cluster), "quiet", ("near-1", "near-2"), finals)
    return list(choose_winners(tasks, store, quiet, say=lambda message: None, unsearched={}))


def neighbours_of(outcome: TaskOutcome) -> set[int | None]:
    results = [f.measurement for f in outcome.finalists]
    return {r.conditions.neighbours for r in results if isinstance(r, Measurement)}


def test_without_neighbours_the_other_slices_are_asked_nothing(store: Store) -> None:
    searched(store, 1e-3)
    (outcome,) = decided(store, cluster := FakeCluster(times(4e-3, 1e-3)), Finals())
    assert {place for place, _ in cluster.places} == {"quiet"}
    assert neighbours_of(outcome) == {0}


def test_busy_neighbours_repeat_the_default_while_one_slice_measures(store: Store) -> None:
    searched(store, 1e-3)
    cluster = with_load(FakeCluster(times(4e-3, 1e-3)), None, None)
    (outcome,) = decided(store, cluster, Finals(neighbours="busy"))
    both = [("near-1", m) for m in ("load", "repeat", "stop")]
    both += [("near-2", m) for m in ("load", "repeat", "stop")]
    assert sorted(p for p in cluster.places if p[0] != "quiet") == sorted(both)
    (compared,) = (i for i, m in enumerate(cluster.calls) if m == "compare")
    assert cluster.calls[:compared].count("repeat") == 2  # both before, and stopped after
    assert cluster.calls[compared:].count("stop") == 2
    assert neighbours_of(outcome) == {2}
    assert outcome.is_tuned
    assert outcome.measured_as == "final-v6-model, neighbours busy"


def test_a_comparison_whose_neighbours_failed_is_taken_again(store: Store) -> None:
    searched(store, 1e-3)
    lost = Failure(Stage.RUN, Kind.CRASH, "the runner ended")
    cluster = with_load(FakeCluster(times(4e-3, 1e-3)), lost, None, None, None)
    (outcome,) = decided(store, cluster, Finals(neighbours="busy"))
    assert cluster.calls.count("compare") == 2
    assert outcome.is_tuned


def test_as_tuned_each_slice_measures_another_task_and_spare_ones_are_busy(store: Store) -> None:
    searched(store, 1e-3)
    secs = times(4e-3, 1e-3) | times(4e-3, task=OTHER)
    cluster = with_load(FakeCluster(secs), None)
    outcomes = decided(store, cluster, Finals(neighbours="as-tuned"), [TASK, OTHER])
    assert [p for p, m in cluster.places if m == "compare"] == ["quiet", "near-1"]
    assert [p for p, m in cluster.places if m == "repeat"] == ["near-2"]
    assert {n for o in outcomes for n in neighbours_of(o)} == {2}
    assert [o.is_tuned for o in outcomes] == [True, False]


def test_candidates_spread_over_the_ranking_are_measured_and_never_win(store: Store) -> None:
    searched(store, *(1e-3 * i for i in range(1, 11)))
    secs = [1e-3 * i for i in range(1, 11)]
    secs[9] = 1e-4  # the search's last is the fastest
    (outcome,) = decided(store, FakeCluster(times(9e-3, *secs)), Finals(fidelity=3))
    judged = [f for f in outcome.finalists if not f.may_win]
    assert [f.search_secs for f in judged] == pytest.approx([4e-3, 7e-3, 10e-3], rel=0.01)
    assert outcome.winner == candidate(1)
    assert outcome.best_secs == pytest.approx(1e-3, rel=0.01)


def test_an_outcome_that_was_measured_otherwise_is_measured_anew(store: Store) -> None:
    searched(store, 1e-3)
    decided(store, FakeCluster(times(4e-3, 1e-3)), Finals("cold"))
    decided(store, again := FakeCluster(times(4e-3, 1e-3)), Finals("cold"))
    assert again.calls == []
    (outcome,) = decided(store, other := FakeCluster(times(4e-3, 1e-3)), Finals("warm"))
    assert other.calls.count("compare") == 1
    assert outcome.measured_as == "final-v6-warm, neighbours none"


def test_neighbours_are_the_other_slices_of_the_device() -> None:
    placed = [
        (SliceSpec("a", "mps", 40, gpu_uuid="GPU-1"), "node"),
        (SliceSpec("b", "mps", 40, gpu_uuid="GPU-1"), "node"),
        (SliceSpec("c", "mps", 40, device_index=1, gpu_uuid="GPU-2"), "node"),
    ]
    assert others_on_device(placed, "a") == ["b"]
    require_neighbours(placed, "busy")
    require_neighbours(placed[:1], "none")
    with pytest.raises(HostError, match="takes a second slice"):
        require_neighbours(placed[:1], "as-tuned")


# --- others on the device ----------------------------------------------------------------------


def finalist_ids(outcome: TaskOutcome) -> list[str]:
    return [f.candidate_id for f in outcome.finalists if not f.is_default]


def test_the_best_of_the_disturbed_trials_join_the_best_of_the_quiet_ones(store: Store) -> None:
    secs = [1e-3 * i for i in range(1, 10)]
    found = searched(store, *secs, noisy=range(4, 9))
    cluster = FakeCluster(times(20e-3, *secs[:4], 1e-4, *secs[5:]))
    (outcome,) = choose(store, cluster)
    assert finalist_ids(outcome) == [found[i].candidate_id for i in (0, 1, 2, 4, 5, 6)]
    assert outcome.winner == found[4]


@pytest.mark.parametrize("noisy", [(), range(9)], ids=["none", "all"])
def test_only_the_best_few_are_measured_where_none_or_all_were_disturbed(
    store: Store, noisy: Sequence[int]
) -> None:
    secs = [1e-3 * i for i in range(1, 10)]
    found = searched(store, *secs, noisy=noisy)
    (outcome,) = choose(store, FakeCluster(times(20e-3, *secs)))
    assert finalist_ids(outcome) == [c.candidate_id for c in found[:FINALISTS]]


class Waiting:
    """Patience whose sleeps take no time."""

    def __init__(self, secs: float = WAIT_SECS) -> None:
        self.said: list[str] = []
        self.slept: list[float] = []
        self.secs = secs

    def patience(self) -> Patience:
        return Patience(self.said.append, secs=self.secs, sleep=self.slept.append)


def beside(cluster: FakeCluster, waiting: Waiting) -> QuietSlice:
    return QuietSlice(cast(Cluster, cluster), "quiet", patience=waiting.patience())


def outcomes_of(store: Store, quiet: QuietSlice, tasks: Sequence[Task]) -> list[TaskOutcome]:
    return list(choose_winners(tasks, store, quiet, say=lambda message: None, unsearched={}))


def test_a_disturbed_comparison_is_taken_again_when_the_device_is_quiet(store: Store) -> None:
    searched(store, 1e-3)
    cluster, waiting = FakeCluster(times(4e-3, 1e-3)), Waiting()
    cluster.disturbed = 3  # the comparison, and two looks
    (outcome,) = outcomes_of(store, beside(cluster, waiting), [TASK])
    assert cluster.calls[1:6] == ["compare", "conditions", "conditions", "conditions", "compare"]
    assert waiting.slept == [STEP_SECS] * 3
    (said,) = set(waiting.said)
    assert said == "waiting for the device of quiet to be quiet (--no-wait goes on): pid 7"
    assert outcome.is_tuned
    assert outcome.disturbed_by == ""


def test_the_finals_wait_so_long_in_all_and_then_count_what_they_have(store: Store) -> None:
    searched(store, 1e-3)
    secs = times(4e-3, 1e-3) | times(4e-3, task=OTHER)
    cluster, waiting = FakeCluster(secs), Waiting()
    cluster.disturbed = 10**6
    outcomes = outcomes_of(store, beside(cluster, waiting), [TASK, OTHER])
    assert sum(waiting.slept) == WAIT_SECS
    assert cluster.calls.count("compare") == 2
    assert [(o.is_tuned, o.disturbed_by) for o in outcomes] == [(True, "pid 7"), (False, "pid 7")]


def test_the_finals_go_on_at_once_where_they_are_not_to_wait(store: Store) -> None:
    searched(store, 1e-3)
    cluster, waiting = FakeCluster(times(4e-3, 1e-3)), Waiting(secs=0.0)
    cluster.disturbed = 10**6
    (outcome,) = outcomes_of(store, beside(cluster, waiting), [TASK])
    assert waiting.slept == []
    assert (outcome.is_tuned, outcome.disturbed_by) == (True, "pid 7")


def test_a_stop_ends_the_waiting(store: Store) -> None:
    def stop(message: str) -> None:
        raise Interrupted("stopped")

    searched(store, 1e-3)
    cluster = FakeCluster(times(4e-3, 1e-3))
    cluster.disturbed = 1
    patience = Patience(stop, sleep=lambda secs: None)
    with pytest.raises(Interrupted):
        outcomes_of(store, QuietSlice(cast(Cluster, cluster), "q", patience=patience), [TASK])
    assert store.task_outcomes() == []


def test_another_fault_after_the_waiting_leaves_what_was_measured(store: Store) -> None:
    searched(store, 1e-3)

    class Faulty(FakeCluster):
        def call(self, slice_id: str, method: str, *arguments: Any) -> Any:
            if method == "conditions":
                self.collateral = 10**6
            return super().call(slice_id, method, *arguments)

    cluster = Faulty(times(4e-3, 1e-3))
    cluster.disturbed = 1
    waiting = Waiting()
    (outcome,) = outcomes_of(store, beside(cluster, waiting), [TASK])
    assert (outcome.is_tuned, outcome.disturbed_by) == (True, "pid 7")
    assert sum(waiting.slept) == WAIT_SECS


def test_what_was_decided_beside_others_is_decided_again_by_the_same_command(store: Store) -> None:
    searched(store, 1e-3)
    first = FakeCluster(times(4e-3, 1e-3))
    first.disturbed = 10**6
    outcomes_of(store, beside(first, Waiting()), [TASK])
    (outcome,) = choose(store, again := FakeCluster(times(4e-3, 1e-3)))
    assert again.calls.count("compare") == 1
    assert outcome.disturbed_by == ""
