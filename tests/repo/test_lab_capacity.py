"""How many models the lab finds that a device serves, and how graphs wait for their turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.colocation import capacity
from lab.colocation.capacity import Try, most_served, poisson, ways_of
from lab.colocation.capacity_table import table
from lab.colocation.open_loop import served
from tests.lib import PYTHON_PATH, ROOT
from tests.lib.artifact_fixtures import tiny_artifact


@pytest.mark.parametrize(("limit", "most"), [(0, 256), (1, 256), (77, 256), (200, 256), (300, 256)])
def test_the_most_models_are_found_to_a_small_part_of_them(limit: int, most: int) -> None:
    def serve(count: int, seed: int) -> Try:
        return Try(count, asked=1000, in_time=999 if count <= limit else 500, per_sec=1, p99_ms=1)

    found = most_served(serve, most)
    assert found["most"] <= limit
    assert found["most"] >= min(limit, most) * (1 - 1 / 16) - 1
    assert found["most"] < found["missed"]


def test_what_holds_by_chance_is_tried_again_with_other_arrivals() -> None:
    def serve(count: int, seed: int) -> Try:
        is_kept = count <= 90 or (seed == 0 and count <= 100)
        return Try(count, asked=1000, in_time=1000 if is_kept else 900, per_sec=1, p99_ms=1)

    found = most_served(serve, 256)
    assert 80 <= found["most"] <= 90


def test_without_time_nothing_is_tried() -> None:
    def serve(count: int, seed: int) -> Try:
        raise AssertionError("no try is begun")

    assert most_served(serve, 256, until=0.0)["most"] == 0


class SimulatedLane:
    """Runs one thing after another, each for a second of a clock that goes on when one asks."""

    def __init__(self, clock: list[float]) -> None:
        self._clock, self._free_at = clock, 0.0
        self._ends: list[float] = []

    def launch(self, model: int) -> None:
        self._free_at = max(self._free_at, self._clock[0]) + 1.0
        self._ends.append(self._free_at)

    def ended(self) -> int:
        self._clock[0] += 0.001
        count = sum(end <= self._clock[0] for end in self._ends)
        self._ends = self._ends[count:]
        return count


@pytest.mark.parametrize(("lanes", "latencies"), [(1, [1, 2, 3, 1]), (2, [1, 1, 2, 1])])
def test_latencies_count_from_when_a_request_was_meant_to_come(
    lanes: int, latencies: list[float]
) -> None:
    clock = [0.0]

    def now() -> float:
        clock[0] += 0.001
        return clock[0]

    arrivals = [(0.0, 0), (0.0, 1), (0.0, 0), (10.0, 1)]
    found = served(arrivals, [SimulatedLane(clock) for _ in range(lanes)], now=now)
    assert sorted(late for _, late in found) == pytest.approx(sorted(latencies), abs=0.05)


def test_all_ways_are_asked_alike() -> None:
    arrivals = poisson(4, 30.0, 10.0, seed=0)
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == pytest.approx(1200, rel=0.15)
    assert {model for _, model in arrivals} == {0, 1, 2, 3}


def test_engines_are_tried_and_what_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PYTHON_PATH}:{ROOT / 'scripts'}")
    folders = [tmp_path / f"artifact-{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        tiny_artifact(folder, seed=seed)
    given = ["--device", "cpu", "--shares", "50", "--together", "", "--most", "2"]
    given += ["--within-ms", "10000", "--load-secs", "0.2", "--secs", "60"]
    given += ["--artifacts", json.dumps({"50": [str(folder) for folder in folders]})]
    given += ["--only", "engine, streams", "--only", "PyTorch, one after"]
    capacity.main([*given, "--out", str(tmp_path)])
    document: dict[str, Any] = json.loads((tmp_path / "capacity.json").read_text())
    assert document["found"]["engine, streams, tuned at 50%"]["most"] == 2
    assert "torch" in document["problems"]["PyTorch, one after another"]
    shown = capsys.readouterr().out
    assert "| engine, streams, tuned at 50% | 2 or more |" in shown
    assert "PyTorch, one after another: WorkerError" in shown


def test_the_table_says_what_was_aimed_at() -> None:
    def found(most: int) -> dict[str, Any]:
        tries = [{"count": most, "per_sec": 30.0 * most, "p99_ms": 9.0}]
        return {"most": most, "missed": most + 2, "tries": tries}

    asked = {"model": "resnet50", "precision": "fp16", "rate": 30, "within_ms": 10, "most": 256}
    labels = ("PyTorch, one after another", "PyTorch, 8 streams", "engine, streams, tuned at 12%")
    made = {label: found(most) for label, most in zip(labels, (60, 120, 190), strict=True)}
    shown = table({"asked": asked, "found": made})
    assert "| engine, streams, tuned at 12% | 190 | 5,700 | 9 | 3.17 (3.11 to 3.18) |" in shown
    assert "3 times: yes" in shown
    assert "1.25 times: yes" in shown


def test_each_way_has_a_name_of_its_own() -> None:
    labels = [way.label for way in ways_of([100, 12], ["8@100", "1x2@25"])]
    assert len(set(labels)) == len(labels)
