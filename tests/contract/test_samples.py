"""Inputs that a user gives: what is read, what is refused, and who uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save

import tunerd
from tests.lib.artifact_fixtures import model_of
from tunerd.artifacts.loading import load
from tunerd.errors import InputError
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.samples import MOST_SAMPLES, read_samples
from tunerd.runs.finals.verify import verify
from tunerd.system.arrays import verification_inputs
from tunerd.vocabulary import Arrays, TensorSpec
from tunerd.vocabulary.verdict import Verdict

SPECS = (
    TensorSpec("image", (1, 3, 4, 4), "float32"),
    TensorSpec("ids", (1, 6), "int64"),
    TensorSpec("rate", (), "int64"),
)


def written(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_nothing_given_is_no_sample() -> None:
    assert read_samples(None, SPECS, {}) == ()


def test_one_sample_makes_others_that_differ(tmp_path: Path) -> None:
    image, ids = np.ones((1, 3, 4, 4), "float32"), np.arange(6)[None]
    path = written(tmp_path / "one.npz", image=image, ids=ids, rate=np.int64(16000))
    samples = read_samples(path, SPECS, {})
    assert len(samples) == 3
    assert np.array_equal(samples[0]["image"], image)
    assert np.array_equal(samples[0]["ids"], ids)
    assert not np.array_equal(samples[1]["image"], image)
    assert set(samples[2]["ids"].flat) == set(range(6))  # indices stay those of the table
    for sample in samples:
        assert sample.keys() == {"image", "ids", "rate"}
        assert sample["rate"] == 16000
        assert all(sample[s.name].shape == s.shape for s in SPECS)
        assert all(sample[s.name].dtype == s.dtype for s in SPECS)


def test_samples_lie_behind_an_axis_of_their_own_or_in_several_files(tmp_path: Path) -> None:
    stack = np.random.default_rng(0).random((5, 1, 3, 4, 4))
    several = read_samples(written(tmp_path / "a.npz", image=stack), SPECS, {})
    assert len(several) == 5
    assert np.array_equal(several[4]["image"], stack[4].astype("float32"))
    written(tmp_path / "b.npz", image=stack[0])
    folder = read_samples(tmp_path, SPECS, {})
    assert len(folder) == 6
    assert np.array_equal(folder[5]["image"], folder[0]["image"])
    written(tmp_path / "c.npz", image=np.zeros((100, 1, 3, 4, 4)))
    assert len(read_samples(tmp_path, SPECS, {})) == MOST_SAMPLES


def test_a_number_stands_for_an_input(tmp_path: Path) -> None:
    samples = read_samples(None, SPECS, {"rate": 16000})
    assert [s["rate"] for s in samples] == [16000] * 3
    assert np.array_equal(samples[1]["image"], verification_inputs(SPECS, 1)["image"])


@pytest.mark.parametrize(
    ("arrays", "values", "said"),
    [
        ({"img": np.zeros(3)}, {}, "has an array 'img', and the model takes image, ids, rate"),
        ({"image": np.zeros((3, 4, 4))}, {}, r"of shape \[3, 4, 4\]; the model takes \[1, 3, 4"),
        ({"ids": np.zeros((1, 6))}, {}, "'ids' as float64; the model takes int64"),
        (
            {"image": np.zeros((2, 1, 3, 4, 4)), "ids": np.zeros((3, 1, 6), "int64")},
            {},
            "samples that do not go together: 2 of 'image', 3 of 'ids'",
        ),
        ({}, {}, "holds no array"),
        ({"image": np.zeros((0, 1, 3, 4, 4))}, {}, "do not go together: 0 of 'image'"),
        (None, {"speed": 1}, "--value names no input 'speed', only image, ids, rate"),
        (None, {"rate": 0.5}, "--value rate=0.5 is no int64"),
    ],
)
def test_what_fits_no_input_is_refused(
    tmp_path: Path, arrays: Arrays | None, values: dict[str, float], said: str
) -> None:
    path = None if arrays is None else written(tmp_path / "x.npz", **arrays)
    with pytest.raises(InputError, match=said):
        read_samples(path, SPECS, values)


def test_what_is_no_file_of_arrays_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", image=np.array([{}], dtype=object))
    for name in ("text.npz", "one.npy", "objects.npz"):
        with pytest.raises(InputError, match="cannot be read as inputs"):
            read_samples(tmp_path / name, SPECS, {})
    with pytest.raises(InputError, match=r"there is no file .*missing.npz; give inputs"):
        read_samples(tmp_path / "missing.npz", SPECS, {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no \.npz file"):
        read_samples(tmp_path / "empty", SPECS, {})


def test_a_model_that_noise_tells_nothing_of_is_judged_on_samples() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "small"], ["shifted"]),
        helper.make_node("Add", ["shifted", "one"], ["y"]),
    ]
    weights = {"small": np.full((4,), 1e-5), "one": np.ones((4,))}
    model = model_of(nodes, weights, inputs={"x": (2, 4)}, outputs={"y": (2, 4)})
    run = Reference(model.graph.proto).run
    assert verify(run, model).verdict is Verdict.CANNOT_TELL
    samples = [{"x": np.full((2, 4), value, "float32")} for value in (1e3, 5e4)]
    judged = verify(run, model, samples)
    assert judged.verdict is Verdict.RIGHT
    assert judged.message == "all outputs agree with ONNX Runtime on 2 samples"
    assert (judged.seeds, judged.inputs) == (2, "sample")


def rated() -> Any:
    """A model that divides by an integer, which random inputs would set to 0."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["rate"], ["r"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["x", "r"], ["scaled"]),
            helper.make_node("MatMul", ["scaled", "scaled"], ["y"]),
        ],
        "rated",
        [value("x", TensorProto.FLOAT, [16, 16]), value("rate", TensorProto.INT64, [])],
        [value("y", TensorProto.FLOAT, [16, 16])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.slow
def test_a_run_verifies_and_times_on_what_is_given(tmp_path: Path) -> None:
    save(rated(), tmp_path / "rated.onnx")
    given = np.random.default_rng(0).random((16, 16), "float32")
    run = tunerd.tune(
        tmp_path / "rated.onnx",
        cpu_pct=100,
        trials=4,
        out=tmp_path / "run",
        inputs=written(tmp_path / "x.npz", x=given),
        values={"rate": 16},
    )
    assert run.outcome.verification.verdict is Verdict.RIGHT
    assert "on 3 samples" in run.outcome.verification.message
    model = load(run.artifact.path)
    assert model.sample is not None
    assert np.array_equal(model.sample["x"], given)
    assert model.sample["rate"] == 16
    np.testing.assert_allclose(model(model.sample)["y"], (given / 16) @ (given / 16), rtol=1e-4)
