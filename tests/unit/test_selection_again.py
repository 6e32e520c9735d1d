"""What of the finals is not done again: decisions, faulty finalists and builds."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

from typing import cast

import pytest

from tests.lib.finals_world import (  # noqa: F401  fixtures
    CRASH,
    OTHER,
    FakeCluster,
    candidate,
    choose,
    decided,
    disturbed,
    samples,
    searched,
    store,
    times,
)
from tests.lib.record_samples import TASK
from tests.lib.store_places import proposed
from tunerd.cluster.ray_cluster import Cluster
from tunerd.errors import Interrupted
from tunerd.records import Store
from tunerd.runs.finals.best_builds import BestBuilds
from tunerd.runs.finals.quiet_slice import Finals, QuietSlice
from tunerd.runs.finals.selection import choose_winners
from tunerd.studies.matrix.levels import finalists_of
from tunerd.vocabulary import Build, default_candidate


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
