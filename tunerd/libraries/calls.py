"""The packed functions by which compiled code calls libraries."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tunerd.libraries import cublaslt, cudnn, packages
from tunerd.vocabulary import CUBLASLT, CUDNN, LibraryCall

PREFIX = "tunerd.library."

Plan = Callable[[Sequence[int | None], int], None]


class Handle(Protocol):
    """A library on the device that was current when it was made."""

    def plan(self, text: str) -> Plan:
        """Make a call ready."""


_HANDLES: dict[str, Callable[[], Handle]] = {CUBLASLT: cublaslt.Handle, CUDNN: cudnn.Handle}

_handles: dict[tuple[str, int], Handle] = {}  # by library and device
_plans: dict[tuple[str, str, int], Plan] = {}  # likewise, with the call's text
_lock = threading.Lock()


def function_name(library: str) -> str:
    """Return the name under which compiled code finds a library."""
    return PREFIX + library


def provide(calls: Iterable[LibraryCall], device: int) -> None:
    """Have calls ready that code on a GPU is going to make; the GPU by its number here.

    Handles and plans are kept until the process ends: few calls are distinct, and the artifact that
    makes them may be loaded again. Raises packages.MissingLibraryError for a library that is not
    there, and packages.LibraryCallError for a call that it does not carry out here.
    """
    for call in calls:
        packages.load(call.library)
        _register(call.library)
        with _lock:
            _require_done("cudaSetDevice", _cudart().cudaSetDevice(device))
            _plan_of(call.library, call.text, device)


@functools.cache
def _register(library: str) -> None:
    import tvm_ffi

    def call(text: str, *pointers: ctypes.c_void_p) -> None:
        device = _current_device()
        plan = _plans.get((library, text, device))
        if plan is None:
            with _lock:
                plan = _plan_of(library, text, device)
        stream = tvm_ffi.get_raw_stream(tvm_ffi.device(f"cuda:{device}"))
        plan([pointer.value for pointer in pointers], int(stream))

    tvm_ffi.register_global_func(function_name(library), call, override=True)


def _plan_of(library: str, text: str, device: int) -> Plan:
    known = _plans.get((library, text, device))
    if known is not None:
        return known
    if (library, device) not in _handles:
        _handles[library, device] = _HANDLES[library]()
    plan = _plans[library, text, device] = _handles[library, device].plan(text)
    return plan


def _current_device() -> int:
    """Return the number of the GPU that TVM has made this thread's before it called."""
    found = ctypes.c_int()
    _require_done("cudaGetDevice", _cudart().cudaGetDevice(ctypes.byref(found)))
    return found.value


def _require_done(what: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{what}: error {status} of CUDA")


@functools.cache
def _cudart() -> Any:
    return ctypes.CDLL("libcudart.so.13")  # TVM has loaded it
