"""The lab's script of models on one device, from artifacts over workers to its table, on cores."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from lab.colocation import saturation, tenants
from lab.colocation.tenants import Kind
from tests.lib import PYTHON_PATH, ROOT
from tests.lib.models import example_models, load_model
from tests.lib.super_models import artifact_of, super_artifact
from tunerd.artifacts.loading import load
from tunerd.artifacts.manifest import LIBRARY
from tunerd.runs.finals.verify import expected_of
from tunerd.vocabulary.verdict import Verdict

ALONE, TOGETHER = Kind("encoder", 50), Kind("encoder", 100, by=(8,))
pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, and what `tunerd tune` would leave of it, with default schedules."""
    folder = tmp_path_factory.mktemp("runs")
    proto = example_models().transformer_encoder(layers=1, hidden=16, heads=2, tokens=6, seed=0)
    onnx.save(proto, str(folder / "encoder-0.onnx"))
    model = load_model(folder / "encoder-0.onnx")
    artifact_of(model, ALONE.run(folder) / "artifact")
    super_artifact(model, TOGETHER.run(folder) / "artifact", (1, 2))
    return folder


def test_others_have_the_kernels_of_the_first_and_weights_of_their_own(runs: Path) -> None:
    folders, took = tenants.made(ALONE, 2, runs, budget="1s")
    assert list(took) == ["export", "tune", "compile"]
    first, other = (load(folder) for folder in folders)
    assert first.manifest["files"][LIBRARY] == other.manifest["files"][LIBRARY]
    found = expected_of(load_model(runs / "encoder-1.onnx")).verify(other.__call__)
    assert found.verdict is Verdict.RIGHT
    wrong = expected_of(load_model(runs / "encoder-1.onnx")).verify(first.__call__)
    assert wrong.verdict is Verdict.WRONG


def test_engines_are_sampled_and_what_cannot_be_is_in_the_table_with_a_reason(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PYTHON_PATH}:{ROOT / 'scripts'}")
    alone, together = (tenants.made(kind, 2, runs, budget="1s")[0] for kind in (ALONE, TOGETHER))
    assert together[1] == alone[1]  # the weights of one are the weights of the other
    given = ["--device", "cpu", "--shares", "50", "--together", "8@100", "--turns", "1"]
    given += ["--artifacts", json.dumps({50: [str(folder) for folder in alone]})]
    given += ["--launches", json.dumps({"8@100": [str(folder) for folder in together]})]
    given += ["--only", "engine, space", "--only", "MPS, without", "--sample-secs", "0.1"]
    saturation.main([*given, "--out", str(tmp_path)])
    document = json.loads((tmp_path / "saturation.json").read_text())
    engines = {"engine, space, tuned at 50%", "engine, space-time, 8 together, tuned at 100%"}
    assert set(document["turns"][0]["samples"]) == set(document["first"]) == engines
    assert (
        "there is no MPS daemon"
        in document["problems"]["PyTorch, 8 processes in MPS, without a limit"]
    )
    shown = capsys.readouterr().out
    assert all(f"| {label} |" in shown for label in engines)
