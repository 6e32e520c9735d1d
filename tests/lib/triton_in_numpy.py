"""What the templates' kernels take of Triton's language, in NumPy: it runs a kernel's text.

A pointer is a tensor and places in it; a load or a store outside of the tensor fails, as it would
not on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tunerd.candidates.triton.launch import Launch, TensorMap


class Pointer:
    def __init__(self, tensor: np.ndarray, places: Any = 0) -> None:
        self.tensor, self.places = tensor, np.asarray(places)

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.tensor, self.places + np.asarray(places))

    def within(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return places and mask in one shape; raises where a place that counts is outside."""
        places, inside = np.broadcast_arrays(self.places, True if mask is None else mask)
        wrong = inside & ((places < 0) | (places >= self.tensor.size))
        if wrong.any():
            raise IndexError(f"{int(wrong.sum())} places outside of {self.tensor.shape}")
        return np.where(inside, places, 0), inside


class Matrix:
    """A tensor map of an array: what lies outside of the matrix is read as zeros."""

    def __init__(self, tensor: np.ndarray, told: TensorMap) -> None:
        strides = (told.stride * tensor.itemsize, tensor.itemsize)
        last = (told.shape[0] - 1) * told.stride + told.shape[1]
        assert last <= tensor.size, "the matrix ends outside of its tensor"
        flat = np.ascontiguousarray(tensor).reshape(-1)
        self._matrix = np.lib.stride_tricks.as_strided(flat, told.shape, strides)
        self._block = told.block

    def load(self, at: Sequence[int]) -> np.ndarray:
        block = np.zeros(self._block, self._matrix.dtype)
        found = self._matrix[
            at[0] : at[0] + self._block[0],
            at[1] : at[1] + self._block[1],
        ]
        block[: found.shape[0], : found.shape[1]] = found
        return block


class Language:
    """Stands for triton.language while one block of threads runs."""

    float16, bfloat16, float32 = np.float16, ml_dtypes.bfloat16, np.float32
    int64, int32, int16, int8 = np.int64, np.int32, np.int16, np.int8
    uint8, int1 = np.uint8, np.bool_
    static_range = staticmethod(range)
    PropagateNan = SimpleNamespace(ALL="all")

    def __init__(self) -> None:
        self.block = (0, 0, 0)

    def program_id(self, axis: int) -> int:
        return self.block[axis]

    def arange(self, begin: int, end: int) -> np.ndarray:
        assert (end - begin) & (end - begin - 1) == 0, "Triton's ranges are powers of two"
        return np.arange(begin, end)

    def load(self, at: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> np.ndarray:
        places, inside = at.within(mask)
        values = at.tensor.reshape(-1)[places]
        return np.where(inside, values, np.asarray(other).astype(values.dtype))

    def store(self, at: Pointer, value: Any, mask: Any = None) -> None:
        places, inside = at.within(mask)
        values = np.broadcast_to(value, places.shape)
        flat = at.tensor.reshape(-1)
        with np.errstate(over="ignore"):
            flat[places[inside]] = values[inside].astype(flat.dtype)

    def atomic_add(self, at: Pointer, value: int, sem: str) -> int:
        flat = at.tensor.reshape(-1)
        old = int(flat[at.places])
        flat[at.places] += value
        return old

    def dot(
        self, x: Any, w: Any, acc: Any, input_precision: str = "", out_dtype: Any = np.float32
    ) -> np.ndarray:
        assert acc.dtype == out_dtype
        assert x.dtype == w.dtype
        assert min(x.shape + w.shape) >= 16
        if x.dtype == np.int8:
            assert out_dtype == np.int32
            assert x.shape[1] >= 32
            return acc + x.astype(np.int32) @ w.astype(np.int32)
        left, right = x.astype(np.float32), w.astype(np.float32)
        if input_precision == "tf32":
            left, right = _cut(left), _cut(right)
        return acc + left @ right

    def cast(self, value: Any, dtype: Any, bitcast: bool = False) -> np.ndarray:
        if bitcast:
            return np.ascontiguousarray(value).view(dtype)
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def full(self, shape: Sequence[int], value: Any, dtype: Any) -> np.ndarray:
        return np.full(shape, value, dtype)

    def sum(self, x: Any, axis: int, keep_dims: bool) -> np.ndarray:
        return np.sum(x, axis=axis, keepdims=keep_dims, dtype=np.float32)

    def max(self, x: Any, axis: int, keep_dims: bool) -> np.ndarray:
        return np.max(x, axis=axis, keepdims=keep_dims)

    def min(self, x: Any, axis: int, keep_dims: bool) -> np.ndarray:
        return np.min(x, axis=axis, keepdims=keep_dims)

    def clamp(self, x: Any, least: float, most: float, propagate_nan: str) -> np.ndarray:
        assert propagate_nan == "all"
        return np.clip(x, least, most)

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: list[Any], *, dtype: Any, **_: Any
    ) -> np.ndarray:
        assert (constraints, dtype) == ("=f,f", np.float32)
        (x,) = args
        does = {"rcp.approx.ftz.f32": np.reciprocal, "ex2.approx.ftz.f32": np.exp2}
        return does[asm.removesuffix(" $0, $1;")](np.asarray(x, np.float32))

    def rsqrt(self, x: Any) -> np.ndarray:
        return 1.0 / np.sqrt(x)

    max_contiguous = multiple_of = staticmethod(lambda x, _: x)
    broadcast_to = staticmethod(np.broadcast_to)
    where, maximum, minimum = map(staticmethod, (np.where, np.maximum, np.minimum))
    exp, log, sqrt_rn, abs = map(staticmethod, (np.exp, np.log, np.sqrt, np.abs))
    floor, ceil = map(staticmethod, (np.floor, np.ceil))
    extra = SimpleNamespace(cuda=SimpleNamespace(libdevice=SimpleNamespace(rint=np.rint)))
    debug_barrier = staticmethod(lambda: None)


def run(
    text: str,
    name: str,
    arguments: Sequence[np.ndarray | Pointer],
    grid: tuple[int, int, int],
    *,
    backwards: bool = False,
    maps: Sequence[TensorMap] = (),
) -> None:
    """Run a kernel on arrays, which it writes; blocks of threads run one after the other."""
    pointers = [a if isinstance(a, Pointer) else Pointer(a) for a in arguments]
    given = [*pointers, *(Matrix(pointers[m.param].tensor, m) for m in maps)]
    language = Language()
    space: dict[str, Any] = {"tl": language}
    exec(compile(text, f"<{name}>", "exec"), space)
    blocks = list(itertools.product(*map(range, grid)))
    for block in reversed(blocks) if backwards else blocks:
        language.block = block
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            space[name](*given)


def run_all(
    launches: Sequence[Launch],
    arguments: Sequence[np.ndarray | Pointer],
    *,
    backwards: bool = False,
) -> None:
    """Run the kernels of a candidate, one after the other."""
    for launch in launches:
        run(
            launch.text,
            launch.name,
            arguments,
            launch.grid,
            backwards=backwards,
            maps=launch.maps,
        )


def _cut(operand: np.ndarray) -> np.ndarray:
    """Return an operand as tensor cores read it in TF32: without its last 13 bits."""
    bits = np.ascontiguousarray(operand).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)
