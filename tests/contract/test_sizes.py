"""Several sizes of one model: which are asked for, what may be padded, and what a call does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import tunerd
from tests.contract.test_loading import edit_manifest
from tests.lib.models import floats, ints, model
from tests.lib.sized_models import BATCHES, by_hand, compiled, packed, products, saved
from tunerd.artifacts.manifest import (
    MANIFEST,
    SIZED_VERSION,
    WEIGHTS,
    LoadError,
    check_files,
    read_variants,
)
from tunerd.artifacts.one_size import size_of
from tunerd.artifacts.packing import pack_shares, pack_sizes
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, FolderError, InputError
from tunerd.frontend.padding import axes_of
from tunerd.records.paths import Paths
from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.studies.sizes import runs_of

Captured = pytest.CaptureFixture[str]


def batch_mean() -> onnx.ModelProto:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    return model(nodes, inputs={"x": ("batch", 6)}, outputs={"y": ("batch", 6)})


def attention(*, masked: bool) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Transpose", ["x"], ["xt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "xt"], ["scores"]),
        helper.make_node("Sub", ["mask", "one"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "much"], ["bias"]),
        helper.make_node("Unsqueeze", ["bias", "axis"], ["row"]),
        helper.make_node("Add", ["scores", "row"], ["biased"]),
        helper.make_node("Softmax", ["biased" if masked else "scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "x"], ["y"]),
    ]
    weights = {"one": np.float32([1]), "much": np.float32([1e4]), "axis": ints(1)}
    return model(
        nodes if masked else [*nodes[:2], *nodes[6:]],
        inputs={"x": ("batch", "length", 4)} | ({"mask": ("batch", "length")} if masked else {}),
        outputs={"y": ("batch", "length", 4)},
        weights=weights if masked else {},
    )


def settings(**values: Any) -> TuneSettings:
    return checked(TuneSettings, {"model": Path("net.onnx"), "cpu_pct": 50, **values})


# --- what is asked for -------------------------------------------------------------------------


def test_one_size_of_each_dimension_is_one_run() -> None:
    assert settings(dims=["batch=1", "length=8"]).sizes == ()
    assert settings(dims=["batch=4"]).dims == settings(dims={"batch": (4,)}).dims == {"batch": 4}


def test_sizes_of_several_dimensions_are_read_side_by_side() -> None:
    given = settings(dims=["batch=1,8", "length=128,32", "width=3"])
    assert given.sizes == (
        {"batch": 1, "length": 128, "width": 3},
        {"batch": 8, "length": 32, "width": 3},
    )
    assert given.out == Path("runs/net-batch1x8-length128x32-width3-cpu50")
    assert settings(dims={"batch": (1, 8), "length": [128, 32], "width": 3}).sizes == given.sizes


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (["batch=1,4,8", "length=32,64"], "list as many of each"),
        (["batch=1,1"], "twice"),
        (["batch=1,x"], "'batch=x' is not NAME=SIZE"),
        (["batch=0,1"], "'batch=0' is not NAME=SIZE"),
        ({"batch": (1, 0)}, "1 or more"),
        (["batch=1,4", "batch=2,8"], "given twice"),
    ],
)
def test_sizes_that_cannot_be_are_refused(dims: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        settings(dims=dims)


@pytest.mark.parametrize(
    "other", [{"cpu_pct": "auto"}, {"precision": "auto"}, {"inputs": Path("x.npz")}]
)
def test_what_has_one_size_does_not_go_with_several(other: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--dim or --batch lists several"):
        settings(dims=["batch=1,4"], **other)


def test_sizes_of_the_batch_are_read_side_by_side_with_others() -> None:
    given = settings(batch="1,4,8")
    assert given.sizes == ({"batch": 1}, {"batch": 4}, {"batch": 8})
    assert given.out == Path("runs/net-b1x4x8-cpu50")
    both = settings(batch=(1, 4), dims=["length=8,16", "width=3"])
    runs = [run.settings for run in runs_of(both)]
    assert [(one.batch, one.dims) for one in runs] == [
        (1, {"length": 8, "width": 3}),
        (4, {"length": 16, "width": 3}),
    ]
    assert settings(batch="4").batch == settings(batch=(4,)).batch == 4
    assert settings(batch="4").sizes == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": "1,x"}, "'1,x' is no batch size"),
        ({"batch": "0"}, "'0' is no batch size"),
        ({"batch": "1,1"}, "twice"),
        ({"batch": "1,4", "dims": ["batch=2"]}, "both list the batch"),
        ({"batch": "1,4", "dims": ["length=1,2,3"]}, "list as many of each"),
    ],
)
def test_batches_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        settings(**given)


def test_each_size_has_samples_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "batch4").mkdir()
    (tmp_path / "batch1.npz").write_bytes(b"")
    runs = runs_of(settings(dims=["batch=1,4"], inputs=tmp_path))
    assert [run.settings.inputs for run in runs] == [tmp_path / "batch1.npz", tmp_path / "batch4"]
    with pytest.raises(InputError, match=r"has no batch8\.npz, and no folder batch8"):
        runs_of(settings(dims=["batch=1,8"], inputs=tmp_path))


# --- what may be padded ------------------------------------------------------------------------


def test_rows_that_do_not_see_each_other_may_be_padded(tmp_path: Path) -> None:
    found = axes_of(saved(products(), tmp_path), BATCHES, shapes={}, batch=None)
    assert found == {"batch": {"inputs": {"x": [0]}, "outputs": {"y": [0]}, "pads": True}}


def test_rows_that_see_each_other_may_not(tmp_path: Path) -> None:
    found = axes_of(saved(batch_mean(), tmp_path), BATCHES, shapes={}, batch=None)
    assert found["batch"]["pads"] is False


def test_the_batch_is_the_first_axis_whatever_it_is_called(tmp_path: Path) -> None:
    proto = products()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    found = axes_of(saved(proto, tmp_path), BATCHES, shapes={}, batch=1, leading="batch")
    assert found == {"batch": {"inputs": {"x": [0]}, "outputs": {"y": [0]}, "pads": True}}


@pytest.mark.parametrize("masked", [True, False])
def test_a_sequence_may_be_padded_where_a_mask_hides_its_end(tmp_path: Path, masked: bool) -> None:
    sizes = ({"batch": 1, "length": 8}, {"batch": 2, "length": 16})
    found = axes_of(saved(attention(masked=masked), tmp_path), sizes, shapes={}, batch=None)
    assert found["batch"]["pads"] is True
    assert found["length"]["pads"] is masked


# --- the artifact ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(products(), BATCHES, tmp_path_factory.mktemp("sized"))


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_call_takes_any_number_of_rows_up_to_the_largest(artifact: Path, rows: int) -> None:
    loaded = tunerd.load(artifact)
    assert isinstance(loaded, tunerd.SizedModel)
    assert loaded.sizes == BATCHES
    x = floats(rows, 6, seed=rows)
    (y,) = loaded(x).values()
    assert y.shape == (rows, 5)
    np.testing.assert_allclose(y, by_hand(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_the_sizes_have_one_copy_of_the_weights(artifact: Path) -> None:
    first, second = (
        v["weights"] for v in json.loads((artifact / MANIFEST).read_text())["variants"]
    )
    assert first == second
    assert len(list(artifact.glob("*.bin"))) == 1
    loaded = tunerd.load(artifact)
    assert isinstance(loaded, tunerd.SizedModel)
    small, large = loaded.at(batch=1).weights, loaded.weights
    assert all(small[name].same_as(large[name]) for name in first)


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_inputs_that_no_size_holds_are_refused_with_the_sizes(artifact: Path) -> None:
    loaded = tunerd.load(artifact)
    with pytest.raises(ValueError, match="batch=5; the artifact was compiled for batch=1; batch=4"):
        loaded(floats(5, 6))
    with pytest.raises(ValueError, match="the model takes"):
        loaded(floats(3, 7))


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_inputs_are_not_padded_where_that_would_change_results(tmp_path: Path) -> None:
    loaded = tunerd.load(packed(batch_mean(), BATCHES, tmp_path))
    x = floats(4, 6)
    np.testing.assert_allclose(loaded(x)["y"], x - x.mean(0), atol=1e-6)
    with pytest.raises(ValueError, match="no dimension is padded"):
        loaded(floats(3, 6))


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_a_masked_sequence_is_padded_and_cut(tmp_path: Path) -> None:
    sizes = ({"batch": 1, "length": 8}, {"batch": 2, "length": 16})
    loaded = tunerd.load(packed(attention(masked=True), sizes, tmp_path))
    x = floats(1, 11, 4)
    scores = np.exp(x @ x.transpose(0, 2, 1))
    y = loaded(x, np.ones((1, 11), np.float32))["y"]
    np.testing.assert_allclose(y, scores / scores.sum(-1, keepdims=True) @ x, rtol=1e-4, atol=1e-5)


def with_folded_sizes() -> onnx.ModelProto:
    """Return a model with a tensor that each size has another of: w times the shape of x."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Cast", ["shape"], ["sizes"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["w", "sizes"], ["scaled"]),
        helper.make_node("MatMul", ["x", "v"], ["product"]),
        helper.make_node("Add", ["product", "scaled"], ["y"]),
    ]
    return model(
        nodes,
        inputs={"x": ("batch", 2)},
        outputs={"y": ("batch", 2)},
        weights={"w": floats(64, 2)[:1], "v": floats(2, 2)},
    )


