"""What CUDA's driver API answers, through cuda.bindings, and the few calls that do without it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

NO_TIMES = 2  # CU_EVENT_DISABLE_TIMING
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST_CONNECTIONS = "32"
_LIBRARY = "libcuda.so.1"
_SUCCESS, _NOT_READY = 0, 600  # CUresult
_HANDLE = ctypes.c_void_p


def checked(answer: Any) -> Any:
    """Return what a call gave besides its status; RuntimeError with CUDA's name for an error."""
    status, *values = answer
    if status.name != "CUDA_SUCCESS":
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None


@contextlib.contextmanager
def current(driver: Any, context: Any) -> Iterator[None]:
    """Have a context as the calling thread's current one in this block."""
    checked(driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent())


@contextlib.contextmanager
def beside_captures(driver: Any) -> Iterator[None]:
    """Have the calling thread allocate in this block, whoever captures a graph meanwhile.

    A capture in CUDA's global mode, as TVM's and PyTorch's are, has others refused that otherwise,
    and is lost with it (CUDA driver API, cuThreadExchangeStreamCaptureMode).
    """
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    usual = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(usual))


def ask_for_connections() -> None:
    """Have a context that this process makes from now on carry out as many streams at once as can.

    By default it has eight queues to the GPU: streams that come to share one wait for each other,
    whatever is idle. What the environment says already stays.
    """
    os.environ.setdefault(CONNECTIONS, _MOST_CONNECTIONS)


class ShortCalls:
    """The calls of each launch, none of which waits for the device.

    cuda.bindings gives the interpreter away at every call, and a thread that computes has it then
    for a whole turn: a launch of five calls would wait for five of them. Here `launch` alone does,
    which takes longest, so that who sends requests has a turn between two launches. Handles are
    ints. Raises RuntimeError with CUDA's name for an error.
    """

    def __init__(self, results: Any, library: Any = None) -> None:
        """Take CUresult of cuda.bindings; library: the driver, which is there, if not given."""
        sharing = ctypes.CDLL(_LIBRARY) if library is None else library
        library = ctypes.PyDLL(_LIBRARY) if library is None else library
        self._results = results
        self._record = _function(library.cuEventRecord, _HANDLE, _HANDLE)
        self._query = _function(library.cuEventQuery, _HANDLE)
        self._launch = _function(sharing.cuGraphLaunch, _HANDLE, _HANDLE)
        self._copy = _function(
            library.cuMemcpyHtoDAsync_v2, ctypes.c_uint64, _HANDLE, ctypes.c_size_t, _HANDLE
        )
        self._fetch = _function(
            library.cuMemcpyDtoHAsync_v2, _HANDLE, ctypes.c_uint64, ctypes.c_size_t, _HANDLE
        )
        self._wait = _function(library.cuStreamWaitEvent, _HANDLE, _HANDLE, ctypes.c_uint)
        self._elapsed = _function(
            library.cuEventElapsedTime, ctypes.POINTER(ctypes.c_float), _HANDLE, _HANDLE
        )

    def record(self, event: int, stream: int) -> None:
        self._check(self._record(event, stream))

    def launch(self, graph: int, stream: int) -> None:
        self._check(self._launch(graph, stream))

    def copy_to_device(self, there: int, here: int, size: int, stream: int) -> None:
        """Queue a copy of `size` bytes; from memory that is not pinned it would wait."""
        self._check(self._copy(there, here, size, stream))

    def copy_to_host(self, here: int, there: int, size: int, stream: int) -> None:
        """Queue a copy of `size` bytes; to memory that is not pinned it would wait."""
        self._check(self._fetch(here, there, size, stream))

    def wait(self, stream: int, event: int) -> None:
        """Have what is queued on a stream from now on wait for an event."""
        self._check(self._wait(stream, event, 0))

    def has_ended(self, event: int) -> bool:
        """Say whether what was queued before an event has ended."""
        status: int = self._query(event)
        if status == _NOT_READY:
            return False
        self._check(status)
        return True

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two events that have come."""
        found = ctypes.c_float()
        self._check(self._elapsed(ctypes.byref(found), begin, end))
        return found.value

    def _check(self, status: int) -> None:
        if status != _SUCCESS:
            raise RuntimeError(f"CUDA: {self._results(status).name}")


def _function(function: Any, *argtypes: Any) -> Any:
    function.argtypes, function.restype = argtypes, ctypes.c_int
    return function
