"""Write single operators as simpler ones that TVM has kernels for on any device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, inputs_of

if TYPE_CHECKING:
    import onnx

_LAST = 2**31 - 1  # an end of a slice beyond any axis


def scanned(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """CumSum and CumProd: each step joins twice as many elements as the one before."""
    given = attributes_of(node)
    x, axis_input = node.input
    shape = build.shape(x)
    axis = int(build.constant_of(axis_input, "axis").item()) % len(shape)
    size, kind = shape[axis], "Add" if node.op_type == "CumSum" else "Mul"
    reverse = bool(given.get("reverse", 0))

    def shifted(values: str, by: int) -> tuple[str, str, str]:
        """Return the elements that have none `by` before them, the others, and those before."""
        if reverse:
            return (
                build.slice(values, size - by, _LAST, axis),
                build.slice(values, 0, size - by, axis),
                build.slice(values, by, _LAST, axis),
            )
        return (
            build.slice(values, 0, by, axis),
            build.slice(values, by, _LAST, axis),
            build.slice(values, 0, size - by, axis),
        )

    def joined(first: str, rest: str) -> str:
        parts = (rest, first) if reverse else (first, rest)
        return build.op("Concat", *parts, axis=axis)

    total, by = x, 1
    while by < size:
        first, rest, before = shifted(total, by)
        total = joined(first, build.op(kind, rest, before))
        by *= 2
    if given.get("exclusive", 0):
        edge = [*shape[:axis], 1, *shape[axis + 1 :]]
        start = build.constant(np.full(edge, kind == "Mul"), build.dtype(x))
        total = joined(start, shifted(total, 1)[2]) if size > 1 else start
    return [total]


def trained_norm(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    """BatchNormalization that trains: by the batch's mean and variance, which are outputs, too."""
    given = attributes_of(node)
    if not given.get("training_mode", 0):
        return None
    x, scale, bias, mean, var = node.input
    op, momentum = build.op, float(given.get("momentum", 0.9))
    rank, dtype = len(build.shape(x)), build.dtype(x)
    axes = [i for i in range(rank) if i != 1]
    of_batch = build.reduce("ReduceMean", x, axes)
    centred = op("Sub", x, of_batch)
    spread = build.reduce("ReduceMean", op("Mul", centred, centred), axes)
    epsilon = build.constant(given.get("epsilon", 1e-5), dtype)
    normal = op("Div", centred, op("Sqrt", op("Add", spread, epsilon)))
    column = [-1, *[1] * (rank - 2)]
    y = op("Add", op("Mul", normal, build.reshape(scale, *column)), build.reshape(bias, *column))
    outputs = [y]
    for running, now in ((mean, of_batch), (var, spread)):
        kept = op("Mul", running, build.constant(momentum, build.dtype(running)))
        new = build.cast(build.reshape(now, -1), build.dtype(running))
        new = op("Mul", new, build.constant(1 - momentum, build.dtype(running)))
        outputs.append(op("Add", kept, new))
    return outputs


def identity_like(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """EyeLike: a constant."""
    from onnx import helper

    given = attributes_of(node)
    dtype = build.dtype(node.input[0])
    if "dtype" in given:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(given["dtype"]))
    rows, columns = build.shape(node.input[0])
    return [build.constant(np.eye(rows, columns, int(given.get("k", 0))), dtype)]


