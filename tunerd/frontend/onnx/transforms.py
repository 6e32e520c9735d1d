"""Write Fourier transforms as products with their matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, inputs_of

if TYPE_CHECKING:
    import onnx

_MOST_ELEMENTS = 1 << 24  # of a matrix; more want an algorithm of their own


def transformed(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """DFT along one axis, of real or complex numbers, also inverse and of half a spectrum."""
    given = attributes_of(node)
    x, length_input, axis_input = inputs_of(node, 3)
    shape = build.shape(x)
    axis = -2 if build.opset >= 20 else 1
    axis = int(build.constant_of(axis_input, "axis")) if axis_input else given.get("axis", axis)
    axis %= len(shape)
    inverse, onesided = bool(given.get("inverse", 0)), bool(given.get("onesided", 0))
    to_real = inverse and onesided
    length = 2 * (shape[axis] - 1) if to_real else shape[axis]
    if length_input:
        length = int(build.constant_of(length_input, "dft_length").item())
    used = min(shape[axis], length // 2 + 1 if to_real else length)
    count = length if not onesided or inverse else length // 2 + 1
    cos, sin = _matrices(used, count, length)
    if inverse:
        cos, sin = cos / length, -sin / length
    if to_real:  # the other half of the spectrum is its mirror image
        twice = np.full((used, 1), 2.0)
        twice[0] = 1
        if length % 2 == 0 and used == length // 2 + 1:
            twice[-1] = 1
        cos, sin = cos * twice, sin * twice
    last = len(shape) - 1
    order = [*(i for i in range(last) if i != axis), axis]
    parts = []
    for part in build.split(x, [1] * shape[-1], axis=last):
        rows = build.transpose(build.squeeze(part, last), *order)
        parts.append(build.slice(rows, 0, used, last - 1) if used < shape[axis] else rows)
    back = [order.index(i) for i in range(last)]
    made = [
        build.unsqueeze(build.transpose(each, *back), last)
        for each in _products(build, parts, cos, sin, build.dtype(x))
    ]
    return [made[0] if to_real else build.op("Concat", *made, axis=last)]


def transformed_frames(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    """STFT: the frames of a signal, each times the window, and their transforms."""
    signal, step_input, window, length_input = inputs_of(node, 4)
    batch, samples, kinds = build.shape(signal)
    step = int(build.constant_of(step_input, "frame_step").item())
    length = build.shape(window)[0] if window else samples
    if length_input:
        length = int(build.constant_of(length_input, "frame_length").item())
    count = length // 2 + 1 if attributes_of(node).get("onesided", 1) else length
    starts = np.arange(0, samples - length + 1, step)
    places = build.constant(starts[:, None] + np.arange(length), np.int64)
    parts = []
    for part in build.split(signal, [1] * kinds, axis=2):
        frames = build.op("Gather", build.reshape(part, batch, samples), places, axis=1)
        parts.append(build.op("Mul", frames, window) if window else frames)
    cos, sin = _matrices(length, count, length)
    made = _products(build, parts, cos, sin, build.dtype(signal))
    return [build.op("Concat", *(build.unsqueeze(each, 3) for each in made), axis=3)]


def _matrices(rows: int, columns: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and -sin of 2 pi n k / length, (rows, columns), in double precision."""
    if rows * columns > _MOST_ELEMENTS:
        raise ValueError(
            f"it is of {rows:,} values, and up to {int(_MOST_ELEMENTS**0.5):,} are a product with "
            "a matrix; transform before the model, or in frames"
        )
    turns = np.outer(np.arange(rows), np.arange(columns)) % length / length
    return np.cos(2 * np.pi * turns), -np.sin(2 * np.pi * turns)


def _products(
    build: Builder, parts: Sequence[str], cos: np.ndarray, sin: np.ndarray, dtype: np.dtype
) -> tuple[str, str]:
    """Return the real and the imaginary part of a product; `parts` are one or both of x's."""
    matrices = [build.constant(each, dtype) for each in (cos, sin)]
    real, imaginary = (build.op("MatMul", parts[0], matrix) for matrix in matrices)
    if len(parts) == 2:
        real = build.op("Sub", real, build.op("MatMul", parts[1], matrices[1]))
        imaginary = build.op("Add", imaginary, build.op("MatMul", parts[1], matrices[0]))
    return real, imaginary
