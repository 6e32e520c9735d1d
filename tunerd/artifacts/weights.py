"""The tensors of an artifact: as a file holds them, and on a device, in one piece of memory.

A driver gives memory in units of up to 2 MiB, so that tensors with memory of their own take up to
twice what they are; a piece for all wastes one unit.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunerd import vocabulary
from tunerd.artifacts.manifest import MAX_JSON_BYTES, LoadError
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import SLOT_BYTES, Arrays, TensorSpec

ALIGNMENT = 64  # bytes; what tvm.runtime.from_dlpack asks of a tensor


def map_weights(path: Path) -> Arrays:
    """Return the tensors of a weights file by name, mapped and not read. Changes stay private.

    Raises LoadError where the file is none.
    """
    try:
        return _mapped(path)
    except (OSError, ValueError, TypeError, LookupError, RecursionError, struct.error) as error:
        raise LoadError(
            f"{path} cannot be read as weights ({error}); copy the folder again, or tune again"
        ) from error


def unpacked(weights: Mapping[str, Any], manifest: Mapping[str, Any]) -> Arrays:
    """Return weights by the model's own names: what only lies in a kernel's layout is put back."""
    found = dict(weights)
    for name, (of, layout, shape) in kernel_layouts(manifest).items():
        if of not in found:
            found[of] = np.array(layout.back(weights[name], shape))
    return found


def kernel_layouts(
    manifest: Mapping[str, Any],
) -> dict[str, tuple[str, vocabulary.Layout, tuple[int, ...]]]:
    """Return, of each weight that lies as its kernel reads it, which it is, how, and its shape."""
    return {
        name: (
            str(entry["of"]),
            vocabulary.Layout(
                tuple(entry["split"]), tuple(entry["axes"]), int(entry.get("winograd", 0))
            ),
            tuple(entry["shape"]),
        )
        for name, entry in manifest.get("layouts", {}).items()
    }


def _mapped(path: Path) -> Arrays:
    # Copy-on-write: DLPack refuses arrays that are not writable, and nothing writes to these.
    data = np.memmap(path, dtype=np.uint8, mode="c")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    if size > min(data.size, MAX_JSON_BYTES):
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(data[8 : 8 + size].tobytes())
    start = aligned(8 + size)
    weights: Arrays = {}
    for entry in header["tensors"]:
        offset, dtype = entry["offset"], _dtype(entry["dtype"])
        is_number = dtype.kind in "biuf" or dtype.name == "bfloat16"
        if offset < 0 or entry["bytes"] < 0 or not is_number:
            raise ValueError(f"a tensor of {dtype} at {offset}")
        first = start + offset
        array = data[first : first + entry["bytes"]].view(dtype)
        weights[entry["name"]] = array.reshape(entry["shape"])
    return weights


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":  # TVM brings it along
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """Return `size` rounded up to an alignment, by default that of the weights file."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a piece of memory, one after the other.

    begins: in bytes, multiples of SLOT_BYTES as `size` is, by the tensors' names.
    """

    tensors: tuple[TensorSpec, ...]
    begins: tuple[int, ...]
    size: int

    def views(self, piece: Any, *, flat: bool = False) -> dict[str, Any]:
        """Return the tensors in a piece of the device by name; flat ones have one dimension."""
        return {
            spec.name: view(piece, _flat(spec) if flat else spec.shape, spec.dtype, begin)
            for spec, begin in zip(self.tensors, self.begins, strict=True)
        }

    def problem(self, weights: Mapping[str, Any]) -> str:
        """Say which tensor weights do not have as it is here, "" where they have all."""
        for spec in self.tensors:
            if spec.name not in weights:
                return f"there is no tensor '{spec.name}'"
            found = weights[spec.name]
            if (tuple(found.shape), str(found.dtype)) != (spec.shape, spec.dtype):
                return (
                    f"tensor '{spec.name}' is {found.dtype}{list(found.shape)} there and "
                    f"{spec.dtype}{list(spec.shape)} here"
                )
        return ""

    def bytes_of(self, weights: Arrays) -> np.ndarray[Any, Any]:
        """Return weights as the bytes that a piece begins with; mapped ones stay where they lie.

        They stay if they lie as in a piece, as in a file that was written so.
        """
        arrays = [weights[spec.name] for spec in self.tensors]
        placed = [(a, begin) for a, begin in zip(arrays, self.begins, strict=True) if a.size]
        end = max((begin + a.nbytes for a, begin in placed), default=0)
        starts = {a.ctypes.data - begin for a, begin in placed if a.flags.c_contiguous}
        if len(starts) == 1 and all(isinstance(a, np.memmap) for a, _ in placed):
            memory: Any = (ctypes.c_uint8 * end).from_address(starts.pop())
            memory.mapped = placed  # as long as it is there
            return np.frombuffer(memory, np.uint8)
        made = np.zeros(end, np.uint8)
        for array, begin in placed:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            made[begin : begin + flat.size] = flat
        return made


def layout_of(tensors: Mapping[str, Any]) -> Layout:
    """Return how tensors by name, NumPy's or TVM's, lie in a piece."""
    specs, begins, end = [], [], 0
    for name, tensor in tensors.items():
        specs.append(TensorSpec(name, tuple(map(int, tensor.shape)), str(tensor.dtype)))
        begins.append(end)
        end += aligned(_flat(specs[-1])[0] * dtype_of(specs[-1].dtype).itemsize, SLOT_BYTES)
    return Layout(tuple(specs), tuple(begins), max(end, SLOT_BYTES))


def in_one_piece(
    tensors: Mapping[str, Any], empty: Callable[[Sequence[int], str], Any]
) -> dict[str, Any]:
    """Copy tensors by name, NumPy's or TVM's, into one piece of a device; return views of it.

    empty: makes a tensor on the device, by its shape and type.
    """
    from tvm import runtime

    layout = layout_of(tensors)
    found = layout.views(empty((layout.size,), "uint8"))
    for name, tensor in tensors.items():
        if 0 in tensor.shape:
            continue
        source, there = tensor, found[name]
        if isinstance(tensor, np.ndarray):
            try:
                source = runtime.from_dlpack(tensor)
            except (RuntimeError, BufferError):  # bfloat16, read-only
                there.copyfrom(np.asarray(tensor, order="C"))
                continue
        source.copyto(there)
    return found


def _flat(spec: TensorSpec) -> tuple[int]:
    return (math.prod(spec.shape),)


class _DLTensor(ctypes.Structure):
    """DLPack's tensor, https://dmlc.github.io/dlpack/latest/c_api.html."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = [ctypes.py_object, ctypes.c_char_p]


def view(piece: Any, shape: Sequence[int], dtype: str, begin: int) -> Any:
    """Return the tensor that begins so many bytes into a piece, which it keeps alive.

    TVM's view has the pointer of its piece and an offset, and compiled kernels read the pointer
    alone. So the offset is added to it on the way through DLPack.
    """
    import tvm_ffi

    capsule = piece._create_view(shape, dtype, relative_byte_offset=begin).__dlpack__()
    tensor = _DLTensor.from_address(_pointer_in(capsule, b"dltensor"))
    tensor.data = (tensor.data or 0) + tensor.byte_offset
    tensor.byte_offset = 0
    return tvm_ffi.from_dlpack(capsule)
