"""A stand-in for CUDA's driver that works on the host, as staged models call it."""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tunerd.system.cuda_driver import ShortCalls

Answer = tuple[Any, ...]


class Status(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


OK = Status.CUDA_SUCCESS


class CaptureModes:
    """How a thread is taken while another one captures: of this stand-in, all threads have one."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    capture_mode = "global"

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> Answer:
        usual, self.capture_mode = self.capture_mode, mode
        return OK, usual


class Driver(CaptureModes):
    """Copies of outputs run when the graph is launched; events are done when a test says."""

    CUresult = Status

    def __init__(self) -> None:
        self.captured: list[Callable[[], object]] = []
        self.graphs: list[list[Callable[[], object]]] = []
        self.status = OK
        self.current: list[str] = ["primary"]
        self.events: list[str] = []  # in which context each was made
        self.recorded: list[tuple[int, Any]] = []
        self.copied_on: list[tuple[str, int]] = []  # to the device or to the host, and the stream
        self.waits: list[tuple[int, int]] = []  # of a stream for an event
        self.freed: list[object] = []
        self.short = ShortCalls(Status, Library(self))
        self._memory: list[Any] = []

    def ready(self, graph: list[Callable[[], object]]) -> int:
        """Return the handle of a graph that can be launched."""
        self.graphs.append(graph)
        return len(self.graphs)  # which is not zero

    def cuMemHostAlloc(self, size: int, flags: int) -> Answer:
        self._memory.append((ctypes.c_uint8 * size)())
        return OK, ctypes.addressof(self._memory[-1])

    def cuMemFreeHost(self, address: int) -> Answer:
        self.freed.append(address)
        return (OK,)

    def cuStreamSynchronize(self, stream: Any) -> Answer:
        return (OK,)

    def cuStreamGetCtx(self, stream: Any) -> Answer:
        return OK, "green"

    def cuCtxGetCurrent(self) -> Answer:
        return OK, self.current[-1]

    def cuCtxPushCurrent(self, context: str) -> Answer:
        self.current.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> Answer:
        return OK, self.current.pop()

    def cuEventCreate(self, flags: int) -> Answer:
        self.events.append(self.current[-1])
        return OK, len(self.events)

    def cuEventDestroy(self, event: int) -> Answer:
        self.freed.append(event)
        return (OK,)

    def cuMemcpyDtoHAsync(self, here: int, there: int, size: int, stream: Any) -> Answer:
        self.captured.append(lambda: ctypes.memmove(here, there, size))
        return (OK,)

    def cuMemcpyDtoDAsync(self, read: int, there: int, size: int, stream: Any) -> Answer:
        self.captured.append(lambda: ctypes.memmove(read, there, size))
        return (OK,)

    def cuGraphDestroy(self, graph: object) -> Answer:
        return (OK,)

    def cuGraphExecDestroy(self, graph: object) -> Answer:
        self.freed.append("graph")
        return (OK,)


class Library:
    """The driver's functions that a launch calls, as ctypes finds them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        for name in (
            "EventRecord", "EventQuery", "EventElapsedTime", "GraphLaunch", "StreamWaitEvent"
        ):  # fmt: skip
            setattr(self, f"cu{name}", functools.partial(getattr(self, name)))
        self.cuMemcpyHtoDAsync_v2 = functools.partial(self.MemcpyHtoDAsync)
        self.cuMemcpyDtoHAsync_v2 = functools.partial(self.MemcpyDtoHAsync)

    def EventRecord(self, event: int, stream: int) -> int:
        self._driver.recorded.append((event, stream))
        return OK.value

    def EventQuery(self, event: int) -> int:
        return self._driver.status.value

    def EventElapsedTime(self, found: Any, begin: int, end: int) -> int:
        found._obj.value = 1000.0 * (end - begin)
        return OK.value

    def StreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        self._driver.waits.append((stream, event))
        return OK.value

    def MemcpyHtoDAsync(self, there: int, here: int, size: int, stream: int) -> int:
        self._driver.copied_on.append(("device", stream))
        ctypes.memmove(there, here, size)
        return OK.value

    def MemcpyDtoHAsync(self, here: int, there: int, size: int, stream: int) -> int:
        self._driver.copied_on.append(("host", stream))
        ctypes.memmove(here, there, size)
        return OK.value

    def GraphLaunch(self, graph: int, stream: int) -> int:
        for node in self._driver.graphs[graph - 1]:
            node()
        return self._driver.status.value


class Tensor:
    """On the device, which is here the host."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.array = np.zeros(shape, dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data
