"""How far a compiled model may be from ONNX Runtime follows from how well that knows the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib.artifact_fixtures import model_of
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.onnx.simplify import simplify
from tunerd.frontend.onnx.uncertainty import steps, written_out
from tunerd.runs.finals.verify import verify
from tunerd.vocabulary import Arrays, Model, TensorSpec
from tunerd.vocabulary.verdict import Verdict

node = helper.make_node


def far_down(by: float = 16.0) -> Model:
    """A sigmoid of values around -16, below which ONNX Runtime's has few digits."""
    nodes = [node("Sub", ["x", "by"], ["low"]), node("Sigmoid", ["low"], ["y"])]
    return model_of(nodes, {"by": np.full((), by)}, inputs={"x": (4, 64)}, outputs={"y": (4, 64)})


def exact_sigmoid(inputs: Arrays, by: float = 16.0) -> Arrays:
    low = inputs["x"].astype(np.float64) - by
    return {"y": (1 / (1 + np.exp(-low))).astype(np.float32)}


def test_a_sigmoid_that_is_exact_where_onnx_runtime_s_is_rounded_is_right() -> None:
    result = verify(exact_sigmoid, far_down())
    assert result.verdict is Verdict.RIGHT, result.message


def test_onnx_runtime_s_own_sigmoid_is_right() -> None:
    model = far_down()
    assert verify(Reference(model.graph.proto).run, model).verdict is Verdict.RIGHT


@pytest.mark.parametrize("by", [15.99, 16.02])
def test_a_sigmoid_of_something_else_is_wrong(by: float) -> None:
    result = verify(lambda inputs: exact_sigmoid(inputs, by), far_down())
    assert result.verdict is Verdict.WRONG


def test_sigmoids_are_written_out_in_float32_alone() -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
            node("Sigmoid", ["half"], ["low"]),
            node("Cast", ["low"], ["wide"], to=TensorProto.FLOAT),
            node("Sigmoid", ["wide"], ["y"]),
        ],
        "two",
        [value("x", TensorProto.FLOAT, [8])],
        [value("y", TensorProto.FLOAT, [8])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9)
    clear = written_out(proto)
    assert [n.op_type for n in clear.graph.node].count("Sigmoid") == 1
    x = np.linspace(-5, 5, 8, dtype="float32")
    (y,) = (Reference(clear).run({"x": x})["y"],)
    np.testing.assert_allclose(y, Reference(proto).run({"x": x})["y"], rtol=1e-6)


def test_a_simplification_is_kept_where_onnx_runtime_rounds_the_values_off() -> None:
    nodes = [
        node("Add", ["x", "by"], ["low"]),
        node("Add", ["low", "more"], ["lower"]),
        node("Sigmoid", ["lower"], ["y"]),
    ]
    weights = {"by": np.full((), -8.3), "more": np.full((), -7.9)}
    model = model_of(nodes, weights, inputs={"x": (4, 64)}, outputs={"y": (4, 64)})
    simple, notes = simplify(model.graph.proto, model.inputs)
    assert notes == ()
    assert len(simple.graph.node) < 3


# --- quantised models --------------------------------------------------------------------------

SCALE = 0.05


