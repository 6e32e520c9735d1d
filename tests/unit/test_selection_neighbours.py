"""Finals with neighbours, and candidates that judge the search's ranking."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import pytest

from tests.lib.finals_world import (  # noqa: F401  fixtures
    OTHER,
    FakeCluster,
    candidate,
    decided,
    neighbours_of,
    searched,
    store,
    times,
    with_load,
)
from tests.lib.record_samples import TASK
from tunerd.errors import HostError
from tunerd.records import Store
from tunerd.runs.finals.quiet_slice import Finals
from tunerd.slices.neighbors import others_on_device, require_neighbours
from tunerd.vocabulary import Failure, Kind, SliceSpec, Stage


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
