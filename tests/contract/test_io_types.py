"""Inputs and outputs of another type than the file's: the same model between casts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunerd.errors import InputError
from tunerd.frontend.model import read_model
from tunerd.frontend.onnx.io_types import io_precision_of, with_io_precision

SHAPE = (2, 3)
VALUE = helper.make_tensor_value_info


def branch(name: str, *reads: str) -> onnx.GraphProto:
    node = helper.make_node("Add", list(reads), [name])
    return helper.make_graph([node], name, [], [VALUE(name, TensorProto.FLOAT, SHAPE)])


def proto() -> onnx.ModelProto:
    """Return a model whose input is read in a branch, and whose outputs are of every kind."""
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "w"], ["y"]),
            helper.make_node(
                "If",
                ["flag"],
                ["z"],
                then_branch=branch("t", "x", "y"),
                else_branch=branch("e", "x", "x"),
            ),
            helper.make_node("Cast", ["y"], ["n"], to=TensorProto.INT64),
        ],
        "all",
        [VALUE("x", TensorProto.FLOAT, SHAPE), VALUE("flag", TensorProto.BOOL, [])],
        [
            VALUE("y", TensorProto.FLOAT, SHAPE),  # which other nodes read, too
            VALUE("z", TensorProto.FLOAT, SHAPE),
            VALUE("n", TensorProto.INT64, SHAPE),
            VALUE("w", TensorProto.FLOAT, [3]),  # a weight
        ],
        [numpy_helper.from_array(np.array([0.1, 2, -3], "f4"), "w")],
        value_info=[VALUE("y", TensorProto.FLOAT, SHAPE)],  # as some exporters say once more
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def outputs_of(model: onnx.ModelProto, x: np.ndarray, *, flag: bool) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return list(session.run(None, {"x": x, "flag": np.array(flag)}))


@pytest.mark.parametrize("flag", [True, False])
def test_a_model_is_the_same_between_casts(flag: bool) -> None:
    exported, changed = proto(), proto()
    notes = with_io_precision(changed, "fp16")
    onnx.checker.check_model(changed, full_check=True)
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float16)
    expected = outputs_of(exported, x.astype(np.float32), flag=flag)
    found = outputs_of(changed, x, flag=flag)
    assert [a.dtype.name for a in found] == ["float16", "float16", "int64", "float16"]
    for given, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(given, wanted.astype(given.dtype))
    assert notes == ("x, y, z, w: of float16, as --io-precision says",)
    assert [v.name for v in changed.graph.input] == ["x", "flag"]
    assert [v.name for v in changed.graph.output] == ["y", "z", "n", "w"]


def test_a_model_of_the_type_stays_as_it_is() -> None:
    model = proto()
    assert with_io_precision(model, "fp32") == ()
    assert model == proto()


def test_an_input_that_is_an_output_is_changed_once() -> None:
    model = proto()
    model.graph.output.append(VALUE("x", TensorProto.FLOAT, SHAPE))
    with_io_precision(model, "fp16")
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float16)
    np.testing.assert_array_equal(outputs_of(model, x, flag=True)[-1], x)


def test_a_name_that_is_taken_is_not_taken_again() -> None:
    model = proto()
    model.graph.node.append(helper.make_node("Neg", ["x"], ["x_as_exported"]))
    with_io_precision(model, "fp16")
    onnx.checker.check_model(model, full_check=True)


def test_a_model_without_numbers_of_floating_point_refuses() -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "whole",
        [VALUE("x", TensorProto.INT64, SHAPE)],
        [VALUE("y", TensorProto.INT64, SHAPE)],
    )
    with pytest.raises(InputError, match="the model has none; leave it out"):
        with_io_precision(helper.make_model(graph), "fp16")


def test_a_file_is_read_as_another_model(tmp_path: Path) -> None:
    path = tmp_path / "all.onnx"
    onnx.save(proto(), path)
    exported, changed = read_model(path), read_model(path, io_precision="fp16")
    assert exported.inputs[0].dtype == "float32"
    assert changed.inputs[0].dtype == "float16"
    assert exported.digest != changed.digest
    assert "x, y, z, w: of float16, as --io-precision says" in changed.notes


def test_the_precision_of_inputs_and_outputs_follows_from_their_types() -> None:
    assert io_precision_of(["float16", "int64", "float16"]) == "fp16"
    assert io_precision_of(["float32"]) == "fp32"
    assert io_precision_of(["float32", "float16"]) == io_precision_of(["int64"]) == ""
