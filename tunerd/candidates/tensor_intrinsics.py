"""TVM's tensor intrinsics, which schedules with tensor cores need, loaded in a second.

Their modules parse some 250 functions of TVMScript when they are imported. For each, the parser
asks `inspect.stack()`, which looks up every frame's source among all modules of the process: 19 s
of a core in all, 37 s in a tuner. It needs the frames alone. And most of these functions are for
devices that tunerd has no slices of, or for instructions that no schedule here asks for: they are
not parsed, and their intrinsics are not registered.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

_OTHER_DEVICES = ("hexagon", "metal", "riscv_cpu", "rocm")
_OF_CUDA = ("16x16x16", "m16n8k8")  # in the names of what DLight's and MetaSchedule's rules ask for

_lock = threading.Lock()


def load_tensor_intrinsics() -> None:
    """Register TVM's tensor intrinsics; once per process, and a second long the first time."""
    with _lock:
        _load()


@functools.cache
def _load() -> None:
    entry: Any = importlib.import_module("tvm.tirx.script.parser.entry")
    from tvm.s_tir import TensorIntrin

    inspector, parse, register = entry.inspect, entry.parse, TensorIntrin.register
    entry.inspect, entry.parse = _FramesAlone(), functools.partial(_Unparsed, parse)
    TensorIntrin.register = staticmethod(functools.partial(_register, register))
    try:
        importlib.import_module("tvm.s_tir.tensor_intrin")
    finally:
        entry.inspect, entry.parse = inspector, parse
        TensorIntrin.register = staticmethod(register)


class _Unparsed:
    """A function of TVMScript that is parsed when its intrinsic is registered."""

    def __init__(
        self, parse: Callable[..., Any], function: FunctionType, *given: Any, **named: Any
    ) -> None:
        self.device = function.__module__.rpartition(".")[2]
        self.parsed = functools.partial(parse, function, *given, **named)


def _register(register: Callable[..., None], name: str, *functions: Any, **named: Any) -> None:
    devices = {each.device for each in functions if isinstance(each, _Unparsed)}
    if devices & {*_OTHER_DEVICES}:
        return
    if "cuda" in devices and not any(size in name for size in _OF_CUDA):
        return
    parsed = (each.parsed() if isinstance(each, _Unparsed) else each for each in functions)
    register(name, *parsed, **named)


class _FramesAlone:
    """The module `inspect`, whose `stack` reads no sources."""

    @staticmethod
    def stack() -> list[inspect.FrameInfo]:
        frame = sys._getframe(1)
        found = []
        while frame is not None:
            code = frame.f_code
            found.append(
                inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
            )
            frame = frame.f_back  # type: ignore[assignment]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)