def quantised(*, to_float: bool = True) -> Model:
    """Two products between values of 8 bits, back as floats, or as they are."""
    rng = np.random.default_rng(0)

    def linear(name: str, of: str) -> list[onnx.NodeProto]:
        return [
            node("QuantizeLinear", [of, "scale", "zero"], [f"{name}/q"]),
            node("DequantizeLinear", [f"{name}/q", "scale", "zero"], [f"{name}"]),
        ]

    nodes = [
        *linear("x8", "x"),
        node("MatMul", ["x8", "w1"], ["a"]),
        *linear("a8", "a"),
        node("MatMul", ["a8", "w2"], ["b"]),
        *linear("y", "b"),
    ]
    output = ("y", TensorProto.FLOAT) if to_float else ("y/q", TensorProto.INT8)
    if not to_float:
        nodes.pop()
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "int8",
        [value("x", TensorProto.FLOAT, [8, 64])],
        [value(*output, [8, 64])],
        [
            numpy_helper.from_array(np.float32(SCALE), "scale"),
            numpy_helper.from_array(np.int8(0), "zero"),
            *(
                numpy_helper.from_array(rng.normal(size=(64, 64)).astype("float32") / 8, name)
                for name in ("w1", "w2")
            ),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    dtype = "float32" if to_float else "int8"
    return model_like(proto, {"x": (8, 64)}, {output[0]: ((8, 64), dtype)})


def model_like(
    proto: onnx.ModelProto, inputs: dict[str, Any], outputs: dict[str, tuple[Any, str]]
) -> Model:
    found = model_of([node("Identity", ["a"], ["b"])], {}, inputs={"a": (1,)}, outputs={"b": (1,)})
    return Model(
        "changed",
        "0" * 64,
        tuple(TensorSpec(n, s, "float32") for n, s in inputs.items()),
        tuple(TensorSpec(n, *of) for n, of in outputs.items()),
        type(found.graph)(proto),
    )


def off_by_steps(
    model: Model, count: int, steps: int, *, size: float = SCALE
) -> Callable[[Arrays], Arrays]:
    """Run a model, and move so many of its output's elements by steps."""
    run = Reference(model.graph.proto).run

    def moved(inputs: Arrays) -> Arrays:
        ((name, array),) = run(inputs).items()
        array = array.copy()
        array.flat[:count] += array.dtype.type(steps * size)
        return {name: array}

    return moved


def test_steps_of_outputs_are_those_of_the_last_quantisation() -> None:
    assert steps(quantised().graph.proto) == {"y": pytest.approx(SCALE)}
    assert steps(quantised(to_float=False).graph.proto) == {"y/q": 1.0}


def test_one_step_of_a_quantised_output_is_right_and_three_are_wrong() -> None:
    model = quantised()
    assert verify(off_by_steps(model, 2, 1), model).verdict is Verdict.RIGHT
    assert verify(off_by_steps(model, 1, 3), model).verdict is Verdict.WRONG


def test_few_integers_may_be_a_step_off_and_many_may_not() -> None:
    model = quantised(to_float=False)
    assert verify(off_by_steps(model, 2, 1, size=1), model).verdict is Verdict.RIGHT
    assert verify(off_by_steps(model, 300, 1, size=1), model).verdict is Verdict.WRONG
    assert verify(off_by_steps(model, 1, 3, size=1), model).verdict is Verdict.WRONG


# --- wrong kernels -----------------------------------------------------------------------------


def net() -> Model:
    """Two convolutions with norms and a gate, a pool, and a product behind a sigmoid."""
    rng = np.random.default_rng(3)
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c1", "g", "b", "mean", "var"], ["n1"], epsilon=1e-3),
        node("LeakyRelu", ["n1"], ["r1"], alpha=0.1),
        node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1], group=8),
        node("Sigmoid", ["c2"], ["gate"]),
        node("Mul", ["c2", "gate"], ["silu"]),
        node("Add", ["silu", "r1"], ["sum"]),
        node("AveragePool", ["sum"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Flatten", ["p"], ["flat"]),
        node("MatMul", ["flat", "w3"], ["logits"]),
        node("Sub", ["logits", "by"], ["low"]),
        node("Sigmoid", ["low"], ["y"]),
    ]
    weights = {
        "w1": rng.normal(size=(8, 3, 3, 3)) / 5,
        "b1": rng.normal(size=8),
        "g": 1 + 0.1 * rng.normal(size=8),
        "b": rng.normal(size=8),
        "mean": 0.1 * rng.normal(size=8),
        "var": np.full(8, 0.9),
        "w2": rng.normal(size=(8, 1, 3, 3)) / 3,
        "w3": rng.normal(size=(8 * 16, 20)) / 10,
        "by": np.full((), 12.0),
    }
    return model_of(nodes, weights, inputs={"x": (1, 3, 8, 8)}, outputs={"y": (1, 20)})


Change = Callable[[onnx.ModelProto], None]


def _weight(name: str, change: Callable[[np.ndarray[Any, Any]], Any]) -> Change:
    def apply(proto: onnx.ModelProto) -> None:
        (tensor,) = (t for t in proto.graph.initializer if t.name == name)
        array = numpy_helper.to_array(tensor).copy()
        change(array)
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return apply


def _attribute(op: int, name: str, value: Any) -> Change:
    def apply(proto: onnx.ModelProto) -> None:
        of = proto.graph.node[op]
        kept = [a for a in of.attribute if a.name != name]
        of.ClearField("attribute")
        of.attribute.extend((*kept, helper.make_attribute(name, value)))

    return apply


WRONG: dict[str, Change] = {
    "a tap of one channel": _weight("w1", lambda w: w.__setitem__((0, 0, 0, 0), 0)),
    "a bias": _weight("b1", lambda w: w.__setitem__(3, 0)),
    "two channels exchanged": _weight("w2", lambda w: w.__setitem__([0, 1], w[[1, 0]])),
    "a channel of the norm": _weight("g", lambda w: w.__setitem__(5, 1.2)),
    "the variance of one channel": _weight("var", lambda w: w.__setitem__(7, 1.0)),
    "one column of the product": _weight("w3", lambda w: w.__setitem__((slice(None), 19), 0)),
    "one term of the product": _weight("w3", lambda w: w.__setitem__((5, 2), w[5, 2] + 0.05)),
    "a slope": _attribute(2, "alpha", 0.11),
    "a border": _attribute(7, "count_include_pad", 1),
    "an epsilon": _attribute(1, "epsilon", 1e-2),
    "a column of the border": _attribute(0, "pads", [1, 0, 1, 2]),
    "the offset before the sigmoid": _weight("by", lambda w: w.__setitem__((), 12.01)),
}


@pytest.mark.parametrize("optimize", [False, True])
def test_the_net_itself_is_right(optimize: bool) -> None:
    """With sigmoids that have digits; how ONNX Runtime rounds its own differs from CPU to CPU."""
    model = net()
    run = Reference(written_out(model.graph.proto), optimize=optimize).run
    assert verify(run, model).verdict is Verdict.RIGHT


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_found(what: str) -> None:
    model = net()
    proto = onnx.ModelProto()
    proto.CopyFrom(model.graph.proto)
    WRONG[what](proto)
    assert verify(Reference(written_out(proto)).run, model).verdict is Verdict.WRONG
    assert verify(Reference(proto).run, model).verdict is Verdict.WRONG
