"""`tunerd tune --against`: PyTorch beside the tuned model, with a fake of PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from tests.contract.test_pytorch import FAKE_TORCH
from tests.lib import PYTHON_PATH
from tests.lib.models import model
from tunerd.errors import ExitCode

RELU = """
import numpy as np
import torch


class Relu(torch.nn.Module):
    def forward(self, x):
        return torch.Tensor(np.maximum(x.numpy(), 0.0))
"""


def tunerd(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((PYTHON_PATH, str(FAKE_TORCH)))
    return subprocess.run(
        [sys.executable, "-m", "tunerd", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def net(tmp_path: Path) -> Path:
    relu = model(
        [helper.make_node("Relu", ["x"], ["y"])], inputs={"x": (64, 64)}, outputs={"y": (64, 64)}
    )
    onnx.save(relu, tmp_path / "relu.onnx")
    (tmp_path / "relu.py").write_text(RELU)
    return tmp_path / "relu.onnx"


@pytest.mark.slow  # a whole run: the one test of all that stands between the flag and the report
def test_a_run_is_compared_with_pytorch(net: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    against = f"{tmp_path}/relu.py:Relu"
    options = ("--cpu-pct", "50", "--trials", "2", "--out", str(run), "--against", against)
    ended = tunerd("tune", str(net), *options, "--tuners", "1", "--slices", "1", "--json")
    assert ended.returncode in (ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL)
    found: dict[str, Any] = json.loads(ended.stdout)
    timed = {each["name"] for each in found["latencies"]}
    assert timed > {"pytorch eager", "pytorch compiled", "tuned beside pytorch", "tuned"}
    assert {each["name"] for each in found["rivals"]} > {"ONNX Runtime"}
    assert "torch 0.fake" in found["remarks"][0]
    told = (run / "artifact" / "manifest.json").read_text()
    assert "pytorch compiled" in told
    assert "torch 0.fake" in (run / "report.html").read_text()
    shown = tunerd("report", str(run), "--format", "markdown")
    assert "- torch.compile: torch 0.fake" in shown.stdout


def test_a_file_that_is_not_there_is_refused_at_once(net: Path) -> None:
    ended = tunerd("tune", str(net), "--cpu-pct", "50", "--against", "nowhere.py:net")
    assert ended.returncode == ExitCode.BAD_INPUT
    assert "--against: there is no file" in ended.stderr
    ended = tunerd("tune", str(net), "--cpu-pct", "50", "--against", "nowhere")
    assert ended.returncode == ExitCode.BAD_INPUT
    assert "give FILE.py:FUNCTION" in ended.stderr
