"""What the lab's comparison with PyTorch keeps of each model: by which command, and where."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.tensor_cores import compare_with_pytorch
from lab.tensor_cores.compare_with_pytorch import measure, run_folder, shown, tune

OUTCOME = {
    "verification": {"verdict": "right"},
    "tasks": [
        {"trials": 3, "weight": 2, "best_secs": 1e-5},
        {"trials": 1, "weight": 1, "best_secs": None},
    ],
    "time_use": {"phase_secs": {"search": 30.0, "whole model": 8.0}},
}


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        batch=1, budget="30s", gpu_pct=40, out=tmp_path, precision="fp16", seed=0, without=""
    )


def ends_with(monkeypatch: pytest.MonkeyPatch, stdout: str) -> None:
    """Let each command that is run print this and do nothing."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout, "")

    monkeypatch.setattr(compare_with_pytorch.subprocess, "run", run)


def test_a_tuning_is_kept_with_its_command_its_host_and_where_its_time_went(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_folder(options, "resnet50") / "artifact").mkdir(parents=True)
    ends_with(monkeypatch, json.dumps(OUTCOME))
    found = tune(options, "resnet50")
    assert found["command"][1:4] == ["-m", "tunerd", "tune"]
    assert found["command"][found["command"].index("--budget") + 1] == "30s"
    assert found["host"]["cores"]
    assert found["time_use"] == OUTCOME["time_use"]
    assert (found["trials"], found["kernels_secs"]) == (4, 2e-5)
    ends_with(monkeypatch, "")
    assert tune(options, "resnet50") == json.loads(json.dumps(found))  # not tuned again


def test_a_tuning_that_says_nothing_is_kept_with_its_command_too(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(monkeypatch, "")
    found = tune(options, "resnet50")
    assert found["command"][1:4] == ["-m", "tunerd", "tune"]
    assert "time_use" not in found


@pytest.mark.parametrize("said", ['FOUND {"secs": {"x": [1.0]}, "problems": {}}', ""])
def test_samples_are_kept_with_the_command_that_took_them(
    said: str, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with(monkeypatch, said)
    monkeypatch.setattr("sys.argv", ["compare_with_pytorch.py", "--models", "resnet50"])
    found = measure(options, "resnet50", {})
    assert found["command"] == ["compare_with_pytorch.py", "--models", "resnet50"]
    assert found["host"]["cores"]
    assert found.get("secs") == ({"x": [1.0]} if said else None)


def test_a_captured_artifact_has_a_column_and_is_no_rival_of_its_plain_calls() -> None:
    secs = {"eager fp16": [4e-3] * 3, "tunerd fp16": [2e-3] * 3, "captured": [1e-3] * 3}
    measured = {"resnet50": {"tuning": {"secs": 60.0}, "measured": {"secs": secs}}}
    heads, _, row = shown({"precision": "fp16", "models": measured}).splitlines()
    cells = dict(zip(heads.split("|"), row.split("|"), strict=True))
    found = {head.strip(): cell.strip() for head, cell in cells.items()}
    assert (found["tunerd fp16"], found["captured"]) == ("2.000", "1.000")
    assert found["faster than the best of the others"] == "2.00 (2.00 to 2.00), eager fp16"
