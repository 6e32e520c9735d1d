"""Artifacts that call a library."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tunerd
from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.build_fixtures import LLVM, built
from tests.lib.fake_cublaslt import FakeCublasLt
from tests.lib.library_tasks import SOURCE, default_and_tuned, fake, on_host, pointwise  # noqa: F401  fixtures
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.libraries import library_needs, mismatches
from tunerd.artifacts.loading import LoadError, map_weights
from tunerd.artifacts.manifest import sealed
from tunerd.builder.build import build_candidate
from tunerd.candidates.libraries.recipe import Recipe
from tunerd.libraries import packages
from tunerd.libraries.cublaslt import MatmulCall
from tunerd.vocabulary import CUBLASLT, Candidate, LibraryCall, Task, default_candidate


def winner(task: Task) -> Candidate | None:
    recipe = Recipe(2, 52, "").text
    try:
        SOURCE.lower(task, recipe)
    except ValueError:
        return None
    return Candidate.of_recipe(task.task_id, recipe, source=CUBLASLT)


def test_an_artifact_names_what_it_calls_and_has_biases_in_its_type(tmp_path: Path) -> None:
    found = pointwise()
    winners = {t.task_id: w for t in found.tasks if (w := winner(t)) is not None}
    assert len(winners) == 2
    folder = compile_artifact(
        found.lowered,
        found.tasks,
        winners,
        found.tasks[0].target,
        tmp_path / "artifact",
        model=found.model,
        pct=40,
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    (need,) = manifest["libraries"]
    assert need["name"] == CUBLASLT
    assert (need["package"], need["soname"]) == ("nvidia-cublas", "libcublasLt.so.13")
    assert need["least"] == "13.0.0"
    texts = [MatmulCall.parse(text) for text in need["calls"]]
    assert {(c.rank, c.sms, c.activation, c.has_bias) for c in texts} == {(2, 52, "relu", True)}
    assert sorted(c.c is not None for c in texts) == [False, True]
    rounded = [name for name in manifest["weights"] if name.endswith("_float16")]
    weights = map_weights(folder / "weights.bin")
    assert len(rounded) == 2
    for name in rounded:
        wide = weights[name.removesuffix("_float16")]
        np.testing.assert_array_equal(weights[name], wide.astype(np.float16))
    library = (folder / "model.so").read_bytes()
    assert all(text.encode() in library for text in need["calls"])


def test_a_weight_in_another_type_agrees_with_the_default(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, where the stand-in computes; the kernel's bias is rounded for it."""
    from tunerd.runner.agreement import disagreement
    from tunerd.runner.sampling import CpuDevice

    on_host(monkeypatch)
    task = next(t for t in pointwise().tasks if winner(t) is not None)
    chosen = winner(task)
    assert chosen is not None
    lowered = SOURCE.lower(task, chosen.recipe)
    here = replace(task, target=LLVM)
    build = built(build_candidate(here, chosen, lowered=lowered))
    assert [s.dtype for s in build.args] == ["float16"] * len(build.args)
    reference = built(build_candidate(here, default_candidate(here)))
    assert disagreement(CpuDevice([0]), reference, build) is None
    assert fake.ranks == [2, 2]


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_a_model_that_calls_a_library_computes_what_the_default_model_does(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the host, where the stand-in computes: biases, residual and workspace are in place."""
    on_host(monkeypatch)
    found = pointwise()
    winners = {t.task_id: w for t in found.tasks if (w := winner(t)) is not None}
    x = np.random.default_rng(0).standard_normal((1, 3, 14, 14)).astype(np.float32)
    models = default_and_tuned(found, winners, folder=tmp_path)
    outputs = [model(x)["y"] for model in models]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-2, atol=1e-2)
    assert fake.ranks == [2, 2]


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_an_artifact_is_not_loaded_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_artifact(tmp_path / "artifact")
    need = {"name": CUBLASLT, "title": "cuBLASLt", "version": "13.1.0", "calls": ["{}"]}
    said = json.loads((tmp_path / "artifact/manifest.json").read_text())
    monkeypatch.setattr(packages, "missing", lambda name: "pip install nvidia-cublas")
    for name, sentence in (
        (CUBLASLT, "the artifact calls a library: pip install nvidia-cublas"),
        ("other", "the library 'other', which this tunerd does not know"),
    ):
        changed = sealed(said | {"libraries": [need | {"name": name}]})
        (tmp_path / "artifact/manifest.json").write_text(json.dumps(changed))
        with pytest.raises(LoadError, match=sentence):
            tunerd.load(tmp_path / "artifact")


def test_another_version_than_that_of_the_tuning_is_said(fake: FakeCublasLt) -> None:
    manifest = {"libraries": library_needs([LibraryCall(CUBLASLT, "{}")])}
    assert list(mismatches(manifest)) == []
    fake.version = 130200
    assert list(mismatches(manifest)) == [
        "cuBLASLt is 13.2.0 here and was 13.10.0 where the artifact was made; it may choose other "
        "kernels"
    ]
