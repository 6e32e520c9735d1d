"""The memory that a model takes, to be lowered and to run, told before any of it is allocated."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tunerd.errors import ModelError
from tunerd.frontend.onnx.inference import shapes_without_weights
from tunerd.system.cores import memory_bytes

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

# Seeded inputs are made as float64 before they get their type.
_BYTES_PER_RANDOM_ELEMENT = 8

# Of reading and lowering a model, in two processes: what they take for the smallest, and for each
# byte of a file (results, "Memory and time of lowering").
_LOWERING_BYTES = 512 << 20
_LOWERING_BYTES_PER_BYTE = 4
RELAX_BYTES_PER_BYTE = 8  # of a Relax module as JSON: 7.3 were measured of one of 180 MiB


def require_memory_to_lower(
    what: str, size: int, *, per_byte: int = _LOWERING_BYTES_PER_BYTE
) -> None:
    """Raise ModelError unless this machine's memory is enough for a file of `size` bytes."""
    needed = _LOWERING_BYTES + per_byte * size
    if needed > (available := memory_bytes()):
        raise ModelError(
            f"to read and lower {what} takes up to {needed / 2**30:,.1f} GiB, and this machine has "
            f"{available / 2**30:,.1f} GiB of memory; export it with smaller types, or tune on a "
            "machine with more"
        )


def require_memory(proto: onnx.ModelProto) -> None:
    """Raise ModelError unless this machine's memory holds the inputs and two of each other value.

    `proto` has fixed input shapes. What depends on values, and not on shapes alone, is not seen.
    """
    inputs = ((_elements(v), _itemsize(v)) for v in proto.graph.input)
    values = ((v.name, _elements(v) * _itemsize(v)) for v in _values(proto))
    require_memory_of(inputs, values)


def require_memory_of(inputs: Iterable[tuple[int, int]], values: Iterable[tuple[str, int]]) -> None:
    """Raise ModelError unless this machine's memory holds all inputs and two of each other value.

    Args:
        inputs: the elements of each input, and the bytes of one of them.
        values: the name and the bytes of each other value.
    """
    available = memory_bytes()
    given = sum(count * (itemsize + _BYTES_PER_RANDOM_ELEMENT) for count, itemsize in inputs)
    _require(given, available, "the model's inputs take")
    for name, size in values:
        _require(given + 2 * size, available, f"with its value '{name}' the model takes")


def _require(needed: int, available: int, what: str) -> None:
    if needed > available:
        raise ModelError(
            f"{what} {needed / 2**30:,.1f} GiB to run, and this machine has "
            f"{available / 2**30:,.1f} GiB of memory; give smaller shapes or a smaller --batch, or "
            "tune on a machine with more"
        )


def _values(proto: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    try:
        graph = shapes_without_weights(proto).graph
    except Exception:  # of several kinds; ONNX Runtime says what is wrong with the model
        log.info("no shapes", exc_info=True)
        return
    yield from graph.value_info
    yield from graph.output


def _elements(value: onnx.ValueInfoProto) -> int:
    """Return how many elements a value has; 0 where its shape is not known."""
    dims = value.type.tensor_type.shape.dim
    return math.prod(max(0, int(d.dim_value)) for d in dims)


def _itemsize(value: onnx.ValueInfoProto) -> int:
    from onnx import helper

    try:
        return int(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).itemsize)
    except (KeyError, TypeError):
        return 1