def listed_axes(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    """Unsqueeze by an axis that is a number, and not a list of one."""
    axes = build.value(node.input[1]) if node.input[1:] else None
    if axes is None or axes.ndim:
        return None
    return [build.unsqueeze(node.input[0], int(axes))]


def compressed(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """Compress by a condition that is a constant: a gather."""
    x, condition = node.input
    axis = attributes_of(node).get("axis")
    wanted = np.flatnonzero(build.constant_of(condition, "condition"))
    if not wanted.size:
        raise ValueError("its condition selects nothing; export the model without it")
    if axis is None:
        x, axis = build.reshape(x, -1), 0
    return [build.op("Gather", x, build.constant(wanted, np.int64), axis=axis)]


def determinant(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    """Det of up to 3 x 3: the sum of its products (Leibniz). Larger ones are left as they are."""
    (x,) = node.input
    *outer, _, size = build.shape(x)
    if size > 3:
        return None
    entries = build.split(build.reshape(x, -1, size * size), [1] * size * size, axis=1)
    total = ""
    for order in itertools.permutations(range(size)):
        product = functools.reduce(
            lambda a, b: build.op("Mul", a, b), (entries[i * size + j] for i, j in enumerate(order))
        )
        inversions = sum(a > b for a, b in itertools.combinations(order, 2))
        if not total:
            total = product
        else:
            total = build.op("Sub" if inversions % 2 else "Add", total, product)
    return [build.reshape(total, *outer)]


def pooled_places(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    """MaxPool with the places of its values: each tap of the window in turn, the first best."""
    if not any(node.output[1:]):
        return None
    given, (x,) = attributes_of(node), node.input
    if given.get("ceil_mode", 0) or given.get("auto_pad", "NOTSET") != "NOTSET":
        raise ValueError("its places are not taken with ceil_mode or auto_pad; export it with pads")
    batch, channels, *sizes = build.shape(x)
    rank, dtype = len(sizes), build.dtype(x)
    kernel = given["kernel_shape"]
    strides, dilations = given.get("strides", [1] * rank), given.get("dilations", [1] * rank)
    pads = given.get("pads", [0] * 2 * rank)
    shape = [
        (sizes[i] + pads[i] + pads[i + rank] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1
        for i in range(rank)
    ]
    starts = np.indices(shape).reshape(rank, -1) * np.array(strides)[:, None]
    flat = build.reshape(x, batch * channels, -1)
    limits = np.array(sizes).reshape(rank, 1)
    best = places = ""
    order = sizes[::-1] if given.get("storage_order", 0) else sizes
    base = np.arange(batch * channels).reshape(-1, 1) * int(np.prod(sizes))
    least = build.constant(np.finfo(dtype).min if dtype.kind == "f" else np.iinfo(dtype).min, dtype)
    for tap in np.ndindex(*kernel):
        shifts = [t * d - p for t, d, p in zip(tap, dilations, pads, strict=False)]
        at = starts + np.array(shifts)[:, None]
        inside = ((at >= 0) & (at < limits)).all(axis=0)
        held = np.clip(at, 0, limits - 1)
        index = np.ravel_multi_index(tuple(held), tuple(sizes))
        turned = tuple(held[::-1]) if given.get("storage_order", 0) else tuple(held)
        value = build.op("Gather", flat, build.constant(index, np.int64), axis=1)
        value = build.op("Where", build.constant(inside, bool), value, least)
        place = build.constant(base + np.ravel_multi_index(turned, tuple(order)), np.int64)
        if not best:
            best, places = value, place
            continue
        is_more = build.op("Greater", value, best)
        places = build.op("Where", is_more, place, places)
        best = build.op("Max", value, best)
    return [build.reshape(each, batch, channels, *shape) for each in (best, places)]


def kept_all(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """Dropout in an inference: nothing is dropped, and the mask says so."""
    x, ratio, training = inputs_of(node, 3)
    trains = bool(training) and (
        build.value(training) is None or build.constant_of(training, "").any()
    )
    rate = build.value(ratio) if ratio else np.array(0.5)
    if trains and (rate is None or rate.any()):
        raise ValueError("it drops random values, as in training; export the model for inference")
    mask_dtype = bool if build.opset >= 10 else build.dtype(x)
    return [x, build.constant(np.ones(build.shape(x)), mask_dtype)]


def turned(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """ReverseSequence: a gather, by indices that count backwards up to each length."""
    given = attributes_of(node)
    x, lengths = node.input
    time, batch = given.get("time_axis", 0), given.get("batch_axis", 1)
    shape = build.shape(x)
    rows = [1] * len(shape)
    rows[batch] = shape[batch]
    steps = [1] * len(shape)
    steps[time] = shape[time]
    at = build.constant(np.arange(shape[time]).reshape(steps), np.int64)
    ends = build.reshape(build.cast(lengths, np.int64), *rows)
    last = build.op("Sub", ends, build.constant(1, np.int64))
    index = build.op("Where", build.op("Less", at, ends), build.op("Sub", last, at), at)
    index = build.op("Expand", index, build.constant(shape, np.int64))
    return [build.op("GatherElements", x, index, axis=time)]


def updated(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """TensorScatter: a scatter, from each sequence's place on, around the end if it is circular."""
    given = attributes_of(node)
    past, update, places = inputs_of(node, 3)
    shape = build.shape(update)
    axis = given.get("axis", -2) % len(shape)
    steps = [1] * len(shape)
    steps[axis] = shape[axis]
    index = build.constant(np.arange(shape[axis]).reshape(steps), np.int64)
    if places:
        start = build.reshape(places, shape[0], *[1] * (len(shape) - 1))
        index = build.op("Add", start, index)
    if given.get("mode", "linear") == "circular":
        index = build.op("Mod", index, build.constant(build.shape(past)[axis], np.int64))
    index = build.op("Expand", index, build.constant(shape, np.int64))
    return [build.op("ScatterElements", past, index, update, axis=axis)]


def folded(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """Col2Im: a transposed convolution with a kernel for each of its places."""
    given = attributes_of(node)
    x, image_input, block_input = node.input
    image = [int(n) for n in build.constant_of(image_input, "image_shape")]
    block = [int(n) for n in build.constant_of(block_input, "block_shape")]
    rank = len(image)
    strides = given.get("strides", [1] * rank)
    dilations = given.get("dilations", [1] * rank)
    pads = given.get("pads", [0] * 2 * rank)
    batch, rows, _ = build.shape(x)
    count = int(np.prod(block))
    reach = [(b - 1) * d + 1 for b, d in zip(block, dilations, strict=True)]
    blocks = [
        (image[i] + pads[i] + pads[i + rank] - reach[i]) // strides[i] + 1 for i in range(rank)
    ]
    kernel = np.zeros((count, 1, *reach), build.dtype(x))
    for at, place in enumerate(np.ndindex(*block)):
        kernel[(at, 0, *(p * d for p, d in zip(place, dilations, strict=True)))] = 1
    channels = rows // count
    images = build.reshape(x, batch * channels, count, *blocks)
    # What strides leave over at the end belongs to the image, too.
    over = [
        image[i] + pads[i] + pads[i + rank] - reach[i] - (blocks[i] - 1) * strides[i]
        for i in range(rank)
    ]
    made = build.op(
        "ConvTranspose",
        images,
        build.constant(kernel),
        strides=strides,
        pads=pads,
        output_padding=over,
    )
    return [build.reshape(made, batch, channels, *image)]
