"""`tunerd tenant`: the weights of one more model for an artifact that serves several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import tunerd
from tests.lib.models import conv_net, example_models
from tests.lib.super_models import ENCODER, artifact_of, super_artifact, tenant
from tunerd.artifacts.loading import LoadError, map_weights
from tunerd.artifacts.manifest import MANIFEST, WEIGHTS, read_tenant, sealed
from tunerd.artifacts.super_model import SuperModel
from tunerd.cli.app import app
from tunerd.errors import InputError, WrongResultError
from tunerd.studies.tenant import make_tenant
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary.verdict import Verdict

pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an artifact, `super`, two models of its architecture, and one of them alone."""
    folder = tmp_path_factory.mktemp("tenants")
    super_artifact(tenant(ENCODER, 0, folder), folder / "super", (1, 2))
    artifact_of(tenant(ENCODER, 1, folder), folder / "alone")
    return folder


def test_another_models_weights_become_a_tenant(world: Path, tmp_path: Path) -> None:
    made = make_tenant(world / "encoder-1.onnx", world / "super", tmp_path / "tenant")
    assert made.verification is not None
    assert made.verification.verdict is Verdict.RIGHT
    assert sorted(p.name for p in made.folder.iterdir()) == [MANIFEST, WEIGHTS]
    model = tunerd.load(world / "super")
    assert isinstance(model, SuperModel)
    model.add("other", made.folder)
    # The file is a piece, which is not copied on the host.
    assert model._tenants["other"].ctypes.data % 64 == 0
    assert read_tenant(made.folder)["libraries"].keys() == {"1", "2"}
    inputs = [random_inputs(model.inputs, seed) for seed in (0, 1)]
    found = model.run([("other", inputs[0]), (model.own, inputs[1])])
    alone = tunerd.load(world / "alone")(inputs[0])
    np.testing.assert_allclose(found[0]["encoded"], alone["encoded"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1]["encoded"], model(inputs[1])["encoded"], atol=1e-6)


def test_the_command_says_what_it_made(world: Path, tmp_path: Path) -> None:
    command = ["tenant", str(world / "encoder-1.onnx"), "--like", str(world / "super")]
    done = CliRunner().invoke(app, [*command, "--to", str(tmp_path / "a"), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["folder"] == str(tmp_path / "a")
    assert said["verification"]["verdict"] == "right"
    done = CliRunner().invoke(app, [*command, "--to", str(tmp_path / "b"), "--no-verify"])
    assert done.stdout.strip() == f"{tmp_path / 'b'}: 0.0 MiB of weights of encoder-1"


def test_models_of_another_architecture_are_refused_by_what_is_different(
    world: Path, tmp_path: Path
) -> None:
    onnx.save(conv_net(), tmp_path / "conv.onnx")
    wide = example_models().transformer_encoder(layers=1, hidden=32, heads=2, tokens=6)
    onnx.save(wide, tmp_path / "wide.onnx")
    heads = example_models().transformer_encoder(layers=1, hidden=16, heads=4, tokens=6)
    onnx.save(heads, tmp_path / "heads.onnx")
    long = example_models().transformer_encoder(layers=2, hidden=16, heads=2, tokens=6)
    onnx.save(long, tmp_path / "long.onnx")
    for name, reason in (
        ("heads", "kernels are others, as"),
        ("long", r"it has \d+ weights and that one \d+, where"),
    ):
        with pytest.raises(InputError, match=reason):
            make_tenant(tmp_path / f"{name}.onnx", world / "super", tmp_path / "tenant")
    for name in ("conv", "wide"):
        with pytest.raises(InputError):
            make_tenant(tmp_path / f"{name}.onnx", world / "super", tmp_path / "tenant")
    with pytest.raises(InputError, match="--tenants"):
        make_tenant(world / "encoder-1.onnx", world / "alone", tmp_path / "tenant")
    assert not (tmp_path / "tenant").exists()


def test_a_tenant_that_computes_something_else_is_not_written(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SuperModel.run
    monkeypatch.setattr(
        SuperModel, "run", lambda model, asked: run(model, [(model.own, i) for _, i in asked])
    )
    with pytest.raises(WrongResultError, match="as a tenant of"):
        make_tenant(world / "encoder-1.onnx", world / "super", tmp_path / "tenant")
    assert not (tmp_path / "tenant").exists()


def test_weights_alone_are_no_artifact(world: Path, tmp_path: Path) -> None:
    made = make_tenant(world / "encoder-1.onnx", world / "super", tmp_path / "t", verify=False)
    assert made.verification is None
    assert set(map_weights(made.folder / WEIGHTS)) == set(map_weights(world / "super" / WEIGHTS))
    with pytest.raises(LoadError, match="weights of one tenant and no kernels"):
        tunerd.load(made.folder)
    said = json.loads((made.folder / MANIFEST).read_text())
    (made.folder / MANIFEST).write_text(json.dumps(sealed(said | {"weights": "all"})))
    with pytest.raises(LoadError, match="cannot be read"):
        read_tenant(made.folder)
