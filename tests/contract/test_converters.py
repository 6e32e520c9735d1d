"""Operators that TVM's own importer gets wrong agree with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.lib.lowered import CUDA, LLVM, check, load, run
from tests.lib.models import floats, ints, model
from tunerd.errors import ModelError
from tunerd.frontend.relax import lowering
from tunerd.frontend.relax.lowering import lower
from tunerd.vocabulary import TargetSpec

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


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("factor", [0.5, 0.7, 1.3, 2])
def test_antialias_agrees(tmp_path: Path, mode: str, factor: float) -> None:
    check(load(tmp_path, resize((1, 1, factor, factor), mode=mode, antialias=1)))


@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("factor", [0.7, 1.3, 2])
def test_a_cubic_resize_agrees(tmp_path: Path, coordinates: str, factor: float) -> None:
    attributes = {"mode": "cubic", "coordinate_transformation_mode": coordinates}
    check(load(tmp_path, resize((1, 1, factor, factor), **attributes)))


def test_a_resize_to_one_element_agrees(tmp_path: Path) -> None:
    attributes = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    check(load(tmp_path, resize((1, 1, 0.1, 0.5), **attributes)))


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_a_resize_that_keeps_the_aspect_ratio_agrees(tmp_path: Path, policy: str) -> None:
    node = helper.make_node(
        "Resize",
        ["x", "", "", "sizes"],
        ["y"],
        mode="linear",
        axes=[2, 3],
        keep_aspect_ratio_policy=policy,
    )
    inputs, weights = {"x": (1, 3, 10, 7)}, {"sizes": ints(16, 14)}
    outputs = {"y": (None,) * 4}
    check(load(tmp_path, model([node], inputs=inputs, outputs=outputs, weights=weights, opset=18)))


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


def one(op: str, *, opset: int = 18, types: tuple[int, ...] = (), **attributes: Any) -> Any:
    """Return a model of one operator of one input, (3, 4, 5), from one type to another."""
    node = helper.make_node(op, ["x"], ["y"], **attributes)
    proto = model([node], inputs={"x": (3, 4, 5)}, outputs={"y": None}, opset=opset)
    for value, kind in zip((*proto.graph.input, *proto.graph.output), types, strict=False):
        value.type.tensor_type.elem_type = kind
    return proto


@pytest.mark.parametrize(("op", "wanted"), [("ReduceMax", True), ("ReduceMin", False)])
def test_the_largest_of_booleans_agrees(tmp_path: Path, op: str, wanted: bool) -> None:
    proto = one(op, opset=20, types=(TensorProto.BOOL, TensorProto.BOOL))
    x = np.zeros((3, 4, 5), bool)
    x[1, 2, 3] = True
    (got,) = run(lower(load(tmp_path, proto), LLVM), {"x": x})
    assert got.dtype == bool
    assert got.all() == wanted


@pytest.mark.parametrize(("op", "end"), [("ReduceMax", -np.inf), ("ReduceMin", np.inf)])
def test_the_largest_of_infinities_is_infinite(tmp_path: Path, op: str, end: float) -> None:
    loaded = load(tmp_path, one(op, opset=13, axes=[1], keepdims=0))
    x = np.zeros((3, 4, 5), np.float32)
    x[:, 1:, 0] = x[:, :, 1] = end
    (got,) = run(lower(loaded, LLVM), {"x": x})
    assert np.array_equal(got, getattr(np, op[-3:].lower())(x, axis=1))


@pytest.mark.parametrize("ends", [(0, 1), (1, 0), (1, 1)])
def test_the_two_infinities_are_told_apart(tmp_path: Path, ends: tuple[int, int]) -> None:
    node = helper.make_node("IsInf", ["x"], ["y"], detect_negative=ends[0], detect_positive=ends[1])
    proto = model([node], inputs={"x": (4,)}, outputs={"y": (4,)}, opset=20)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.BOOL
    x = np.array([-np.inf, np.inf, 1, np.nan], np.float32)
    (got,) = run(lower(load(tmp_path, proto), LLVM), {"x": x})
    assert got.tolist() == [bool(ends[0]), bool(ends[1]), False, False]


def test_powers_of_integers_agree(tmp_path: Path) -> None:
    node = helper.make_node("Pow", ["x", "n"], ["y"])
    proto = model([node], inputs={"x": (4,), "n": (4,)}, outputs={"y": (4,)})
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.INT64
    x, n = np.array([3, -2, 7, 10]), np.array([4, 5, 0, 12])
    (got,) = run(lower(load(tmp_path, proto), LLVM), {"x": x, "n": n})
    assert got.tolist() == (x**n).tolist()


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("target", [LLVM, CUDA])
def test_a_scan_agrees(
    tmp_path: Path, op: str, reverse: int, exclusive: int, target: TargetSpec
) -> None:
    node = helper.make_node(op, ["x", "axis"], ["y"], reverse=reverse, exclusive=exclusive)
    opset = 26 if op == "CumProd" else 17
    weights = {"axis": np.array(1)}
    outputs = {"y": (3, 11)}
    proto = model([node], inputs={"x": (3, 11)}, outputs=outputs, weights=weights, opset=opset)
    loaded = load(tmp_path, proto)
    if target is CUDA:
        lower(loaded, target)
    else:
        check(loaded)


def test_a_mask_of_nothing_but_infinity_gives_zeros_in_an_attention(tmp_path: Path) -> None:
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    shapes = dict.fromkeys("qkv", (1, 2, 4, 8))
    mask = np.zeros((4, 4), bool)
    mask[:2] = True
    proto = model([node], inputs=shapes, outputs={"y": (1, 2, 4, 8)}, weights={"mask": mask})
    proto.opset_import[0].version, proto.ir_version = 24, 11
    lowered = check(load(tmp_path, proto))
    feed = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    assert np.array_equal(run(lowered, feed)[0][:, :, 2:], np.zeros((1, 2, 2, 8), np.float32))


def test_an_operator_that_a_pass_fails_on_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = one("Relu")
    proto.graph.node[0].name = "the_first"
    loaded = load(tmp_path, proto)

    def fail(*_: object) -> None:
        raise RuntimeError("Divide by zero")

    monkeypatch.setattr(lowering, "_fuse", fail)
    with pytest.raises(ModelError, match="cannot lower Relu 'the_first' of net: Divide by zero; "):
        lower(loaded, LLVM)
