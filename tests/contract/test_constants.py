"""Inputs that always have one value: constants of the model, which choose its network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib.lowered import LLVM
from tunerd.errors import InputError, ModelError
from tunerd.frontend.model import read_model, simplified
from tunerd.frontend.onnx.constants import fix_inputs
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import lower

SIZES = {8000: 4, 16000: 6}  # of what is cut, by the rate


def by_rate() -> onnx.ModelProto:
    """A model whose network, and whose output's size, a sampling rate chooses."""
    branches = []
    for size in SIZES.values():
        nodes = [
            helper.make_node("Slice", ["x", "first", f"size{size}", "axis"], [f"cut{size}"]),
            helper.make_node("Tanh", [f"cut{size}"], [f"out{size}"]),
        ]
        result = helper.make_tensor_value_info(f"out{size}", TensorProto.FLOAT, [1, None])
        branches.append(helper.make_graph(nodes, f"of {size}", [], [result]))
    numbers = {"first": [0], "axis": [1], **{f"size{n}": [n] for n in SIZES.values()}}
    graph = helper.make_graph(
        [
            helper.make_node("Equal", ["sr", "low"], ["is_low"]),
            helper.make_node(
                "If", ["is_low"], ["y"], then_branch=branches[0], else_branch=branches[1]
            ),
        ],
        "by rate",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8]),
            helper.make_tensor_value_info("sr", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None])],
        [
            numpy_helper.from_array(np.array(8000, np.int64), "low"),
            *(numpy_helper.from_array(np.array(v, np.int64), n) for n, v in numbers.items()),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(by_rate(), tmp_path / "rate.onnx")
    return tmp_path / "rate.onnx"


@pytest.mark.parametrize("rate", SIZES)
def test_a_constant_chooses_the_network_and_is_no_input(path: Path, rate: int) -> None:
    model = simplified(read_model(path, constants={"sr": rate}))
    assert [spec.name for spec in model.inputs] == ["x"]
    assert [spec.shape for spec in model.outputs] == [(1, SIZES[rate])]
    assert f"input 'sr' is the constant {rate}" in model.notes
    x = np.arange(8, dtype=np.float32)[None]
    whole = Reference(by_rate()).run({"x": x, "sr": np.array(rate, np.int64)})
    assert np.array_equal(model.graph.run([{"x": x}])[0]["y"], whole["y"])


def test_models_of_other_constants_are_other_models(path: Path) -> None:
    digests = {read_model(path, constants={"sr": rate}).digest for rate in SIZES}
    assert len(digests) == 2


def test_what_is_no_constant_of_the_model_is_refused(path: Path) -> None:
    with pytest.raises(InputError, match="--constant names no input 'rate', only x, sr"):
        read_model(path, constants={"rate": 1})
    with pytest.raises(InputError, match=r"--constant sr=0.5: the input is of int64"):
        read_model(path, constants={"sr": 0.5})
    proto = by_rate()
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.STRING
    with pytest.raises(InputError, match="--constant sr: the input is no tensor of numbers"):
        fix_inputs(proto, {"sr": 16000})


def test_a_network_that_an_input_chooses_is_refused_with_a_way_out(path: Path) -> None:
    with pytest.raises(ModelError, match="--constant NAME=NUMBER"):
        lower(simplified(read_model(path)), LLVM)
