"""Operators that TVM's own importer gets wrong agree with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lowered import LLVM, check, load
from models import floats, ints, model
from onnx import TensorProto, helper

from tunerd.errors import ModelError
from tunerd.frontend.relax.lowering import lower

# --- Resize and Upsample -----------------------------------------------------------------------


def resize(
    scales: tuple[float, ...],
    *,
    size: tuple[int, ...] = (1, 3, 10, 7),
    opset: int = 18,
    **attributes: Any,
) -> onnx.ModelProto:
    inputs = ["x", "scales"] if opset == 10 else ["x", "", "scales"]
    node = helper.make_node("Resize", inputs, ["y"], **attributes)
    weights = {"scales": np.array(scales, np.float32)}
    outputs = {"y": (None,) * len(size)}
    return model([node], inputs={"x": size}, outputs=outputs, weights=weights, opset=opset)


@pytest.mark.parametrize("scales", [(1, 1, 0.7, 0.65), (1, 1, 1.5, 1.3), (1, 1, 1.04, 2)])
@pytest.mark.parametrize(
    "coordinates",
    ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric"],
)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_scales_that_give_no_whole_sizes_are_taken_at_their_word(
    tmp_path: Path, scales: tuple[float, ...], coordinates: str, mode: str
) -> None:
    opset = 19 if coordinates == "half_pixel_symmetric" else 13
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    check(load(tmp_path, resize(scales, opset=opset, **attributes)))


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_every_rounding_of_the_nearest_element_agrees(tmp_path: Path, rounding: str) -> None:
    check(load(tmp_path, resize((1, 1, 0.6, 1.7), mode="nearest", nearest_mode=rounding)))


@pytest.mark.parametrize("size", [(1, 3, 9), (1, 2, 5, 6, 7)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_one_or_three_dimensions_are_resized(
    tmp_path: Path, size: tuple[int, ...], mode: str
) -> None:
    check(load(tmp_path, resize((1, 1, *[0.7] * (len(size) - 2)), size=size, mode=mode)))


def test_some_axes_are_resized_to_sizes(tmp_path: Path) -> None:
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="linear", axes=[2, 3])
    proto = model(
        [node],
        inputs={"x": (1, 3, 10, 7)},
        outputs={"y": (1, 3, 16, 14)},
        weights={"sizes": ints(16, 14)},
        opset=18,
    )
    check(load(tmp_path, proto))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (1, 1, 1.5, 1.3), (1, 1, 0.7, 0.5)])
def test_a_resize_of_opset_10_agrees(tmp_path: Path, mode: str, scales: tuple[float, ...]) -> None:
    check(load(tmp_path, resize(scales, opset=10, mode=mode)))


@pytest.mark.parametrize("opset", [7, 9])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [(1.0, 1.0, 2.0, 2.0), (1.0, 1.0, 1.5, 1.3)])
def test_an_upsample_agrees(
    tmp_path: Path, opset: int, mode: str, scales: tuple[float, ...]
) -> None:
    if opset == 7:
        node = helper.make_node("Upsample", ["x"], ["y"], mode=mode, scales=scales)
    else:
        node = helper.make_node("Upsample", ["x", "scales"], ["y"], mode=mode)
    proto = model(
        [node],
        inputs={"x": (1, 3, 10, 7)},
        outputs={"y": (None,) * 4},
        weights={"scales": np.array(scales, np.float32)} if opset == 9 else {},
        opset=opset,
    )
    check(load(tmp_path, proto))


def test_antialias_is_refused_by_name_where_an_axis_shrinks(tmp_path: Path) -> None:
    grown = load(tmp_path, resize((1, 1, 2, 2), mode="linear", antialias=1))
    check(grown)
    shrunk = load(tmp_path, resize((1, 1, 0.5, 0.5), mode="linear", antialias=1))
    with pytest.raises(ModelError, match="Resize of opset 18: antialias=1 where an axis shrinks; "):
        lower(shrunk, LLVM)


def test_a_cubic_resize_by_scales_that_give_no_whole_sizes_is_refused(tmp_path: Path) -> None:
    check(load(tmp_path, resize((1, 1, 2, 2), mode="cubic")))
    with pytest.raises(ModelError, match="Resize of opset 18: mode=cubic by scales that do not gi"):
        lower(load(tmp_path, resize((1, 1, 0.7, 0.7), mode="cubic")), LLVM)


# --- attributes, pads, types ---------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"axes": [1, 3]}, {}])
def test_a_slice_of_opset_9_agrees(tmp_path: Path, axes: dict[str, list[int]]) -> None:
    node = helper.make_node("Slice", ["x"], ["y"], starts=[0, 1], ends=[2, 3], **axes)
    inputs = {"x": (3, 3, 5, 7)}
    check(load(tmp_path, model([node], inputs=inputs, outputs={"y": (None,) * 4}, opset=9)))


@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("auto_pad", ["SAME_LOWER", "SAME_UPPER"])
def test_a_max_pool_of_the_same_size_agrees(tmp_path: Path, size: int, auto_pad: str) -> None:
    shape = (1, 4, size, size)
    node = helper.make_node(
        "MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], auto_pad=auto_pad
    )
    check(load(tmp_path, model([node], inputs={"x": shape}, outputs={"y": (None,) * 4})))


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_LOWER", "SAME_UPPER"])
@pytest.mark.parametrize("wanted", [(16, 16), (15, 17)])
def test_a_transposed_convolution_of_a_given_output_shape_agrees(
    tmp_path: Path, auto_pad: str, wanted: tuple[int, int]
) -> None:
    node = helper.make_node(
        "ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], output_shape=wanted, auto_pad=auto_pad
    )
    weights = {"w": floats(3, 4, 4, 4)}
    outputs = {"y": (1, 4, *wanted)}
    check(
        load(tmp_path, model([node], inputs={"x": (1, 3, 8, 8)}, outputs=outputs, weights=weights))
    )


def test_one_hot_has_the_type_of_its_values(tmp_path: Path) -> None:
    node = helper.make_node("OneHot", ["x", "depth", "values"], ["y"])
    proto = model(
        [node],
        inputs={"x": (4,)},
        outputs={"y": (4, 5)},
        weights={"depth": np.array(5), "values": np.array([0.5, 2], np.float32)},
    )
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    check(load(tmp_path, proto))
