"""ONNX Runtime's own operators on quantized values: models in them agree with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnxruntime import quantization

from tests.lib.lowered import LLVM, load, operators, run
from tests.lib.models import floats, model
from tunerd.errors import ModelError
from tunerd.frontend.relax.lowering import lower
from tunerd.system.arrays import random_inputs


def net() -> onnx.ModelProto:
    """A network whose quantized form has most of these operators."""
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("LeakyRelu", ["c1"], ["r1"], alpha=0.1),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["c2"], ["s2"]),
        helper.make_node("Mul", ["s2", "c2"], ["m2"]),
        helper.make_node("Add", ["m2", "r1"], ["a2"]),
        helper.make_node("Concat", ["a2", "r1"], ["k"], axis=1),
        helper.make_node("AveragePool", ["k"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], transB=1),
    ]
    weights = {
        "w1": floats(16, 3, 3, 3),
        "b1": floats(16),
        "w2": floats(16, 16, 3, 3),
        "b2": floats(16, seed=1),
        "w3": 4 * floats(16, 32),
        "b3": floats(16, seed=2),
    }
    made = model(nodes, inputs={"x": (1, 3, 12, 12)}, outputs={"y": (1, 16)}, weights=weights)
    return onnx.shape_inference.infer_shapes(made)


class _Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self._left = iter(range(4))

    def get_next(self) -> dict[str, np.ndarray] | None:
        seed = next(self._left, None)
        return None if seed is None else {"x": 3 * floats(1, 3, 12, 12, seed=seed)}


@pytest.fixture(scope="module")
def in_operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    onnx.save(net(), folder / "net.onnx")
    quantization.quantize_static(
        folder / "net.onnx",
        folder / "int8.onnx",
        _Samples(),
        quant_format=quantization.QuantFormat.QOperator,
        per_channel=True,
    )
    return folder / "int8.onnx"


def test_a_network_in_operators_of_onnx_runtime_agrees_with_it(
    in_operators: Path, tmp_path: Path
) -> None:
    proto = onnx.load(in_operators)
    own = {node.op_type for node in proto.graph.node if node.domain == "com.microsoft"}
    assert own >= {"QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearConcat", "QGemm"}
    loaded = load(tmp_path, proto)
    feed = {spec.name: 3 * value for spec, value in zip(
        loaded.inputs, random_inputs(loaded.inputs, 0).values(), strict=True)}  # fmt: skip
    session = ort.InferenceSession(str(in_operators), providers=["CPUExecutionProvider"])
    (right,) = session.run(None, feed)
    (got,) = run(lower(loaded, LLVM), feed)
    last = next(node for node in proto.graph.node if node.output[0] == "y")
    (scale,) = (t for t in proto.graph.initializer if t.name == last.input[1])
    step = float(onnx.numpy_helper.to_array(scale).item())
    assert np.ptp(right) > 20 * step
    np.testing.assert_allclose(got, right, atol=2.5 * step)  # steps: sums are rounded otherwise
    assert "integer_products" not in "".join(operators(lower(loaded, LLVM)))


def test_dynamic_products_of_onnx_runtime_agree_with_it(tmp_path: Path) -> None:
    # Of seven bits: with eight ONNX Runtime's sums saturate on a CPU without VNNI.
    weight = np.random.default_rng(3).integers(-63, 64, (24, 32)).astype(np.int8)
    node = helper.make_node(
        "DynamicQuantizeMatMul", ["x", "w", "s", "", "b"], ["y"], domain="com.microsoft"
    )
    weights = {"w": weight, "s": np.array([0.01], np.float32), "b": floats(32)}
    proto = model([node], inputs={"x": (5, 24)}, outputs={"y": (5, 32)}, weights=weights)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(proto, tmp_path / "own.onnx")
    feed = {"x": floats(5, 24, seed=4)}
    session = ort.InferenceSession(str(tmp_path / "own.onnx"), providers=["CPUExecutionProvider"])
    (right,) = session.run(None, feed)
    (got,) = run(lower(load(tmp_path, proto), LLVM), feed)
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


def test_what_has_no_standard_form_is_refused_by_name(tmp_path: Path) -> None:
    node = helper.make_node("QEmbedLayerNormalization", ["x"], ["y"], domain="com.microsoft")
    proto = model([node], inputs={"x": (5, 24)}, outputs={"y": (5, 24)})
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ModelError, match=r"com\.microsoft\.QEmbedLayerNormalization"):
        load(tmp_path, proto)
