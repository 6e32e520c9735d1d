"""NonMaxSuppression with a bound: as many rows as it may select, those that it does not are -1.

How many boxes it selects depends on values, and kernels of fixed shapes write as many rows always.
`bounded` adds rows of -1 to what it selects, up to batches * classes * max_output_boxes_per_class
(or boxes, where they are fewer), in the graph itself: ONNX Runtime runs that, and verification
compares all rows. `suppressed` writes the operator as others, its rows of -1 included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, inputs_of
from tunerd.frontend.onnx.graphs import uses
from tunerd.frontend.onnx.loops import MAX_ROUNDS

if TYPE_CHECKING:
    import onnx

_MAX_ROWS = 4096  # each is compared with each
_AFTER = "do what comes after it outside of the model, with its rows that are not -1"


def bounded(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """Return a NonMaxSuppression's indices with rows of -1 behind them, up to its bound.

    Raises ValueError where nothing in the file bounds it, or the model reads its indices.
    """
    _require_unread(node, build)
    rows = _bound(node, build)[3]
    if build.opset < 11:
        raise ValueError("opset 10 has no gather that it needs; export the model with 11 or later")
    found = build.op(node.op_type, *node.input, **attributes_of(node))
    unused = build.constant(np.full((rows, 3), -1), np.int64)
    return [build.slice(build.op("Concat", found, unused, axis=0), 0, rows, 0)]


def suppressed(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """Select the box of the highest score, drop those that overlap it, and again, up to the bound.

    Of equal scores the first box is taken, as ONNX Runtime does.
    """
    op, constant = build.op, build.constant
    boxes, scores, _, threshold, least = inputs_of(node, 5)
    batch, classes, steps, rows = _bound(node, build)
    dtype, count = build.dtype(boxes), build.shape(boxes)[1]
    zero, none = constant(0, dtype), constant(-np.inf, dtype)
    corners, area = _corners(node, build, (batch, classes, count))
    left = op("Where", op("Greater", scores, least), scores, none) if least else scores
    places = constant(np.arange(count).reshape(1, 1, count), np.int64)
    selected = []
    for _ in range(steps):
        at = op("ArgMax", left, axis=2, keepdims=1)
        is_any = op("Greater", build.reduce("ReduceMax", left, [2]), none)
        selected.append(op("Where", is_any, at, constant(-1, np.int64)))
        x1, y1, x2, y2, own = (op("GatherElements", c, at, axis=2) for c in (*corners, area))
        width = op("Sub", op("Min", corners[2], x2), op("Max", corners[0], x1))
        height = op("Sub", op("Min", corners[3], y2), op("Max", corners[1], y1))
        shared = op("Mul", op("Max", width, zero), op("Max", height, zero))
        union = op("Sub", op("Add", own, area), shared)
        share = op(
            "Div", shared, op("Where", op("Greater", union, zero), union, constant(1, dtype))
        )
        overlaps = op("And", op("Greater", share, threshold or zero), op("Greater", shared, zero))
        gone = op("Or", overlaps, op("Equal", places, at))
        left = op("Where", gone, none, left)
    found = op("Concat", *selected, axis=2) if steps > 1 else selected[0]
    return [_packed(build, build.reshape(found, rows), (batch, classes, steps))]


def _corners(
    node: onnx.NodeProto, build: Builder, shape: tuple[int, int, int]
) -> tuple[list[str], str]:
    """Return x1, y1, x2, y2 of all boxes for each class, and their areas; all of `shape`."""
    op, dtype = build.op, build.dtype(node.input[0])
    parts = build.split(node.input[0], [1] * 4, axis=2)
    a, b, c, d = (build.reshape(p, shape[0], 1, shape[2]) for p in parts)
    if attributes_of(node).get("center_point_box", 0):
        half = build.constant(0.5, dtype)
        w, h = op("Mul", c, half), op("Mul", d, half)
        made = [op("Sub", a, w), op("Sub", b, h), op("Add", a, w), op("Add", b, h)]
    else:
        made = [op("Min", b, d), op("Min", a, c), op("Max", b, d), op("Max", a, c)]
    wide = build.constant(shape, np.int64)
    corners = [op("Expand", corner, wide) for corner in made]
    sides = op("Sub", corners[2], corners[0]), op("Sub", corners[3], corners[1])
    return corners, op("Mul", *sides)


def _packed(build: Builder, boxes: str, shape: tuple[int, int, int]) -> str:
    """Return rows (batch, class, box) of indices, those that are not -1 first."""
    op, constant = build.op, build.constant
    rows = int(np.prod(shape))
    batch, of_class, _ = np.indices(shape).reshape(3, rows, 1)
    is_any = op("Greater", boxes, constant(-1, np.int64))
    columns = [constant(batch, np.int64), constant(of_class, np.int64)]
    table = op("Concat", *columns, build.reshape(boxes, rows, 1), axis=1)
    if shape[:2] == (1, 1):
        return op("Where", build.reshape(is_any, rows, 1), table, constant(-1, np.int64))
    before = build.cast(is_any, np.float32)  # exact: rows are few
    earlier = constant(np.tri(rows, k=-1), np.float32)
    place = op("MatMul", earlier, build.reshape(before, rows, 1))
    wanted = constant(np.arange(rows).reshape(rows, 1), np.float32)
    is_it = op("Equal", wanted, build.reshape(place, 1, rows))
    is_it = op("And", is_it, build.reshape(is_any, 1, rows))
    one_each = op(
        "Where",
        build.unsqueeze(is_it, 2),
        op("Add", build.unsqueeze(table, 0), constant(1, np.int64)),
        constant(0, np.int64),
    )
    total = build.reduce("ReduceSum", one_each, [1], keepdims=False)
    return op("Sub", total, constant(1, np.int64))


def _bound(node: onnx.NodeProto, build: Builder) -> tuple[int, int, int, int]:
    """Return the numbers of batches, of classes, of boxes selected of each, and of all rows."""
    _, scores, most, *_ = inputs_of(node, 5)
    if not most:
        raise ValueError(
            "it selects nothing without max_output_boxes_per_class; export it with one"
        )
    limit = int(build.constant_of(most, "max_output_boxes_per_class").item())
    batch, classes, count = build.shape(scores)
    steps = min(limit, count)
    rows = batch * classes * steps
    if steps < 1:
        raise ValueError("max_output_boxes_per_class is 0; export it with the most that you want")
    if steps > MAX_ROUNDS or rows > _MAX_ROWS:
        raise ValueError(
            f"it may select {steps:,} boxes of a class and {rows:,} of all, and up to "
            f"{MAX_ROUNDS:,} and {_MAX_ROWS:,} are written as kernels; lower "
            "max_output_boxes_per_class, or do it outside of the model"
        )
    return batch, classes, steps, rows


def _require_unread(node: onnx.NodeProto, build: Builder) -> None:
    outputs = {value.name for value in build.graph.output}
    if node.output[0] not in outputs or uses(build.graph)[node.output[0]] > 1:
        raise ValueError(f"its indices are read in the model, whose sizes they change; {_AFTER}")
