"""What does not depend on the inputs is computed once, before the graph is simplified."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tunerd.frontend.onnx.folding import folded
from tunerd.frontend.onnx.reference import Reference

FLOAT = onnx.TensorProto.FLOAT


def model(nodes: list[onnx.NodeProto], **constants: np.ndarray) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", FLOAT, [2, 6])
    y = helper.make_tensor_value_info("y", FLOAT, None)
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "m", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def kinds(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def test_shapes_that_follow_from_each_other_are_constants() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "last"], ["columns"]),
        helper.make_node("Concat", ["minus", "columns", "one"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["wide"]),
        helper.make_node("Shape", ["wide"], ["t"]),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
    ]
    given = {"last": np.array([1]), "minus": np.array([-1]), "one": np.array([1])}
    proto = model(nodes, **given)
    found = folded(proto)
    assert kinds(found) == ["Reshape", "Reshape"]
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    np.testing.assert_array_equal(Reference(found).run({"x": x})["y"], x.reshape(2, 6, 1))


def test_random_numbers_and_quantised_weights_stay() -> None:
    random = helper.make_node("RandomNormal", [], ["r"], shape=[2, 6])
    weights = helper.make_node("DequantizeLinear", ["w", "scale"], ["wide"])
    nodes = [
        random,
        weights,
        helper.make_node("Add", ["x", "r"], ["z"]),
        helper.make_node("Add", ["z", "wide"], ["y"]),
    ]
    found = folded(model(nodes, w=np.ones((2, 6), np.int8), scale=np.float32(0.5).reshape(())))
    assert kinds(found) == ["RandomNormal", "DequantizeLinear", "Add", "Add"]


def test_what_a_branch_reads_is_kept() -> None:
    y = helper.make_tensor_value_info("inner", FLOAT, [2, 6])
    branch = helper.make_graph([helper.make_node("Add", ["x", "b"], ["inner"])], "t", [], [y])
    nodes = [
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["yes"], to=onnx.TensorProto.BOOL),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch),
    ]
    found = folded(model(nodes, a=np.ones((2, 6), np.float32)))
    assert kinds(found) == ["ReduceSum", "Cast", "If"]
    x = np.ones((2, 6), np.float32)
    np.testing.assert_array_equal(Reference(found).run({"x": x})["y"], x - 1)


def test_an_output_that_is_a_constant_stays_an_output() -> None:
    nodes = [helper.make_node("Neg", ["a"], ["y"])]
    found = folded(model(nodes, a=np.ones((2, 6), np.float32)))
    assert [o.name for o in found.graph.output] == ["y"]
    x = np.ones((2, 6), np.float32)
    np.testing.assert_array_equal(Reference(found).run({"x": x})["y"], -x)
