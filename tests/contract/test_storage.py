"""What is stored in 16 bits between kernels, and what stays in fp32, by the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import NodeProto, helper

from tests.lib.artifact_fixtures import CUDA, LLVM, model_of
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.vocabulary import Model, TargetSpec

CHANNELS, CLASSES = 1024, 600
BATCHES = [1, 8]


def classifier(batch: int) -> Model:
    """A convolution, the means of its channels, a layer and a softmax of its scores."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(CHANNELS, 4, 1, 1)), "v": rng.normal(size=(CHANNELS, CLASSES))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["maps"]),
        helper.make_node("Relu", ["maps"], ["features"]),
        helper.make_node("GlobalAveragePool", ["features"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "v"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["shares"]),
    ]
    return fp16(nodes, weights, {"x": (batch, 4, 8, 8)}, {"shares": (batch, CLASSES)})


def layers(batch: int) -> Model:
    """Three layers, of which the last is the one whose operand stays."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(CHANNELS, CHANNELS)) / 32 for name in "uvw"}
    nodes: list[NodeProto] = []
    for before, weight, after in (("x", "u", "a"), ("b", "v", "c"), ("d", "w", "y")):
        nodes.append(helper.make_node("MatMul", [before, weight], [after]))
        if after != "y":
            nodes.append(helper.make_node("Relu", [after], [chr(ord(after) + 1)]))
    return fp16(nodes, weights, {"x": (batch, CHANNELS)}, {"y": (batch, CHANNELS)})


def fp16(
    nodes: list[NodeProto],
    weights: dict[str, np.ndarray],
    inputs: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[int, ...]],
) -> Model:
    return replace(model_of(nodes, weights, inputs=inputs, outputs=outputs), precision="fp16")


def stored(lowered: Lowered) -> dict[str, str]:
    """Return the type of what each kernel leaves, by its name."""
    bindings = [b for block in lowered.mod["main"].body.blocks for b in block.bindings]
    calls = [b for b in bindings if "call_tir" in str(getattr(b.value, "op", ""))]
    return {str(b.value.args[0].name_hint): str(b.var.ty.dtype) for b in calls}


@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["llvm", "cuda"])
@pytest.mark.parametrize("batch", BATCHES)
def test_what_is_before_and_after_the_last_layer_stays_in_fp32(
    batch: int, target: TargetSpec
) -> None:
    lowered = lower(classifier(batch), target)
    found = stored(lowered)
    (features,) = (name for name in found if "conv2d" in name)
    assert found.pop(features) == "float16"
    assert "mean" in found
    assert any("matmul" in name for name in found)
    assert set(found.values()) == {"float32"}
    (said,) = (note for note in lowered.notes if "stay float32" in note)
    assert ("few values of a sample, before or after the last layer" in said) == (batch == 8)
    assert "with sums of products, softmax and other reductions" in said


def test_a_batch_makes_no_kernel_more() -> None:
    one, eight = (stored(lower(classifier(batch), CUDA)) for batch in BATCHES)
    assert len(one) == len(eight)


def test_layers_before_the_last_are_stored_in_16_bits_where_they_are_not_few() -> None:
    assert sorted(stored(lower(layers(8), CUDA)).values()) == ["float16", "float32", "float32"]
