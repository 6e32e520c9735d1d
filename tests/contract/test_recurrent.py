"""LSTM, GRU and RNN agree with ONNX Runtime as their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.lib.lowered import LLVM, check, load, run
from tests.lib.models import floats, model
from tunerd.errors import ModelError
from tunerd.frontend.onnx.recurrent import MAX_STEPS
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, WIDTH, SIZE = 5, 3, 4, 6


def layer(
    kind: str,
    *,
    direction: str = "forward",
    given: tuple[str, ...] = (),
    steps: int = STEPS,
    outputs: int = 3,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one layer; `given` names its inputs but the first three."""
    ways, gates = 2 if direction == "bidirectional" else 1, GATES[kind]
    shapes = {
        "bias": (ways, 2 * gates * SIZE),
        "lengths": (BATCH,),
        "h": (ways, BATCH, SIZE),
        "c": (ways, BATCH, SIZE),
        "peepholes": (ways, 3 * SIZE),
    }
    inputs = {"x": (steps, BATCH, WIDTH)}
    inputs |= {name: shapes[name] for name in given if name in ("lengths", "h", "c")}
    weights = {"w": floats(ways, gates * SIZE, WIDTH), "r": floats(ways, gates * SIZE, SIZE)}
    weights |= {name: floats(*shapes[name]) for name in given if name in ("bias", "peepholes")}
    names = [n if n in given else "" for n in shapes]
    made = ["y", "last_h", "last_c"][: outputs if kind == "LSTM" else 2]
    node = helper.make_node(
        kind,
        ["x", "w", "r", *names[: 5 if kind == "LSTM" else 3]],
        made,
        hidden_size=SIZE,
        direction=direction,
        **attributes,
    )
    proto = model([node], inputs=inputs, outputs=dict.fromkeys(made), weights=weights)
    for value in proto.graph.input:
        if value.name == "lengths":
            value.type.tensor_type.elem_type = TensorProto.INT32
    return proto


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("given", [(), ("bias", "h", "c")])
@pytest.mark.parametrize("kind", GATES)
def test_each_direction_agrees(
    tmp_path: Path, kind: str, given: tuple[str, ...], direction: str
) -> None:
    check(load(tmp_path, layer(kind, direction=direction, given=given)))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_sequences_end_where_their_lengths_say(tmp_path: Path, kind: str, direction: str) -> None:
    loaded = load(tmp_path, layer(kind, direction=direction, given=("bias", "lengths", "h", "c")))
    feed = {s.name: floats(*s.shape, seed=1) for s in loaded.inputs}
    feed["lengths"] = np.array([2, STEPS, 3], np.int32)
    expected = Reference(layer(kind, direction=direction, given=("bias", "lengths", "h", "c")))
    wanted = expected.run(feed)
    for got, name in zip(run(lower(loaded, LLVM), feed), wanted, strict=True):
        assert np.allclose(got, wanted[name], atol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("resets_last", [0, 1])
def test_a_gru_resets_before_or_after_its_product(
    tmp_path: Path, resets_last: int, clip: float
) -> None:
    attributes = {"linear_before_reset": resets_last} | ({"clip": clip} if clip else {})
    check(load(tmp_path, layer("GRU", given=("bias", "h"), **attributes)))


@pytest.mark.parametrize(
    "attributes", [{"input_forget": 1}, {"activations": ["HardSigmoid", "Relu", "Softsign"]}]
)
def test_other_gates_of_an_lstm_agree(tmp_path: Path, attributes: dict[str, Any]) -> None:
    check(load(tmp_path, layer("LSTM", given=("bias", "h", "c"), **attributes)))


def test_peepholes_agree(tmp_path: Path) -> None:
    check(load(tmp_path, layer("LSTM", given=("bias", "h", "c", "peepholes"))))


def test_all_steps_share_their_kernels(tmp_path: Path) -> None:
    tasks = [
        extract_tasks(lower(load(tmp_path, layer("LSTM", steps=n, outputs=1)), LLVM), LLVM)
        for n in (8, 32)
    ]
    assert len(tasks[0]) == len(tasks[1])
    products = [sum(t.weight for t in each if "matmul" in t.name) for each in tasks]
    assert products == [8, 32]  # of all inputs at once, and of each state but the first, zeros


def test_a_long_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"LSTM: it has 600 steps, and up to {MAX_STEPS} are"):
        load(tmp_path, layer("LSTM", steps=600))
