"""cuDNN in NumPy: the graph API that tunerd calls, over memory of the host.

Descriptors keep what they were told; a plan computes its graph, one operation after the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TYPES = {0: np.dtype("float32"), 2: np.dtype("float16")}
SUCCESS, BAD_PARAM, UNSUPPORTED = 0, 2000, 3000
FUNCTIONS: dict[int, Callable[..., Any]] = {
    0: np.add,
    100: lambda x: np.maximum(x, 0),
    101: np.tanh,
    102: lambda x: 1 / (1 + np.exp(-x)),
    106: lambda x: x / (1 + np.exp(-x)),
}
# Engines: their knobs, notes and bytes of workspace.
ENGINES: dict[int, tuple[dict[int, int], tuple[int, ...], int]] = {
    4: ({2: 8, 13: 1}, (0,), 0),
    7: ({2: 5}, (0, 5), 256),
    8: ({}, (0, 4), 0),  # not deterministic
    9: ({}, (1,), 0),  # narrows its inputs
    11: ({}, (), 12),
    12: ({}, (), 1 << 30),
}


@dataclass
class Descriptor:
    kind: int
    values: dict[int, list[Any]] = field(default_factory=dict)
    is_final: bool = False


class FakeCudnn:
    """Counts what is made and destroyed; `engines` are those that heuristics name, in order."""

    def __init__(self, version: int = 92800) -> None:
        self.version = version
        self.engines = list(ENGINES)
        self.more_workspace_bytes = 0  # of plans than of what the heuristics named
        self.made: dict[int, Descriptor] = {}
        self.count = 0
        self.destroyed = 0
        self.devices: list[bytes] = []
        self.streams: list[int] = []
        self.ran: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cudnn"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            return getattr(self, f"_{name.removeprefix('cudnn')}")(*args)

        return call

    def _GetVersion(self) -> int:
        return self.version

    def _GetErrorString(self, status: int) -> bytes:
        return b"status of a fake"

    def _GetLastErrorString(self, place: Any, size: Any) -> None:
        place.value = b"because"

    def _Create(self, place: Any) -> int:
        place._obj.value = 1 << 40
        return SUCCESS

    def _SetStream(self, handle: Any, stream: Any) -> int:
        self.streams.append(stream.value or 0)
        return SUCCESS

    def _BackendCreateDescriptor(self, kind: int, place: Any) -> int:
        self.count += 1
        self.made[self.count] = Descriptor(kind)
        place._obj.value = self.count
        return SUCCESS

    def _BackendDestroyDescriptor(self, pointer: Any) -> int:
        del self.made[pointer.value]
        self.destroyed += 1
        return SUCCESS

    def _BackendSetAttribute(self, of: Any, name: int, kind: int, count: Any, array: Any) -> int:
        descriptor = self.made[of.value]
        if descriptor.is_final or count.value != len(array):
            return BAD_PARAM
        descriptor.values[name] = list(array)
        if kind == 15 and not all(self.made[each].is_final for each in array):
            return BAD_PARAM
        return SUCCESS

    def _BackendFinalize(self, of: Any) -> int:
        descriptor = self.made[of.value]
        descriptor.is_final = True
        if descriptor.kind == 2 and descriptor.values[1301][0] not in ENGINES:
            return UNSUPPORTED
        if descriptor.kind == 3:
            engine = self.made[descriptor.values[300][0]].values[1301][0]
            knobs = [self.made[knob].values for knob in descriptor.values.get(302, [])]
            known = ENGINES[engine][0]
            if any(known.get(k[600][0]) != k[601][0] for k in knobs):
                return UNSUPPORTED
        if descriptor.kind == 4:
            self.devices.append(b"".join(self.made[descriptor.values[204][0]].values[2702]))
        return SUCCESS

    def _BackendGetAttribute(
        self, of: Any, name: int, kind: int, most: Any, count: Any, array: Any
    ) -> int:
        descriptor = self.made[of.value]
        found = self._found(descriptor, name)
        count._obj.value = len(found)
        if array is None:
            return SUCCESS
        for i, each in enumerate(found[: most.value]):
            if isinstance(each, Descriptor):
                self.made[array[i]].values, self.made[array[i]].is_final = each.values, True
            else:
                array[i] = each
        return SUCCESS

    def _found(self, of: Descriptor, name: int) -> list[Any]:
        if name == 202:  # mode A names all, B nothing new, the fallback the last
            modes = {3: self.engines, 1: self.engines[:1], 2: self.engines[-1:]}
            return [Descriptor(3, {-1: [e]}) for e in modes[of.values[200][0]]]
        if name == 402:
            config = self.made[of.values[401][0]]
            engine = self.made[config.values[300][0]].values[1301][0]
            return [ENGINES[engine][2] + self.more_workspace_bytes]
        if name in (600, 601):
            return of.values[name]
        (engine,) = of.values[-1]
        knobs, notes, workspace_bytes = ENGINES[engine]
        return {
            300: [Descriptor(2, {-1: [engine]})],
            302: [Descriptor(7, {600: [k], 601: [v]}) for k, v in knobs.items()],
            303: [workspace_bytes],
            1301: [engine],
            1303: list(notes),
        }[name]

    def _BackendExecute(self, handle: Any, plan: Any, pack: Any) -> int:
        config = self.made[self.made[plan.value].values[401][0]]
        engine = self.made[config.values[300][0]]
        graph = self.made[engine.values[1300][0]]
        given = self.made[pack.value].values
        pointers = dict(zip(given[1000], given[1001], strict=True))
        between: dict[int, Any] = {}
        for operation in (self.made[each] for each in graph.values[801]):
            self._run(operation, pointers, between)
        self.ran.append(engine.values[1301][0])
        return SUCCESS

    def _run(self, operation: Descriptor, pointers: Any, between: dict[int, Any]) -> None:
        said = operation.values

        def read(name: int) -> Any:
            tensor = self.made[said[name][0]].values
            if tensor[907][0]:
                return between[tensor[906][0]]
            return self._memory(tensor, pointers).astype("float64")

        if operation.kind == 10:
            found = said[700][0] * convolved(read(704), read(703), self.made[said[702][0]].values)
            target = self.made[said[705][0]].values
        else:
            how = self.made[said[750][0]].values
            operands = [read(name) for name in (751, 752) if name in said]
            found = FUNCTIONS[how[0][0]](*operands)
            found = np.minimum(found, how.get(4, [np.inf])[0])
            target = self.made[said[753][0]].values
        assert found.shape == tuple(target[902])
        if target[907][0]:
            between[target[906][0]] = found
        else:
            self._memory(target, pointers)[...] = found

    def _memory(self, tensor: Any, pointers: Any) -> np.ndarray[Any, Any]:
        """Return a tensor's elements as [n, c, h, w]."""
        dtype, shape, steps = TYPES[tensor[901][0]], tensor[902], tensor[903]
        reach = 1 + sum((s - 1) * step for s, step in zip(shape, steps, strict=True))
        place = pointers[tensor[906][0]]
        flat = np.frombuffer((ctypes.c_uint8 * (reach * dtype.itemsize)).from_address(place), dtype)
        strides = [step * dtype.itemsize for step in steps]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)


def convolved(x: Any, w: Any, said: Any) -> Any:
    """Convolve images [n, c, h, w] with filters [k, c of a group, r, s]."""
    (dh, dw), (sh, sw), after, before = (said[name] for name in (102, 103, 104, 105))
    x = np.pad(x, ((0, 0), (0, 0), (before[0], after[0]), (before[1], after[1])))
    k, c, r, s = w.shape
    groups = x.shape[1] // c
    p = (x.shape[2] - (r - 1) * dh - 1) // sh + 1
    q = (x.shape[3] - (s - 1) * dw - 1) // sw + 1
    y = np.zeros((x.shape[0], k, p, q))
    for g in range(groups):
        of_group = slice(g * k // groups, (g + 1) * k // groups)
        for i in range(r):
            for j in range(s):
                part = x[:, g * c : (g + 1) * c, i * dh :: sh, j * dw :: sw][:, :, :p, :q]
                y[:, of_group] += np.einsum("nchw,kc->nkhw", part, w[of_group, :, i, j])
    return y
