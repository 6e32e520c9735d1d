"""Not PyTorch: a fake of what tunerd calls of it, in NumPy, for processes that tests start.

Put this folder on such a process's path. A module that a test writes computes in NumPy, and may set
`on_compile`, which `compile` calls with the mode: to fail, to hang, or to end the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

__version__ = "0.fake"
float16, bfloat16, channels_last = np.float16, np.float32, "channels_last"
backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace()), cudnn=SimpleNamespace())
cuda = SimpleNamespace(is_available=lambda: False)
threads: list[int] = []


def on_compile(mode: str) -> None:
    """Do what a test says, which puts a function of its own here."""


class Tensor:
    """An array with the methods of a tensor that are called."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.shape = self.array.shape

    def to(self, place: Any) -> Tensor:
        return self if isinstance(place, str) else Tensor(self.array.astype(place))

    def is_floating_point(self) -> bool:
        return bool(self.array.dtype.kind == "f")

    def dim(self) -> int:
        return self.array.ndim

    def contiguous(self, memory_format: str) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def double(self) -> Tensor:
        return Tensor(self.array.astype(np.float64))

    def numpy(self) -> Any:
        return self.array


class Module:
    """A module: what `forward` says."""

    def __call__(self, *inputs: Tensor) -> Any:
        return self.forward(*inputs)

    def forward(self, *inputs: Tensor) -> Any:
        raise NotImplementedError

    def eval(self) -> Module:
        return self

    def parameters(self) -> Iterator[Tensor]:
        return iter(())

    def to(self, *place: Any, memory_format: str = "") -> Module:
        return self


nn = SimpleNamespace(Module=Module)
from_numpy = Tensor
no_grad = contextlib.nullcontext
set_num_threads = threads.append


def compile(module: Module, mode: str) -> Module:
    on_compile(mode)
    return module
