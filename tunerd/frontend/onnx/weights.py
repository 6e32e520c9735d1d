"""Large weights outside of their graph: in one file that is mapped, so that nobody copies them.

A graph of some hundred MB is copied by whatever reads, rewrites or runs it. What products and
lookups read as it is (`inference.weights_aside`) stays in a file without a name instead, and the
graph has a tensor there that says where: as ONNX's external data, whose `checksum` is the file's
key in this process. `values_of` returns the values of any tensor, wherever it keeps them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from tunerd.frontend.onnx.graphs import subgraphs

if TYPE_CHECKING:
    import onnx

MESSAGE_BYTES = 2**31 - 1  # that protobuf allows one to have
LEAST_BYTES = 16 << 20  # of what is set apart: less is no matter
_COPIED_BYTES = 16 << 20  # at a time
ALIGNMENT = 4096  # of a tensor: a page, and more than the 64 bytes of DLPack
_EXTERNAL = 1  # of onnx.TensorProto, whose import takes a third of a second
# A file that is there; the values are handed to ONNX Runtime in memory, and nothing is read of it.
NO_FOLDER, NO_FILE = "/dev", "null"

_keys = itertools.count()
_open: weakref.WeakValueDictionary[str, WeightFile] = weakref.WeakValueDictionary()


class WeightFile:
    """A file of weights, mapped. It is there as long as this object is, and has no name."""

    def __init__(self, fd: int, key: str) -> None:
        """Take over an open file, where tensors with this key find their values."""
        self.fd, self.key = fd, key
        _open[key] = self
        self._data = np.frombuffer(
            mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE),
            np.uint8,
        )  # writable, as DLPack wants it; nobody writes, so that no page is copied
        self._close = weakref.finalize(self, os.close, fd)

    def part(self, offset: int, length: int) -> np.ndarray[Any, Any]:
        return self._data[offset : offset + length]


def set_apart(
    proto: onnx.ModelProto, aside: Mapping[str, onnx.TensorProto]
) -> tuple[onnx.ModelProto, WeightFile | None]:
    """Return a graph with the weights of `aside` in a file, and that file.

    Where they are few bytes the graph is returned as it is, without a file.
    """
    import onnx

    plain = {name: tensor for name, tensor in aside.items() if _is_plain(tensor)}
    if sum(tensor.ByteSize() for tensor in plain.values()) < LEAST_BYTES:
        return proto, None
    key = _new_key()
    light = onnx.ModelProto(ir_version=proto.ir_version)
    for field, value in proto.ListFields():
        if field.name not in ("graph", "ir_version"):
            _put(light, field.name, value)
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":
            _put(light.graph, field.name, value)
    with tempfile.TemporaryFile(prefix="tunerd-weights-") as file:
        for tensor in proto.graph.initializer:
            if tensor.name not in plain:
                light.graph.initializer.append(tensor)
                continue
            offset = file.seek(_aligned(file.tell()))
            length = file.write(tensor.raw_data)
            light.graph.initializer.append(_stub(tensor, key, offset, length))
        return light, _weight_file(file, key)


def copied_apart(
    places: Iterable[tuple[onnx.TensorProto, Path, int, int]],
) -> WeightFile:
    """Copy weights from files of a model into one, and say in the tensors, in place, where.

    places: a tensor that `is_plain`, its file, the first byte and the number of bytes. Nothing of
    them is held in memory. Raises OSError where a file cannot be read to the end.
    """
    key = _new_key()
    with tempfile.TemporaryFile(prefix="tunerd-weights-") as file:
        for tensor, path, first, length in places:
            offset = file.seek(_aligned(file.tell()))
            with path.open("rb") as source:
                source.seek(first)
                left = length
                while left:
                    part = source.read(min(left, _COPIED_BYTES))
                    if not part:
                        raise OSError(errno.EIO, f"{path.name} ends before {tensor.name} does")
                    left -= file.write(part)
            tensor.CopyFrom(_stub(tensor, key, offset, length))
        return _weight_file(file, key)


def changed(
    proto: onnx.ModelProto, change: Callable[[onnx.TensorProto], np.ndarray[Any, Any] | None]
) -> tuple[onnx.ModelProto, WeightFile | None]:
    """Return a copy of a graph with other weights, and the file of those that are apart in it.

    change: returns the new values of a tensor, of the same shape and type, or None to keep them.
    """
    import onnx
    from onnx import numpy_helper

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    key, weights = _new_key(), None
    with tempfile.TemporaryFile(prefix="tunerd-weights-") as file:
        for graph in subgraphs(copy.graph):
            for tensor in graph.initializer:
                values = change(tensor)
                if is_apart(tensor):
                    kept = values_of(tensor) if values is None else values
                    offset = file.seek(_aligned(file.tell()))
                    length = file.write(np.ascontiguousarray(kept).data)
                    tensor.CopyFrom(_stub(tensor, key, offset, length))
                elif values is not None:
                    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        if file.tell():
            weights = _weight_file(file, key)
    return copy, weights


def _new_key() -> str:
    return f"{os.getpid()}-{next(_keys)}"


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _weight_file(file: BinaryIO, key: str) -> WeightFile:
    file.truncate(_aligned(file.tell()))
    file.flush()
    return WeightFile(os.dup(file.fileno()), key)


def values_of(tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """Return a tensor's values; those of a weight that was set apart lie in its file."""
    from onnx import numpy_helper

    if not is_apart(tensor):
        values: np.ndarray[Any, Any] = numpy_helper.to_array(tensor)
        return values
    said = {entry.key: entry.value for entry in tensor.external_data}
    part = _open[said["checksum"]].part(int(said["offset"]), int(said["length"]))
    return part.view(_numpy_type(tensor)).reshape(tuple(tensor.dims))


