"""Three nights of a pipeline on slices of cores: tuned, taken from the store, and a regression."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.lib import PYTHON_PATH, ROOT
from tests.lib.models import model
from tunerd.errors import ExitCode
from tunerd.records import Store

RECIPE = """\
model: net.onnx
cpu-pct: 50
trials: 32
tuners: 1
seed: 0
preflight: {cpu-only: true, max-load: 1000}
gate: {fail-above: 50%, cannot-tell: pass}
"""
NAME = "net-cpu50"


def two_sums() -> onnx.ModelProto:
    """Return two kernels and no more, each many times slower in its default schedule."""
    nodes = [
        helper.make_node("ReduceSum", [f"x{i}", "axes"], [f"y{i}"], keepdims=0) for i in range(2)
    ]
    return model(
        nodes,
        inputs={"x0": (1000, 169), "x1": (1152, 144)},
        outputs={"y0": (1000,), "y1": (1152,)},
        weights={"axes": np.array([1], np.int64)},
    )


@dataclass
class Pipeline:
    folder: Path

    def night(self, name: str, *flags: str) -> tuple[int, dict[str, Any], str]:
        """Run recipes/nightly.sh; return its exit code, its summary's one run and its report."""
        done = subprocess.run(
            [ROOT / "recipes" / "nightly.sh", "night.yaml", *flags],
            cwd=self.folder,
            env=os.environ
            | {
                "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": PYTHON_PATH,
                "TUNERD_NIGHT": name,
                "TUNERD_NIGHTLY": "kept",
                "TUNERD_STORE": f"sqlite:///{self.folder / 'team.sqlite'}",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        night = self.folder / "kept" / name
        (run,) = json.loads((night / "summary.json").read_text())["runs"]
        print(done.stderr[-4000:])  # pytest shows it of a test that fails
        return done.returncode, run, (night / "report.md").read_text()

    def base(self) -> str:
        return os.readlink(self.folder / "kept" / "base" / NAME)

    def searched(self, name: str) -> int:
        with Store.read(self.folder / "kept" / name / NAME) as store:
            return sum(not r.candidate.is_default for r in store.records())


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    onnx.save(two_sums(), tmp_path / "net.onnx")
    (tmp_path / "night.yaml").write_text(RECIPE)
    program = tmp_path / "bin" / "tunerd"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tunerd "$@"\n')
    program.chmod(0o755)
    return Pipeline(tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
def test_three_nights_tune_then_hit_the_store_then_fail_at_the_gate(pipeline: Pipeline) -> None:
    code, run, report = pipeline.night("first")
    assert (code, run["gate_exit_code"]) == (0, None)
    assert run["exit_code"] <= ExitCode.CANNOT_TELL  # beside ONNX Runtime
    assert run["is_base"]
    assert pipeline.base() == f"../first/{NAME}"
    assert pipeline.searched("first") == 32
    assert "faster than the default schedules" in report

    # The whole model is in the store: a run that may not tune ends well, without one trial.
    code, run, _ = pipeline.night("second", "--set", "require-hit=true")
    assert (code, run["gate_exit_code"]) == (0, 0)
    assert run["gate_verdict"] in ("better", "same", "cannot tell")
    assert pipeline.searched("second") == 0

    # One trial, and nothing to take from: at least one of the kernels stays at its default.
    before = pipeline.base()
    empty = f"store=sqlite:///{pipeline.folder / 'empty.sqlite'}"
    code, run, report = pipeline.night("third", "--set", "trials=1", "--set", empty)
    assert code == ExitCode.REGRESSION, run
    assert (run["gate_verdict"], run["gate_exit_code"]) == ("worse", ExitCode.REGRESSION)
    assert not run["is_base"]
    assert pipeline.base() == before
    assert "first" in report or "second" in report
    assert "third" in report
