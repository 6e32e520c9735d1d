"""Write the kinds of Resize that TVM has no kernel for as a product with a matrix for each axis.

The matrix of an axis is what ONNX Runtime makes of the unit vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, inputs_of
from tunerd.frontend.onnx.reference import Reference

if TYPE_CHECKING:
    import onnx

_MAX_ELEMENTS = 1 << 24  # of a matrix


def resampled(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    """Return a Resize as products; None where TVM's own does it, or sizes are no constants."""
    if build.opset < 11:
        return None
    given = attributes_of(node)
    x, roi, scales, sizes = inputs_of(node, 4)
    shape = build.shape(x)
    axes = [a % len(shape) for a in given.get("axes", range(len(shape)))]
    factors = _numbers(build, scales, len(axes))
    wanted = _numbers(build, sizes, len(axes))
    regions = _numbers(build, roi, 2 * len(axes))
    if (factors is None) == (wanted is None) or build.dtype(x).kind != "f":
        return None
    policy, is_rounded = given.get("keep_aspect_ratio_policy", "stretch"), False
    sizes_wanted = wanted
    if wanted is not None and policy != "stretch":
        ratios = wanted / np.array([shape[a] for a in axes])
        ratio = ratios.min() if policy == "not_larger" else ratios.max()
        rounded = [int(np.floor(ratio * shape[a] + 0.5)) for a in axes]
        # Places follow from the ratio, and a Resize by it takes the next smaller size.
        factors, wanted = np.full(len(axes), ratio, np.float32), None
        is_rounded = rounded != [int(np.float32(shape[a]) * factors[0]) for a in axes]
    if policy == "stretch" and not _is_special(given, [shape[a] for a in axes], factors, wanted):
        return None
    dtype = build.dtype(x)
    for i, axis in enumerate(axes):
        if is_rounded:
            matrix, shift = _matrix_among(build, given, [shape[a] for a in axes], sizes_wanted, i)
            x = _along(build, x, axis, len(shape), matrix.astype(dtype), shift.astype(dtype))
            continue
        region = None if regions is None else (regions[i], regions[i + len(axes)])
        matrix, shift = _matrix(
            build,
            {k: v for k, v in given.items() if k not in ("axes", "keep_aspect_ratio_policy")},
            shape[axis],
            scale=None if factors is None else float(factors[i]),
            size=None if wanted is None else int(wanted[i]),
            region=region,
        )
        if matrix.shape[0] == matrix.shape[1] and (matrix == np.eye(len(matrix))).all():
            continue
        x = _along(build, x, axis, len(shape), matrix.astype(dtype), shift.astype(dtype))
    return [x]


def _numbers(build: Builder, name: str, count: int) -> np.ndarray | None:
    values = build.value(name) if name else None
    return values if values is not None and values.size == count else None


def _is_special(
    given: dict[str, Any],
    shape: Sequence[int],
    factors: np.ndarray | None,
    wanted: np.ndarray | None,
) -> bool:
    mode = given.get("mode", "nearest")
    coordinates = given.get("coordinate_transformation_mode", "half_pixel")
    new = wanted if wanted is not None else np.floor(np.array(shape) * factors)
    shrinks = any(n < s for n, s in zip(new, shape, strict=True))
    if coordinates == "tf_crop_and_resize":
        return "axes" in given
    if mode == "nearest":
        return False
    if given.get("antialias", 0) and shrinks:
        return True
    to_one = coordinates == "align_corners" and any(
        n == 1 < s for n, s in zip(new, shape, strict=True)
    )
    is_whole = factors is None or (np.array(shape) * factors == new).all()
    return to_one or (mode == "cubic" and not is_whole)


def _matrix(
    build: Builder,
    given: dict[str, Any],
    length: int,
    *,
    scale: float | None,
    size: int | None,
    region: tuple[float, float] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what becomes of the unit vectors of an axis, (length, new), and of zeros, (new,)."""
    from onnx import TensorProto, helper, numpy_helper

    if length * length > _MAX_ELEMENTS:
        raise ValueError(f"it resizes an axis of {length:,} elements; export it with mode=nearest")
    constants = {
        "roi": np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32),
        "scales": np.array([] if scale is None else [1, 1, 1, scale], np.float32),
    }
    names = ["x", "roi", "scales"]
    if region is not None:
        constants["roi"][[3, 7]] = region
    if size is not None:
        constants["sizes"] = np.array([1, 1, length + 1, size], np.int64)
        names = ["x", "roi", "", "sizes"]
    graph = helper.make_graph(
        [helper.make_node("Resize", names, ["y"], **given)],
        "axis",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, length + 1, length])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)],
        [numpy_helper.from_array(v, n) for n, v in constants.items() if n in names],
    )
    opsets = [helper.make_opsetid("", build.opset)]
    units = np.concatenate([np.eye(length, dtype=np.float32), np.zeros((1, length), np.float32)])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    found = Reference(model).run({"x": units[None, None]})["y"][0, 0]
    return found[:-1] - found[-1], found[-1]


def _matrix_among(
    build: Builder, given: dict[str, Any], shape: Sequence[int], wanted: Any, at: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `_matrix` does of one axis whose size is rounded up, by resizing all of them."""
    from onnx import TensorProto, helper, numpy_helper

    length, rank = shape[at], len(shape)
    if length * np.prod(shape) > _MAX_ELEMENTS:
        raise ValueError(f"it resizes an axis of {length:,} elements; export it with mode=nearest")
    units = np.concatenate([np.eye(length, dtype=np.float32), np.zeros((1, length), np.float32)])
    units = units.reshape(1, length + 1, *(length if i == at else 1 for i in range(rank)))
    x = np.ascontiguousarray(np.broadcast_to(units, (1, length + 1, *shape)))
    given = given | {"axes": list(range(2, rank + 2))}
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **given)],
        "axes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * (rank + 2))],
        [numpy_helper.from_array(np.asarray(wanted, np.int64), "sizes")],
    )
    opsets = [helper.make_opsetid("", build.opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    y = Reference(model).run({"x": x})["y"][0]
    found = y[(slice(None), *(slice(None) if i == at else 0 for i in range(rank)))]
    return found[:-1] - found[-1], found[-1]


def _along(
    build: Builder, x: str, axis: int, rank: int, matrix: np.ndarray, shift: np.ndarray
) -> str:
    others = [i for i in range(rank) if i != axis]
    x = build.transpose(x, *others, axis) if axis != rank - 1 else x
    x = build.op("MatMul", x, build.constant(matrix))
    if shift.any():
        x = build.op("Add", x, build.constant(shift))
    back = [*range(axis), rank - 1, *range(axis, rank - 1)]
    return build.transpose(x, *back) if axis != rank - 1 else x
