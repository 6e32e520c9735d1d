"""Transposes sink below what computes each value by itself, where fewer values move then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.lib.lowered import CUDA, LLVM, load, operators, run
from tests.lib.models import floats, model
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.relax.lowering import lower
from tunerd.system.arrays import random_inputs

CHANNELS, SIZE = 16, 6
TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
Nodes = list[onnx.NodeProto]


def block(x: str, n: int) -> tuple[Nodes, dict[str, np.ndarray], str]:
    """A block of ConvNeXt: its kernels are channels last, its scale and residual are not."""
    make = helper.make_node
    nodes = [
        make("Conv", [x, f"k{n}"], [f"c{n}"], group=CHANNELS, pads=[1, 1, 1, 1]),
        make("Transpose", [f"c{n}"], [f"l{n}"], perm=TO_LAST),
        make("LayerNormalization", [f"l{n}", "s", "s"], [f"n{n}"], axis=-1),
        make("MatMul", [f"n{n}", f"u{n}"], [f"h{n}"]),
        make("Relu", [f"h{n}"], [f"r{n}"]),
        make("MatMul", [f"r{n}", f"d{n}"], [f"o{n}"]),
        make("Transpose", [f"o{n}"], [f"f{n}"], perm=TO_FIRST),
        make("Mul", [f"g{n}", f"f{n}"], [f"m{n}"]),
        make("Add", [f"m{n}", x], [f"x{n}"]),
    ]
    weights = {
        f"k{n}": floats(CHANNELS, 1, 3, 3, seed=n),
        f"u{n}": floats(CHANNELS, 4 * CHANNELS, seed=n),
        f"d{n}": floats(4 * CHANNELS, CHANNELS, seed=n),
        f"g{n}": floats(CHANNELS, 1, 1, seed=n),
    }
    return nodes, weights, f"x{n}"


def blocks(count: int, *, keepdims: int = 1) -> onnx.ModelProto:
    """A stem, blocks, and a mean of the image."""
    nodes = [helper.make_node("Conv", ["x", "stem"], ["a"], strides=[2, 2], kernel_shape=[2, 2])]
    weights = {"stem": floats(CHANNELS, 3, 2, 2), "s": floats(CHANNELS)}
    last = "a"
    for n in range(count):
        own, found, last = block(last, n)
        nodes += own
        weights |= found
    nodes.append(helper.make_node("ReduceMean", [last, "axes"], ["y"], keepdims=keepdims))
    weights["axes"] = np.array([2, 3], np.int64)
    return model(
        nodes,
        inputs={"x": (1, 3, 2 * SIZE, 2 * SIZE)},
        outputs={"y": (1, CHANNELS, 1, 1) if keepdims else (1, CHANNELS)},
        weights=weights,
        opset=18,
    )


@pytest.mark.parametrize("keepdims", [0, 1])
def test_blocks_between_layouts_compute_what_the_model_does(keepdims: int, tmp_path: Path) -> None:
    loaded = load(tmp_path, blocks(2, keepdims=keepdims))
    feed = random_inputs(loaded.inputs, 0)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (found,) = run(lower(loaded, LLVM), feed)
    assert agree(found, expected, rtol=1e-4)


@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["CPU", "GPU"])
def test_scales_and_residuals_are_part_of_the_products_before_them(
    target: object, tmp_path: Path
) -> None:
    names = operators(lower(load(tmp_path, blocks(3)), target))  # type: ignore[arg-type]
    assert len([n for n in names if "transpose" in n]) <= 1, names  # of the image
    assert {n for n in names if "add" in n} == {"fused_matmul1_multiply_add"}


def test_a_transpose_that_more_values_would_follow_stays(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Add", ["t", "z"], ["y"]),
    ]
    shape = {"x": (4, 6), "z": (6, 4)}
    loaded = load(tmp_path, model(nodes, inputs=shape, outputs={"y": (6, 4)}))
    feed = random_inputs(loaded.inputs, 0)
    lowered = lower(loaded, LLVM)
    assert len(operators(lowered)) == 1
    (found,) = run(lowered, feed)
    assert np.allclose(found, feed["x"].T + feed["z"])
