"""Which named dimensions of a model may be padded: tried out in ONNX Runtime.

A call with fewer rows than a compiled size has is filled up with zeros and its outputs are cut.
That is right where the rows of a batch do not see each other, or where a mask hides the end of a
sequence, and wrong otherwise. What the graph says of it is hard to read off, so it is tried: the
model runs on seeded inputs of one size, and on the same inputs within the next larger one, whose
rest is zeros in one run and random in another (of masks always zeros). All must give the same
outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tunerd.frontend.model import FixedModel, read_model
from tunerd.frontend.onnx.file import read_proto
from tunerd.frontend.onnx.reference import agree
from tunerd.frontend.onnx.shapes import Shape, declared_inputs
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Arrays

log = logging.getLogger(__name__)

Sizes = Mapping[str, int]
_RTOL = {"float16": 2e-2}  # of the largest value; as for models, in system.arrays
_MASK = "mask"


def axes_of(
    path: Path,
    sizes: Sequence[Sizes],
    *,
    shapes: Mapping[str, Shape],
    batch: int | None,
    leading: str = "",
    constants: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return for each dimension the axes of inputs and outputs that it is, and whether it pads.

    As JSON: {"batch": {"inputs": {"x": [0]}, "outputs": {"y": [0]}, "pads": true}}. A dimension of
    one size in all `sizes` does not pad. Raises as `read_model` does.

    Args:
        leading: the one of the dimensions that is first of every input, whatever the file calls
            it; `batch` is one of its sizes then.
    """
    declared = {
        i.name: i.dims or ()
        for i in declared_inputs(read_proto(path)[0].graph)
        if i.name not in constants
    }
    found = {}
    for dim in sizes[0]:
        inputs = {
            name: axes
            for name, dims in declared.items()
            if (axes := [0][: len(dims)] if dim == leading else _axes(dims, dim))
        }
        known = sorted({each[dim] for each in sizes})
        outputs: dict[str, list[int]] | None = None
        if len(known) > 1:
            small, large = (
                read_model(
                    path,
                    shapes=shapes,
                    constants=constants,
                    dims={n: s for n, s in {**sizes[0], dim: size}.items() if n != leading},
                    batch=size if dim == leading else batch,
                )
                for size in known[:2]
            )
            outputs = _cut_axes(small, large, (known[0], known[1]))
        found[dim] = {"inputs": inputs, "outputs": outputs or {}, "pads": outputs is not None}
    return found


def _axes(dims: Sequence[object], dim: str) -> list[int]:
    return [axis for axis, each in enumerate(dims) if each == dim]


def _cut_axes(
    small: FixedModel, large: FixedModel, sizes: tuple[int, int]
) -> dict[str, list[int]] | None:
    """Return the axes of the outputs that have a dimension's size; None where padding shows."""
    feed = random_inputs(small.inputs, seed=0)
    try:
        (expected,) = small.graph.run([feed])
        padded = large.graph.run([_within(feed, filler) for filler in _fillers(large)])
    except Exception:  # ONNX Runtime's exceptions have no public base class
        log.info("no size is padded: the model cannot be run at both", exc_info=True)
        return None
    axes: dict[str, list[int]] = {}
    for outputs in padded:
        for name, values in outputs.items():
            own = [
                axis
                for axis, pair in enumerate(zip(expected[name].shape, values.shape, strict=True))
                if pair[0] != pair[1]
            ]
            pairs = {(expected[name].shape[axis], values.shape[axis]) for axis in own}
            cut = values[tuple(slice(size) for size in expected[name].shape)]
            rtol = _RTOL.get(str(values.dtype), 1e-3)
            if pairs - {sizes} or not agree(cut, expected[name], rtol=rtol):
                return None
            if own:
                axes[name] = own
    return axes


def _fillers(large: FixedModel) -> list[Arrays]:
    zeros = {s.name: np.zeros(s.shape, s.dtype) for s in large.inputs}
    rest = random_inputs(large.inputs, seed=1)
    return [zeros, {n: zeros[n] if _MASK in n.lower() else values for n, values in rest.items()}]


def _within(feed: Arrays, filler: Arrays) -> Arrays:
    """Return inputs of the larger size that begin with those of the smaller."""
    whole = {}
    for name, values in feed.items():
        whole[name] = filler[name].copy()
        whole[name][tuple(slice(size) for size in values.shape)] = values
    return whole
