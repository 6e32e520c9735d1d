"""The comparison of warm and cold searches: what its script makes of written runs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from lab.search import warm_start

WEIGHTS = {"conv": 2, "dense": 1}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return warm_start


def trial(at_secs: float, task_id: str, secs: float | None, default: bool = False) -> Any:
    return {"at_secs": at_secs, "task_id": task_id, "run_secs": secs, "default": default}


def run(start: str, *trials: Any, seed: int = 0) -> Any:
    defaults = [trial(1.0, "conv", 9e-3, default=True), trial(1.0, "dense", 8e-3, default=True)]
    return {"start": start, "seed": seed, "trials": [*defaults, *trials]}


COLD = run(
    "cold",
    trial(2.0, "conv", 5e-3),
    trial(3.0, "conv", None),
    trial(4.0, "dense", 1e-3),
    trial(5.0, "conv", 2e-3),
)
WARM = run("warm", trial(2.0, "conv", 1e-3), trial(3.0, "dense", 2e-3), trial(4.0, "dense", 4e-3))


def test_the_latency_counts_calls_and_defaults_are_no_trials(benchmark: ModuleType) -> None:
    points = benchmark.curve(COLD, WEIGHTS)
    assert [(n, at) for n, at, _ in points] == [(0, 1.0), (1, 2.0), (3, 4.0), (4, 5.0)]
    assert [secs for *_, secs in points] == pytest.approx([26e-3, 18e-3, 11e-3, 5e-3])


def test_the_goal_is_what_the_cold_search_ends_with(benchmark: ModuleType) -> None:
    (row,) = benchmark.summary([COLD, WARM], WEIGHTS)
    assert (row["cold"]["trials_to_goal"], row["cold"]["secs_to_goal"]) == (4, 5.0)
    assert (row["warm"]["trials_to_goal"], row["warm"]["secs_to_goal"]) == (2, 3.0)
    assert row["warm"]["final_secs"] == pytest.approx(4e-3)
    assert "2.0 times fewer trials" in benchmark.shown([row])


def test_a_goal_that_is_not_reached_has_no_number(benchmark: ModuleType) -> None:
    (row,) = benchmark.summary([COLD, run("warm")], WEIGHTS)
    assert row["warm"]["trials_to_goal"] is None
    assert "not reached" in benchmark.shown([row])
    assert "fewer" not in benchmark.shown([row])


def test_a_seed_without_both_runs_is_left_out(benchmark: ModuleType) -> None:
    assert benchmark.summary([COLD], WEIGHTS) == []
