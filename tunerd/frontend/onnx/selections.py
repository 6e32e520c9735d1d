"""Write operators that select, sample or count by values: TopK, DeformConv, TfIdfVectorizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, inputs_of

if TYPE_CHECKING:
    import onnx

_MOST_COMPARED = 1 << 27  # pairs of elements: more want a sort


def ranked(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """TopK: the rank of an element is how many are before it, those that are equal in their order.

    TVM sorts by a function of its own, which is no kernel that can be tuned and knows no CUDA.
    """
    given = attributes_of(node)
    x = node.input[0]
    k = int(build.constant_of(node.input[1], "k").item()) if node.input[1:] else given["k"]
    shape, dtype = build.shape(x), build.dtype(x)
    last = len(shape) - 1
    axis = given.get("axis", -1) % len(shape)
    size = shape[axis]
    if math.prod(shape) * size > _MOST_COMPARED:
        raise ValueError(
            f"it ranks {size:,} elements in {math.prod(shape) // size:,} rows, by comparing each "
            f"with each, of which {_MOST_COMPARED:,} are done at most; rank after the model"
        )
    order = [*(i for i in range(last + 1) if i != axis), axis]
    back = [order.index(i) for i in range(last + 1)]
    rows = build.transpose(x, *order)
    if dtype.kind in "iu":
        rows = build.cast(rows, np.int64)
    one, others = build.unsqueeze(rows, last + 1), build.unsqueeze(rows, last)
    beats = build.op("Greater" if given.get("largest", 1) else "Less", others, one)
    is_earlier = build.constant(np.tri(size, k=-1), bool)
    beats = build.op("Or", beats, build.op("And", build.op("Equal", others, one), is_earlier))
    rank = build.reduce("ReduceSum", build.cast(beats, np.float32), [last + 1], keepdims=False)
    wanted = build.constant(np.arange(k).reshape(k, 1), np.float32)
    is_it = build.op("Equal", build.unsqueeze(rank, last), wanted)  # (rows, k, size)

    def taken(values: str, kind: np.dtype) -> str:
        zero = build.constant(0, kind)
        found = build.op("Where", is_it, values, zero)
        one_each = build.reduce("ReduceSum", found, [last + 1], keepdims=False)
        return build.transpose(one_each, *back)

    wide = np.dtype(np.int64) if dtype.kind in "iu" else dtype
    values = taken(others, wide)
    places = taken(build.constant(np.arange(size), np.int64), np.dtype(np.int64))
    return [values if wide == dtype else build.cast(values, dtype), places]


def deformed(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """DeformConv: bilinear samples of the image at each tap of each place, then a product.

    Outside of the image there are zeros (Dai et al., arXiv 1703.06211; Zhu et al., 1811.11168).
    """
    given = attributes_of(node)
    x, w, offset, b, mask = inputs_of(node, 5)
    batch, channels, height, width = build.shape(x)
    out_channels, per_group, *kernel = build.shape(w)
    rows, columns = build.shape(offset)[2:]
    groups, shifted = given.get("group", 1), given.get("offset_group", 1)
    strides, dilations = given.get("strides", [1, 1]), given.get("dilations", [1, 1])
    pads = given.get("pads", [0] * 4)
    taps, places, dtype = math.prod(kernel), rows * columns, build.dtype(x)
    op, own = build.op, channels // shifted

    def constant(values: object) -> str:
        return build.constant(values, dtype)

    # Where each tap lies, (batch, offset groups, taps, 1, rows, columns), along each axis.
    shifts = build.reshape(offset, batch, shifted, taps, 2, rows, columns)
    ends = []
    for axis, shift in enumerate(build.split(shifts, [1, 1], axis=3)):
        at = np.indices(kernel)[axis].reshape(taps, 1, 1, 1) * dilations[axis]
        start = np.indices((rows, columns))[axis] * strides[axis] - pads[axis]
        place = op("Add", shift, constant(at + start))
        low = op("Floor", place)
        part = op("Sub", place, low)
        high = op("Add", low, constant(1))
        size = (height, width)[axis]
        corners = []
        for corner, weight in ((low, op("Sub", constant(1), part)), (high, part)):
            inside = op("Max", op("Min", corner, constant(size - 1)), constant(0))
            is_inside = build.cast(op("Equal", inside, corner), dtype)
            corners.append((inside, op("Mul", weight, is_inside)))
        ends.append(corners)
    images = build.reshape(x, batch, shifted, own, height * width)
    total = ""
    for y, y_weight in ends[0]:
        for across, x_weight in ends[1]:
            index = build.cast(op("Add", op("Mul", y, constant(width)), across), np.int64)
            index = build.reshape(index, batch, shifted, 1, taps * places)
            full = build.constant((batch, shifted, own, taps * places), np.int64)
            found = op("GatherElements", images, op("Expand", index, full), axis=3)
            weight = build.reshape(op("Mul", y_weight, x_weight), batch, shifted, 1, taps * places)
            found = op("Mul", found, weight)
            total = op("Add", total, found) if total else found
    if mask:
        weight = build.reshape(mask, batch, shifted, 1, taps * places)
        total = op("Mul", total, weight)
    samples = build.reshape(total, batch, groups, per_group * taps, places)
    matrix = build.reshape(w, groups, out_channels // groups, per_group * taps)
    y = build.reshape(op("MatMul", matrix, samples), batch, out_channels, rows, columns)
    return [op("Add", y, build.reshape(b, out_channels, 1, 1)) if b else y]


def counted_grams(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """TfIdfVectorizer of integers: how often each n-gram of a pool occurs, skips included."""
    given = attributes_of(node)
    (x,) = node.input
    if "pool_strings" in given:
        raise ValueError("its n-grams are of strings; count them before the model")
    *outer, length = build.shape(x)
    pool, columns = np.array(given["pool_int64s"]), np.array(given["ngram_indexes"])
    starts = [*given["ngram_counts"], len(pool)]
    tokens = build.cast(build.reshape(x, -1, length), np.int64)
    found = []
    for n in range(1, len(starts)):
        grams = pool[starts[n - 1] : starts[n]].reshape(-1, n)
        if not len(grams):
            continue
        total = build.constant(np.zeros((1, len(grams))), np.float32)
        is_wanted = given["min_gram_length"] <= n <= given["max_gram_length"]
        for step in range(1, (1 if n == 1 else given["max_skip_count"] + 1) + 1):
            places = np.arange(length - (n - 1) * step)[:, None] + np.arange(n) * step
            if not is_wanted or not len(places):
                continue
            windows = build.op("Gather", tokens, build.constant(places, np.int64), axis=1)
            same = build.op("Equal", build.unsqueeze(windows, 2), build.constant(grams, np.int64))
            count = build.reduce("ReduceSum", build.cast(same, np.float32), [3], keepdims=False)
            is_whole = build.op("Equal", build.cast(count, np.int64), build.constant(n, np.int64))
            whole = build.cast(is_whole, np.float32)
            total = build.op("Add", total, build.reduce("ReduceSum", whole, [1], keepdims=False))
        rows = build.constant((math.prod(outer), len(grams)), np.int64)
        found.append(build.op("Expand", total, rows))
    counts = build.op("Concat", *found, axis=1) if len(found) > 1 else found[0]
    weights = np.array(given.get("weights", np.ones(len(columns))))
    if given["mode"] == "IDF":
        counts = build.op("Min", counts, build.constant(1, np.float32))
    if given["mode"] == "TF":
        weights = np.ones(len(columns))
    matrix = np.zeros((len(columns), columns.max() + 1))
    matrix[np.arange(len(columns)), columns] = weights
    y = build.op("MatMul", counts, build.constant(matrix, np.float32))
    return [build.reshape(y, *outer, matrix.shape[1])]
