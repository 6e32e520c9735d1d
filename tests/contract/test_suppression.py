"""NonMaxSuppression with a bound: all of its rows agree with ONNX Runtime's, unused ones are -1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib.lowered import CUDA, LLVM, check, compiled, load, run
from tests.lib.models import load_model
from tunerd.errors import ModelError
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks

BATCH, CLASSES, BOXES = 2, 3, 12


def suppression(most: int | None, *, center: int = 0, read: bool = False) -> onnx.ModelProto:
    names = ["boxes", "scores", "most" if most is not None else "", "iou", "least"]
    nodes = [
        helper.make_node("NonMaxSuppression", names, ["selected"], center_point_box=center),
    ]
    constants = [
        numpy_helper.from_array(np.float32([0.4]), "iou"),
        numpy_helper.from_array(np.float32([0.3]), "least"),
    ]
    if most is not None:
        constants.append(numpy_helper.from_array(np.array([most]), "most"))
    output = "selected"
    if read:
        constants.append(numpy_helper.from_array(np.array([2]), "column"))
        nodes.append(helper.make_node("Gather", ["selected", "column"], ["places"], axis=1))
        output = "places"
    inputs = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, (BATCH, BOXES, 4)),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, (BATCH, CLASSES, BOXES)),
    ]
    outputs = [helper.make_tensor_value_info(output, TensorProto.INT64, None)]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def given(seed: int) -> dict[str, np.ndarray]:
    """Return boxes that overlap, of flipped corners too, and scores of which some are equal."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 8, (BATCH, CLASSES, BOXES)) / np.float32(8)
    return {
        "boxes": rng.random((BATCH, BOXES, 4), np.float32),
        "scores": scores.astype(np.float32),
    }


@pytest.mark.parametrize("most", [1, 4, 50])
@pytest.mark.parametrize("center", [0, 1])
def test_selected_boxes_come_first_and_the_others_are_no_boxes(
    tmp_path: Path, center: int, most: int
) -> None:
    loaded = load(tmp_path, suppression(most, center=center))
    rows = BATCH * CLASSES * min(most, BOXES)
    assert loaded.outputs[0].shape == (rows, 3)
    assert "unused ones are -1" in loaded.notes[0]
    run_it = compiled(lower(loaded, LLVM))
    reference = Reference(suppression(most, center=center))
    for seed in range(4):
        (got,) = run_it(given(seed))
        expected = reference.run(given(seed))["selected"]
        np.testing.assert_array_equal(got[: len(expected)], expected)
        assert (got[len(expected) :] == -1).all()


def test_no_box_at_all_is_selected_where_no_score_is_enough(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, suppression(4)), LLVM)
    (got,) = run(lowered, given(0) | {"scores": np.zeros((BATCH, CLASSES, BOXES), np.float32)})
    assert (got == -1).all()


def test_verification_compares_all_rows(tmp_path: Path) -> None:
    check(load(tmp_path, suppression(4)))


def test_it_is_kernels_on_a_gpu(tmp_path: Path) -> None:
    onnx.save(suppression(4), tmp_path / "net.onnx")
    lowered = lower(load_model(tmp_path / "net.onnx"), CUDA)
    assert extract_tasks(lowered, CUDA)


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (suppression(None), "without max_output_boxes_per_class"),
        (suppression(4, read=True), "outside of the model, with its rows that are not -1"),
        (suppression(0), "with the most that you want"),
    ],
)
def test_without_a_bound_it_is_refused_with_a_way_out(
    tmp_path: Path, proto: onnx.ModelProto, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        load(tmp_path, proto)
