"""A run in another precision than the file's: stored, compared, verified and loaded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunerd
from tunerd.frontend.onnx.reference import Reference
from tunerd.system.arrays import PRECISION_TOLERANCES
from tunerd.vocabulary.verdict import Verdict


def two_convolutions() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 8, 3, 3), "b": (16,), "w2": (16, 16, 3, 3), "w3": (32, 64)}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Conv", ["r", "w2"], ["c2"], pads=[1, 1, 1, 1]),
            helper.make_node("Sigmoid", ["c2"], ["s"]),
            helper.make_node("MatMul", ["s", "w3"], ["y"]),
        ],
        "two",
        [value("x", TensorProto.FLOAT, [1, 8, 32, 32])],
        [value("y", TensorProto.FLOAT, [1, 16, 32, 64])],
        [
            numpy_helper.from_array(rng.normal(size=shape).astype("float32") / 8, name)
            for name, shape in shapes.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "stored", "passed"),
    [("fp16", "float16", "float16"), ("bf16", "bfloat16", "float32")],
)
@pytest.mark.usefixtures("kept_cluster")
def test_a_run_in_16_bits_leaves_a_right_model_with_weights_of_them(
    tmp_path: Path, precision: str, stored: str, passed: str
) -> None:
    proto = two_convolutions()
    run = tunerd.tune(
        proto,
        cpu_pct=100,
        trials=4,
        tuners=1,
        precision=precision,
        **({"io_precision": "fp16"} if passed == "float16" else {}),
        out=tmp_path / "run",
    )
    assert run.outcome.verification.verdict is Verdict.RIGHT
    assert set(run.trials()["state"]) == {"measured"}
    model = run.artifact.load()
    types = [str(weight.dtype) for weight in model.weights.values()]
    assert sorted(set(types)) == sorted({stored, "float32"})  # the bias stays as it is
    x = np.random.default_rng(1).normal(size=(1, 8, 32, 32)).astype("float32")
    x = x.astype(passed)
    (found,) = model({"x": x}).values()
    (expected,) = Reference(proto).run({"x": x.astype("float32")}).values()
    assert found.dtype == passed
    apart = np.abs(found.astype("float32") - expected).max() / np.abs(expected).max()
    assert 0 < apart < 2 * PRECISION_TOLERANCES[precision][1]
