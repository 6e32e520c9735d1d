"""Operators that are written as others: on every device, and what is said where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.lib.lowered import CUDA, LLVM, check, load, run
from tests.lib.models import ints, load_model, model
from tunerd.errors import ModelError
from tunerd.frontend.model import read_model
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks


def top_k(k: int, shape: tuple[int, ...], **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("TopK", ["x", "k"], ["values", "places"], **attributes)
    proto = model(
        [node],
        inputs={"x": shape},
        outputs=dict.fromkeys(("values", "places"), (None,) * len(shape)),
        weights={"k": ints(k)},
    )
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    return proto


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_k_best_of_any_axis_agree(tmp_path: Path, axis: int, largest: int) -> None:
    check(load(tmp_path, top_k(3, (4, 5, 6), axis=axis, largest=largest)))


def test_equal_elements_are_taken_in_their_order(tmp_path: Path) -> None:
    loaded = load(tmp_path, top_k(4, (2, 6)))
    x = np.float32([[1, 2, 2, 1, 2, 0], [-np.inf, np.inf, 3, np.inf, 3, 3]])
    expected = Reference(top_k(4, (2, 6))).run({"x": x})
    got = run(lower(loaded, LLVM), {"x": x})
    for one, other in zip(got, expected.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_k_best_are_kernels_on_a_gpu(tmp_path: Path) -> None:
    onnx.save(top_k(3, (4, 50)), tmp_path / "net.onnx")
    lowered = lower(load_model(tmp_path / "net.onnx"), CUDA)
    assert extract_tasks(lowered, CUDA)


def test_too_many_to_compare_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"TopK: it ranks 40,000 elements.*rank after the model"):
        load(tmp_path, top_k(3, (1, 40_000)))


def divided(kind: str, dtype: int) -> onnx.ModelProto:
    x, d, y = (helper.make_tensor_value_info(name, dtype, (6,)) for name in ("x", "d", "y"))
    graph = helper.make_graph([helper.make_node(kind, ["x", "d"], ["y"])], "tiny", [x, d], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("kind", ["Div", "Mod"])
def test_integers_are_divided_by_an_input_and_zero_does_not_end_the_process(
    tmp_path: Path, kind: str
) -> None:
    loaded = load(tmp_path, divided(kind, TensorProto.INT32))
    assert loaded.notes == ("integer divisors that are inputs count as 1 where they are 0",)
    x, d = np.int32([7, 8, 9, 10, 11, 12]), np.int32([1, 2, 3, 4, 5, 0])
    (got,) = run(lower(loaded, LLVM), {"x": x, "d": d})
    safe = np.maximum(d, 1)
    np.testing.assert_array_equal(got, x // safe if kind == "Div" else x % safe)


def test_bfloat16_is_computed_as_float32(tmp_path: Path) -> None:
    kind = TensorProto.BFLOAT16
    x, y = (helper.make_tensor_value_info(name, kind, (2, 3)) for name in "xy")
    w = helper.make_tensor("w", kind, (3, 3), np.arange(9.0).reshape(3, 3) / 8)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=kind),
    ]
    graph = helper.make_graph(nodes, "tiny", [x], [y], [w])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    loaded = load(tmp_path, proto)
    assert loaded.inputs[0].dtype == loaded.outputs[0].dtype == "float32"
    assert "computed as float32" in loaded.notes[0]
    given = np.float32([[1, 2, 3], [0, -1, 4]])
    (got,) = run(lower(loaded, LLVM), {"x": given})
    np.testing.assert_allclose(got, given @ (np.arange(9, dtype=np.float32).reshape(3, 3) / 8))


def test_floats_are_divided_as_they_are(tmp_path: Path) -> None:
    onnx.save(divided("Div", TensorProto.FLOAT), tmp_path / "net.onnx")
    assert read_model(tmp_path / "net.onnx").notes == ()


def test_trees_are_refused_with_the_package_that_runs_them(tmp_path: Path) -> None:
    proto = divided("Div", TensorProto.FLOAT)
    proto.graph.node[0].domain, proto.graph.node[0].op_type = "ai.onnx.ml", "TreeEnsemble"
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 5))
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="the package onnxruntime runs it as it is"):
        read_model(tmp_path / "net.onnx")


def test_branches_that_depend_on_values_are_both_computed(tmp_path: Path) -> None:
    def branch(op: str) -> onnx.GraphProto:
        b = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op, ["x"], ["b"])], op, [], [b])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["yes"]),
        helper.make_node(
            "If", ["yes"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs")
        ),
    ]
    zero = {"zero": np.zeros((), np.float32)}
    proto = model(nodes, inputs={"x": (3, 4)}, outputs={"y": (3, 4)}, weights=zero)
    lowered = lower(load(tmp_path, proto), LLVM)
    for sign in (-1, 1):
        x = sign * np.arange(12, dtype=np.float32).reshape(3, 4)
        (got,) = run(lowered, {"x": x})
        np.testing.assert_array_equal(got, -x if sign > 0 else abs(x))