def test_a_tensor_that_one_size_folds_otherwise_is_added_alone(tmp_path: Path) -> None:
    from tunerd.artifacts.loading import map_weights

    to = packed(with_folded_sizes(), BATCHES, tmp_path)
    first, second = json.loads((to / MANIFEST).read_text())["variants"]
    shared = set(first["weights"]) & set(second["weights"])
    stored = map_weights(to / WEIGHTS)
    assert len(shared) == 1
    assert stored.keys() == set(first["weights"]) | set(second["weights"])
    assert len(stored) == 3


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_weights_of_all_sizes_are_copied_from_a_model_that_has_them(tmp_path: Path) -> None:
    loaded = tunerd.load(packed(with_folded_sizes(), BATCHES, tmp_path))
    copy = Path(shutil.copytree(tmp_path / "artifact", tmp_path / "copy"))
    (copy / WEIGHTS).write_bytes(b"not read")
    alike = tunerd.load(copy, beside=[loaded])
    for rows in (1, 4):
        x = floats(rows, 2)
        np.testing.assert_array_equal(alike(x)["y"], loaded(x)["y"])


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_weights_of_which_a_model_has_those_of_one_size_are_read(tmp_path: Path) -> None:
    folder = packed(with_folded_sizes(), BATCHES, tmp_path)
    with size_of(Path(f"{folder}#batch=4")) as one:
        alone = tunerd.load(one)
    both = tunerd.load(folder, beside=[alone])
    x = floats(4, 2)
    np.testing.assert_array_equal(both(x)["y"], alone(x)["y"])
    assert both(x[:1])["y"].shape == (1, 2)


