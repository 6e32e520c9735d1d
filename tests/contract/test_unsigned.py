"""ONNX Runtime adds products of bytes whole, on any CPU, where it is the reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunerd.frontend.onnx.reference import Reference


def product_of_bytes(kind: str, dtype: type) -> onnx.ModelProto:
    """x @ w, of 24 products each: as an operator on integers, or between floats that were these."""
    low = int(np.iinfo(dtype).min)
    weights = {"w": np.full((24, 32), 127, np.int8), "zero": np.array(low, dtype)}
    weights |= {"none": np.int8(0), "one": np.float32(1)}
    weights |= {"by": np.full(32, 20000, np.float32), "few": np.float32(1 / 20000)}
    node = helper.make_node
    nodes = {
        "MatMulInteger": [
            node("MatMulInteger", ["x", "w", "zero"], ["sums"]),
            node("Cast", ["sums"], ["y"], to=TensorProto.FLOAT),
        ],
        "QLinearMatMul": [
            node("QLinearMatMul", ["x", "one", "zero", "w", "one", "none", "by", "zero"], ["q"]),
            node("DequantizeLinear", ["q", "by", "zero"], ["y"]),
        ],
        "QDQ": [
            node("DequantizeLinear", ["x", "one", "zero"], ["left"]),
            node("DequantizeLinear", ["w", "by"], ["right"], axis=1),
            node("MatMul", ["left", "right"], ["product"]),
            node("Mul", ["product", "few"], ["y"]),
        ],
    }[kind]
    if kind == "QLinearMatMul":
        weights["by"] = np.float32(20000)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "bytes",
        [value("x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), (5, 24))],
        [value("y", TensorProto.FLOAT, (5, 32))],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("kind", ["MatMulInteger", "QLinearMatMul", "QDQ"])
def test_sums_of_products_of_bytes_are_whole_on_any_cpu(
    kind: str, dtype: type, optimize: bool
) -> None:
    """Without VNNI a CPU adds two such products in 16 bits, where these have no room."""
    run = Reference(product_of_bytes(kind, dtype), optimize=optimize).run
    found = run({"x": np.full((5, 24), np.iinfo(dtype).max, dtype)})
    np.testing.assert_allclose(found["y"], np.full((5, 32), 24 * 255 * 127), rtol=0.02)
