"""Polynomials for exp, erf, tanh and what is made of them, on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.lib.lowered import CUDA, LLVM, load
from tests.lib.models import model
from tunerd.frontend.relax.lowering import lower
from tunerd.vocabulary import Model

Array = NDArray[Any]
LIBRARY_CALLS = ("T.exp", "T.erf", "T.tanh", "T.sigmoid")

erf = np.vectorize(math.erf, otypes=[float])
EXACT: dict[str, Callable[[Array], Array]] = {
    "Exp": np.exp,
    "Erf": erf,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
}
NEAR_ZERO = np.linspace(-1, 1, 200_001)
FAR = np.linspace(-80, 80, 200_001)


def unary(tmp_path: Path, operator: str, size: int, **attributes: object) -> Model:
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    shape = (1, size)
    return load(tmp_path, model([node], inputs={"x": shape}, outputs={"y": shape}, opset=20))


def run(of: Model, x: Array) -> Array:
    built = tvm.compile(lower(of, LLVM).mod, target="llvm")
    machine = tvm.relax.VirtualMachine(built, tvm.cpu())
    return np.asarray(machine["main"](tvm.runtime.tensor(x)).numpy())


@pytest.mark.parametrize("operator", EXACT)
@pytest.mark.parametrize("x", [NEAR_ZERO, FAR], ids=["near 0", "far"])
def test_values_are_as_exact_as_is_said(operator: str, x: Array, tmp_path: Path) -> None:
    values = x.astype("float32")
    found = run(unary(tmp_path, operator, values.size), values[None])[0]
    exact = EXACT[operator](values.astype("float64"))
    if operator == "Exp":
        limits = np.where(np.abs(values) < 20, 2e-6, 5e-6) * np.abs(exact)
    else:
        limits = 5e-7 * (np.maximum(1, np.abs(values)) if operator == "Gelu" else 1)
    assert np.all(np.abs(found - exact) <= limits)


def test_what_float32_cannot_hold_is_infinite_or_0(tmp_path: Path) -> None:
    x = np.array([[-np.inf, -1000, -104, 89, 1000, np.inf]], "float32")
    assert run(unary(tmp_path, "Exp", 6), x).tolist() == [[0, 0, 0, np.inf, np.inf, np.inf]]
    for operator in ("Erf", "Tanh"):
        assert run(unary(tmp_path, operator, 6), x).tolist() == [[-1, -1, -1, 1, 1, 1]]
    assert run(unary(tmp_path, "Sigmoid", 6), x).tolist() == [[0, 0, 0, 1, 1, 1]]


def test_a_softmax_agrees_with_onnx_runtime_where_some_are_masked(tmp_path: Path) -> None:
    made = unary(tmp_path, "Softmax", 64, axis=-1)
    x = np.random.default_rng(0).normal(0, 8, (1, 64)).astype("float32")
    x[0, ::3], x[0, 1::3] = -np.inf, np.finfo("float32").min
    session = onnxruntime.InferenceSession(made.graph.proto.SerializeToString())
    (expected,) = session.run(None, {"x": x})
    assert np.allclose(run(made, x), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("operator", [*EXACT, "Softmax"])
def test_kernels_of_cpus_call_no_library_and_those_of_gpus_are_left_to_their_compiler(
    operator: str, tmp_path: Path
) -> None:
    made = unary(tmp_path, operator, 6)
    assert not any(call in str(lower(made, LLVM).mod.script()) for call in LIBRARY_CALLS)
    assert any(call in str(lower(made, CUDA).mod.script()) for call in LIBRARY_CALLS)


def test_another_type_than_float32_is_left_as_it_is(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["double"], to=TensorProto.DOUBLE),
        helper.make_node("Exp", ["double"], ["exp"]),
        helper.make_node("Cast", ["exp"], ["y"], to=TensorProto.FLOAT),
    ]
    made = load(tmp_path, model(nodes, inputs={"x": (1, 6)}, outputs={"y": (1, 6)}))
    assert "T.exp" in str(lower(made, LLVM).mod.script())