def is_apart(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == _EXTERNAL)


def tensors_apart(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return filter(is_apart, proto.graph.initializer)


def whole(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph with all of its weights, as others read it: a copy, where any is apart."""
    import onnx
    from onnx import numpy_helper

    if not any(tensors_apart(proto)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in tensors_apart(copy):
        tensor.CopyFrom(numpy_helper.from_array(values_of(tensor), tensor.name))
    return copy


def whole_bytes(proto: onnx.ModelProto) -> int:
    """Return how large a graph would be with all of its weights."""
    apart = sum(values_of(tensor).nbytes for tensor in tensors_apart(proto))
    return int(proto.ByteSize()) + apart


def give_memory_back() -> None:
    """Return to the system what large objects, freed, have left in malloc's lists."""
    ctypes.CDLL(None).malloc_trim(0)


def _stub(tensor: onnx.TensorProto, key: str, offset: int, length: int) -> onnx.TensorProto:
    import onnx

    stub = onnx.TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=_EXTERNAL
    )
    places = {"location": NO_FILE, "offset": offset, "length": length, "checksum": key}
    for name, value in places.items():
        stub.external_data.add(key=name, value=str(value))
    return stub


def _is_plain(tensor: onnx.TensorProto) -> bool:
    return tensor.HasField("raw_data") and is_plain(tensor, len(tensor.raw_data))


def is_plain(tensor: onnx.TensorProto, length: int) -> bool:
    """Whether so many raw bytes of a tensor are its values in one of NumPy's own types."""
    dtype = _numpy_type(tensor)
    is_whole = length == math.prod(tensor.dims) * dtype.itemsize
    return dtype.kind in "iuf" and dtype.isbuiltin == 1 and is_whole


def _numpy_type(tensor: onnx.TensorProto) -> np.dtype[Any]:
    from onnx import helper

    dtype: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    return dtype


def _put(message: Any, name: str, value: Any) -> None:
    field = getattr(message, name)
    if hasattr(field, "extend"):
        field.extend(value)
    elif hasattr(field, "CopyFrom"):
        field.CopyFrom(value)
    else:
        setattr(message, name, value)
