"""TVM's tensor intrinsics, which schedules with tensor cores need, loaded in seconds.

Their modules parse some 250 functions of TVMScript when they are imported. For each, the parser
asks `inspect.stack()`, which looks up every frame's source among all modules of the process: 19 s
of a core in all, 37 s in a tuner. It needs the frames alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from typing import Any

_lock = threading.Lock()


def load_tensor_intrinsics() -> None:
    """Register TVM's tensor intrinsics; once per process, and 2 to 3 s long the first time."""
    with _lock:
        _load()


@functools.cache
def _load() -> None:
    entry: Any = importlib.import_module("tvm.tirx.script.parser.entry")
    usual = entry.inspect
    entry.inspect = _FramesAlone()
    try:
        importlib.import_module("tvm.s_tir.tensor_intrin")
    finally:
        entry.inspect = usual


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
