"""cuBLASLt in NumPy: the functions that tunerd calls, over memory of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TYPES = {0: np.dtype("float32"), 2: np.dtype("float16")}
SUCCESS, INVALID, UNSUPPORTED = 0, 7, 15


@dataclass
class Described:
    values: dict[int, int] = field(default_factory=dict)
    layout: tuple[int, int, int, int] = (0, 0, 0, 0)  # type, rows, columns, stride


class FakeCublasLt:
    """Counts what is made; `algorithms` says how many the heuristic names."""

    def __init__(self, algorithms: int = 24, version: int = 131000) -> None:
        self.algorithms, self.version = algorithms, version
        self.made: dict[int, Described] = {}
        self.streams: list[int] = []
        self.ranks: list[int] = []
        self.targets: list[int] = []
        self.workspaces: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cublasLt"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            return getattr(self, f"_{name.removeprefix('cublasLt')}")(*args)

        return call

    def _new(self, place: Any) -> Described:
        number = len(self.made) + 1
        place._obj.value = number
        self.made[number] = Described()
        return self.made[number]

    def _GetVersion(self) -> int:
        return self.version

    def _GetStatusString(self, status: int) -> bytes:
        return b"status of a fake"

    def _Create(self, place: Any) -> int:
        self._new(place)
        return SUCCESS

    def _MatmulDescCreate(self, place: Any, compute: int, scale: int) -> int:
        self._new(place).values[-1] = compute
        return SUCCESS if scale == 0 else INVALID

    def _MatmulPreferenceCreate(self, place: Any) -> int:
        self._new(place)
        return SUCCESS

    def _MatmulPreferenceDestroy(self, _: Any) -> int:
        return SUCCESS

    def _MatrixLayoutCreate(self, place: Any, dtype: int, rows: Any, columns: Any, at: Any) -> int:
        if at.value < rows.value:
            return INVALID
        self._new(place).layout = (dtype, rows.value, columns.value, at.value)
        return SUCCESS

    def _set(self, described: Any, attribute: int, value: Any, size: Any) -> int:
        if size.value != ctypes.sizeof(value._obj):
            return INVALID
        self.made[described.value].values[attribute] = value._obj.value
        return SUCCESS

    _MatmulDescSetAttribute = _MatrixLayoutSetAttribute = _MatmulPreferenceSetAttribute = _set

    def _MatmulAlgoGetHeuristic(
        self, _: Any, described: Any, a: Any, b: Any, c: Any, d: Any, preference: Any,
        wanted: int, results: Any, count: Any,
    ) -> int:  # fmt: skip
        if not self.made[preference.value].values[1]:
            return INVALID
        self.targets.append(self.made[described.value].values.get(15, 0))
        count._obj.value = min(wanted, self.algorithms)
        for i in range(count._obj.value):
            results[i].algo[0] = i
        return SUCCESS

    def _Matmul(
        self, _: Any, described: Any, alpha: Any, a: Any, a_at: Any, b: Any, b_at: Any,
        beta: Any, c: Any, c_at: Any, d: Any, d_at: Any, algorithm: Any, workspace: Any,
        size: Any, stream: Any,
    ) -> int:  # fmt: skip
        said = self.made[described.value].values
        left, right = self._batch(a, a_at), self._batch(b, b_at)
        left = left.swapaxes(1, 2) if said[3] else left
        right = right.swapaxes(1, 2) if said[4] else right
        result = self._batch(d, d_at)
        found = alpha._obj.value * (left.astype("float64") @ right.astype("float64"))
        if beta._obj.value:
            found += beta._obj.value * self._batch(c, c_at)
        epilogue = said[7] & ~1
        if epilogue & 4:
            dtype = TYPES[said[26]]
            found += _memory(said[8], dtype, result.shape[1], (1,))[None, :, None]
        if epilogue & 2:
            found = np.maximum(found, 0)
        if epilogue & 32:
            found *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (found + 0.044715 * found**3)))
        result[...] = found
        self.streams.append(stream.value or 0)
        self.ranks.append(algorithm._obj[0])
        self.workspaces.append(size.value)
        return SUCCESS

    def _batch(self, pointer: Any, described: Any) -> np.ndarray[Any, Any]:
        made = self.made[described.value]
        dtype, rows, columns, stride = made.layout
        shape, steps = (made.values[5], rows, columns), (made.values[6], 1, stride)
        return _memory(pointer.value, TYPES[dtype], shape, steps)


def _memory(pointer: int, dtype: Any, shape: Any, steps: Any) -> np.ndarray[Any, Any]:
    shape = (shape,) if isinstance(shape, int) else shape
    reach = 1 + sum((s - 1) * step for s, step in zip(shape, steps, strict=True))
    buffer = (ctypes.c_uint8 * (reach * dtype.itemsize)).from_address(pointer)
    flat = np.frombuffer(buffer, dtype)
    strides = [step * dtype.itemsize for step in steps]
    return np.lib.stride_tricks.as_strided(flat, shape, strides)
