"""The lab's trace of jobs on real devices: here parts of the cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.placement import real_trace
from tests.lib import PYTHON_PATH, ROOT
from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.colocation_plans import CORES


@pytest.mark.skipif(len(CORES) < 2, reason="two devices take two cores")
def test_a_trace_is_carried_out_once_under_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PYTHON_PATH}:{ROOT / 'scripts'}")
    tiny_artifact(tmp_path / "artifact")
    given = [f"net={tmp_path / 'artifact'}", "--cores", "2", "--jobs", "2", "--grace", "0s"]
    given += [
        "--median-secs",
        "0.1",
        "--alone-secs",
        "0.1",
        "--between-secs",
        "0.1",
        "--gib",
        "0.1",
        "0.2",
    ]
    given += ["--policies", "round-robin", "--out", str(tmp_path / "out")]
    real_trace.main(given)
    path = tmp_path / "out" / "real-trace.json"
    (found,) = json.loads(path.read_text())["found"].values()
    assert not found["failed"]
    assert len(found["wait_secs"]) == 2
    assert "| round-robin |" in capsys.readouterr().out
    before = path.read_text()
    real_trace.main(given)
    assert json.loads(path.read_text())["found"] == json.loads(before)["found"]


def test_the_table_holds_each_policy_against_a_device_for_each_job() -> None:
    def found(secs: float, joules: float | None) -> dict[str, Any]:
        return {"makespan_secs": secs, "joules": joules, "wait_secs": [1.0, 3.0], "recovered": 2,
                "failed": {}}  # fmt: skip

    document = {"exclusive": found(100.0, 50e3), "estimated": found(60.0, 45e3)}
    shown = real_trace.tables({"found": document, "problems": {}})
    row = next(line for line in shown.splitlines() if line.startswith("| estimated"))
    assert "60.0 | 40.0% (yes: 35%) | 45.0 | 10.0% (no: 15%) | 2.0 | 2.9 | 2 | 0 |" in row
