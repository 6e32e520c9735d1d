"""Finals on a device that others use."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.lib.finals_world import (  # noqa: F401  fixtures
    OTHER,
    FakeCluster,
    candidate,
    choose,
    disturbed,
    finalist_ids,
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
from tunerd.runs.finals.allowance import Allowance
from tunerd.runs.finals.quiet_slice import STEP_SECS, WAIT_SECS, Patience, QuietSlice
from tunerd.runs.finals.selection import FINALISTS, choose_winners
from tunerd.vocabulary import Task, default_candidate
from tunerd.vocabulary.outcome import TaskOutcome


def test_the_best_of_the_disturbed_trials_join_the_best_of_the_quiet_ones(store: Store) -> None:
    secs = [1e-3 * i for i in range(1, 10)]
    found = searched(store, *secs, noisy=range(4, 9))
    cluster = FakeCluster(times(20e-3, *secs[:4], 1e-4, *secs[5:]))
    (outcome,) = choose(store, cluster)
    assert finalist_ids(outcome) == [found[i].candidate_id for i in (0, 1, 2, 4, 5, 6)]
    assert outcome.winner == found[4]


def test_a_default_that_was_disturbed_in_the_search_loses_to_nothing_without_a_contest(
    store: Store,
) -> None:
    ids = proposed(store, [default_candidate(TASK)])
    store.start(ids, "cpu-0-0")
    store.finish_all({ids[0]: disturbed(samples(4e-3, "search-v1"))})
    searched(store, 1e-3)
    heavy = candidate(9, OTHER)
    ids = proposed(store, [heavy])
    store.start(ids, "cpu-0-0")
    store.finish_all({ids[0]: samples(1.0, "search-v1")})
    secs = times(4e-3, 1e-3) | times(9.0, task=OTHER) | {heavy.candidate_id: 1.0}
    quiet = QuietSlice(cast(Cluster, FakeCluster(secs)), "quiet")
    left_out, decided = choose_winners(
        [TASK, OTHER], store, quiet, say=lambda m: None, unsearched={}, allowance=Allowance(-1.0)
    )
    assert decided.winner == heavy
    assert not left_out.is_tuned


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


def test_what_is_waited_for_a_device_costs_no_time_of_the_finals() -> None:
    patience = Waiting().patience()
    allowance = Allowance(10.0, now=patience.now)
    before = allowance.left_secs
    for _ in range(5):
        assert patience.wait("quiet", "pid 7")
    assert patience.waited_secs == 5 * STEP_SECS
    assert allowance.left_secs > before  # none of the sleeps was one
