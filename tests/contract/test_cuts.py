"""What constant indices take out of a tensor is a slice, which is part of the kernel that reads it.

Indices that do not follow each other stay what they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.contract.test_attention import (
    exported,
    feed_of,
    of_torchvision,
    of_torchvision_in_batches,
)
from tests.lib.lowered import CUDA, LLVM, load, operators, run
from tests.lib.models import floats, ints, model
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.vocabulary import Model, TargetSpec

SHAPE = (3, 4, 5)


def moved_and_taken(
    indices: np.ndarray, axis: int, moves: tuple[onnx.NodeProto, ...] = ()
) -> onnx.ModelProto:
    """Gather of what moves make of "x", and a Relu."""
    last = moves[-1].output[0] if moves else "x"
    nodes = [
        *moves,
        helper.make_node("Gather", [last, "at"], ["part"], axis=axis),
        helper.make_node("Relu", ["part"], ["y"]),
    ]
    weights = {"at": indices, "halves": ints(3, 2, 2, 5), "joined": ints(3, 4, 5)}
    inputs = {"x": SHAPE}
    proto = model(nodes, inputs=inputs, outputs={"y": None}, weights=weights, opset=18)
    return onnx.shape_inference.infer_shapes(proto)


def require_right(loaded: Model, lowered: Lowered) -> None:
    feed = {"x": floats(*SHAPE)}
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (got,) = run(lowered, feed)
    assert got.shape == expected.shape
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["CPU", "GPU"])
@pytest.mark.parametrize("form", [of_torchvision, of_torchvision_in_batches])
def test_each_part_of_a_product_is_copied_once_on_its_way_to_attention(
    form: object, target: TargetSpec, tmp_path: Path
) -> None:
    loaded = exported(form, tmp_path, "fp32")  # type: ignore[arg-type]
    lowered = lower(loaded, target)
    names = operators(lowered)
    assert not {n for n in names if "take" in n or "squeeze" in n}, names
    assert len({n for n in names if "slice" in n}) == 3, names
    feed = feed_of(loaded)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (got,) = run(lowered, feed)
    assert agree(got, expected, rtol=1e-3)


IN_A_ROW = {
    "one": np.array(1),
    "the last": np.array(-1),
    "one in a row": np.array([2]),
    "two": np.array([1, 2]),
    "the last two": np.array([-2, -1]),
    "the last three": np.array([-3, -2, -1], np.int32),
    "of a shape": np.array([[0, 1], [2, 3]]),
}


@pytest.mark.parametrize(
    ("name", "axis"),
    [(n, a) for n, at in IN_A_ROW.items() for a in (0, 1, 2, -1) if at.max() < SHAPE[a]],
)
def test_a_part_is_taken_by_the_kernel_that_reads_it(name: str, axis: int, tmp_path: Path) -> None:
    loaded = load(tmp_path, moved_and_taken(IN_A_ROW[name], axis))
    lowered = lower(loaded, LLVM)
    names = operators(lowered)
    assert len(names) == 1, names
    assert "take" not in names.pop()
    require_right(loaded, lowered)


SHUFFLE = (
    helper.make_node("Reshape", ["x", "halves"], ["apart"]),
    helper.make_node("Transpose", ["apart"], ["swapped"], perm=[0, 2, 1, 3]),
    helper.make_node("Reshape", ["swapped", "joined"], ["shuffled"]),
)
TRANSPOSE = (helper.make_node("Transpose", ["x"], ["t"], perm=[2, 0, 1]),)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("indices", [np.array(1), np.array([1, 2])], ids=["one", "two"])
@pytest.mark.parametrize("moves", [TRANSPOSE, SHUFFLE], ids=["transposed", "shuffled"])
def test_a_part_of_what_was_moved_is_right(
    moves: tuple[onnx.NodeProto, ...], indices: np.ndarray, axis: int, tmp_path: Path
) -> None:
    loaded = load(tmp_path, moved_and_taken(indices, axis, moves))
    lowered = lower(loaded, LLVM)
    assert not {n for n in operators(lowered) if "take" in n}
    require_right(loaded, lowered)


@pytest.mark.parametrize("indices", [[2, 1], [0, 2], [1, 1]])
def test_what_is_no_slice_is_taken_by_indices(indices: list[int], tmp_path: Path) -> None:
    loaded = load(tmp_path, moved_and_taken(np.array(indices), 1))
    lowered = lower(loaded, LLVM)
    assert {n for n in operators(lowered) if "take" in n}
    require_right(loaded, lowered)