def test_an_artifact_of_several_sizes_is_not_taken_for_one(artifact: Path) -> None:
    with pytest.raises(LoadError, match="holds 2 sizes, batch=1; batch=4"):
        read_variants(artifact)


def test_a_manifest_with_axes_that_no_input_has_is_refused(artifact: Path, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        assert manifest["format_version"] == SIZED_VERSION
        for variant in manifest["variants"]:
            variant["axes"]["batch"]["inputs"]["x"] = [7]

    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    edit_manifest(copy, change)
    with pytest.raises(LoadError, match="sizes are none"):
        tunerd.load(copy)


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_artifacts_of_the_same_sizes_are_packed_by_share(artifact: Path, tmp_path: Path) -> None:
    path = saved(products(), tmp_path)
    sources = [(s, compiled(path, s, tmp_path / str(s["batch"]), pct=100)) for s in BATCHES]
    other = tmp_path / "other"
    pack_sizes(sources, axes_of(path, BATCHES, shapes={}, batch=None), other)
    variants = pack_shares([artifact, other], tmp_path / "both")
    assert len(variants) == 4
    x = floats(3, 6)
    loaded = tunerd.load(tmp_path / "both")
    np.testing.assert_allclose(next(iter(loaded(x).values())), by_hand(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="has not the sizes of the others"):
        pack_shares([artifact, tmp_path / "1"], tmp_path / "none")


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_a_size_has_the_weights_of_the_share_that_it_runs_at(tmp_path: Path) -> None:
    """Shares may lay out a tensor of one name differently, and sizes may run at other shares."""
    here = len(os.sched_getaffinity(0))

    def at_share(seed: int, cores: dict[int, int]) -> Path:
        place = tmp_path / str(seed)
        place.mkdir()
        made = packed(products(seed), BATCHES, place)

        def change(manifest: dict[str, Any]) -> None:
            for variant in manifest["variants"]:
                variant["model"]["digest"] = "one"
                variant["share"]["sm_counts"] = [cores[variant["sizes"]["batch"]]]

        edit_manifest(made, change)
        return made

    sources = [at_share(0, {1: here, 4: 64 * here}), at_share(1, {1: 64 * here, 4: here})]
    pack_shares(sources, tmp_path / "both")
    loaded = tunerd.load(tmp_path / "both")
    for rows, seed in ((1, 0), (4, 1)):
        (y,) = loaded(x := floats(rows, 6)).values()
        np.testing.assert_allclose(y, by_hand(x, seed), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_one_size_is_an_artifact_of_its_own(artifact: Path) -> None:
    with size_of(Path(f"{artifact}#batch=4")) as folder:
        (only,) = read_variants(folder)
        check_files(folder, [only])
        loaded = tunerd.load(folder)
        x = floats(4, 6)
        np.testing.assert_allclose(loaded(x)["y"], by_hand(x), rtol=1e-5, atol=1e-6)
    assert not folder.exists()
    with size_of(artifact) as folder:
        assert folder == artifact
    with pytest.raises(InputError, match="no size 'batch=5'; it has batch=1; batch=4"):
        size_of(Path(f"{artifact}#batch=5")).__enter__()


def test_one_size_is_compared_and_benched_by_its_name(artifact: Path) -> None:
    for call in (tunerd.bench, lambda source: tunerd.compare(source, source)):
        with pytest.raises(LoadError, match=r"`tunerd compare` take .*#batch=1"):
            call(artifact)
        with pytest.raises(InputError, match="no size 'batch=2'"):
            call(f"{artifact}#batch=2")


# --- a tuning ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("kept_cluster")
def test_a_run_of_several_sizes_leaves_one_artifact(tmp_path: Path, capsys: Captured) -> None:
    path, out = saved(products(), tmp_path), tmp_path / "run"
    flags = ["--gpu-pct", "50", "--slice", "simulated", "--trials", "2", "--out", str(out)]
    flags += ["--tuners", "1", "--slices", "1"]
    code = run(app, ["tune", str(path), *flags, "--dim", "batch=1,4", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == document["exit_code"]
    assert code in (ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL)
    assert [each["sizes"] for each in document["sizes"]] == list(BATCHES)
    assert document["padded"] == ["batch"]
    assert all(each["verification"]["verdict"] == "right" for each in document["sizes"])
    assert (out / "report.html").is_file()
    assert {each.name for each in Paths(out).sizes.iterdir()} >= {"batch1", "batch4"}
    with pytest.raises(FolderError, match="for each of several sizes"):
        tunerd.open_run(out)
    again = tunerd.tune_sizes(
        path,
        gpu_pct=50,
        slice_kind="simulated",
        trials=2,
        tuners=1,
        slices=1,
        out=out,
        dims={"batch": (1, 4)},
    )
    assert [len(one.tasks) for one in again.runs] == [1, 1]


def test_a_folder_of_something_else_takes_no_sizes(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(FolderError, match="holds 'mine'"):
        tunerd.tune_sizes(
            saved(products(), tmp_path),
            cpu_pct=50,
            out=tmp_path,
            dims={"batch": (1, 4)},
        )


def test_one_size_and_several_are_asked_for_apart(tmp_path: Path) -> None:
    path = saved(products(), tmp_path)
    with pytest.raises(InputError, match="tune_sizes"):
        tunerd.tune(path, cpu_pct=50, dims={"batch": (1, 4)})
    with pytest.raises(InputError, match=r"tunerd\.tune"):
        tunerd.tune_sizes(path, cpu_pct=50, dims={"batch": 4})
