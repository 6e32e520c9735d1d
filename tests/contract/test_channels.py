"""On CPUs, convolutions and products whose channels fill no vectors get some, cut off again."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

from tests.lib.lowered import CUDA, LLVM, load, operators, run
from tests.lib.models import floats, model
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.onnx.weights import LEAST_BYTES
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Model

SIZE = 6


def head(tmp_path: Path, channels: int, *, is_shared: bool = False) -> Model:
    """A convolution, a bias, an activation and a scale by channel, and a mean of them."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Mul", ["s", "r"], ["m"]),
        *([helper.make_node("Add", ["m", "c"], ["a"])] if is_shared else []),
        helper.make_node("GlobalAveragePool", ["a" if is_shared else "m"], ["y"]),
    ]
    proto = model(
        nodes,
        inputs={"x": (1, 16, SIZE, SIZE)},
        outputs={"y": (1, channels, 1, 1)},
        weights={
            "w": floats(channels, 16, 1, 1),
            "b": floats(channels),
            "s": floats(1, channels, 1, 1),
        },
    )
    return load(tmp_path, proto)


def kernel_channels(lowered: Lowered) -> set[int]:
    """Return how many output channels the weights of convolutions have."""
    return {w.shape[-1] for w in lowered.weights.values() if w.ndim == 4 and w.shape[2] == 16}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    ("channels", "wide"), [(255, 256), (1000, 1024), (500, 512), (24, 24), (64, 64)]
)
def test_outputs_are_those_of_the_model(
    channels: int, wide: int, is_shared: bool, tmp_path: Path
) -> None:
    loaded = head(tmp_path, channels, is_shared=is_shared)
    lowered = lower(loaded, LLVM)
    assert kernel_channels(lowered) == {wide}
    feed = random_inputs(loaded.inputs, 0)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (found,) = run(lowered, feed)
    assert agree(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "channels", "wide"), [((1,), 1000, 1024), ((2, 3), 1000, 1024), ((4,), 24, 24)]
)
def test_a_product_with_weights_gets_channels_too(
    rows: tuple[int, ...], channels: int, wide: int, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["c"]),
        helper.make_node("Add", ["c", "b"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"]),
    ]
    proto = model(
        nodes,
        inputs={"x": (*rows, 16)},
        outputs={"y": (*rows, channels)},
        weights={"w": floats(16, channels), "b": floats(channels)},
    )
    loaded = load(tmp_path, proto)
    lowered = lower(loaded, LLVM)
    assert {w.shape[-1] for w in lowered.weights.values()} == {wide}
    assert {w.shape[-1] for w in lower(loaded, CUDA).weights.values()} == {channels}
    feed = random_inputs(loaded.inputs, 0)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (found,) = run(lowered, feed)
    assert agree(found, expected, rtol=1e-4)


def test_large_weights_of_a_product_are_not_copied(tmp_path: Path) -> None:
    rows = LEAST_BYTES // 4 // 1000 + 1
    proto = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        inputs={"x": (1, rows)},
        outputs={"y": (1, 1000)},
        weights={"w": floats(rows, 1000)},
    )
    lowered = lower(load(tmp_path, proto), LLVM)
    assert {w.shape for w in lowered.weights.values()} == {(rows, 1000)}


def test_a_product_of_two_values_stays(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("MatMul", ["x", "z"], ["y"])],
        inputs={"x": (4, 16), "z": (16, 1000)},
        outputs={"y": (4, 1000)},
        weights={},
    )
    names = operators(lower(load(tmp_path, proto), LLVM))
    assert not [name for name in names if "slice" in name], names


def test_what_follows_is_computed_of_all_channels_in_one_kernel(tmp_path: Path) -> None:
    names = operators(lower(head(tmp_path, 255), LLVM))
    assert len([n for n in names if "conv2d" in n]) == 1
    assert not [n for n in names if n.startswith("strided_slice")], names


def test_gpus_get_none(tmp_path: Path) -> None:
    assert kernel_channels(lower(head(tmp_path, 255), CUDA)) == {255}
