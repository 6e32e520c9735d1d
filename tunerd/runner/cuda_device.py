"""A share of a GPU as a runner times kernels on it: CUDA graphs, events, and TVM's own stream."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.runner.arguments import Arguments
from tunerd.runner.profiles import range_of
from tunerd.runner.sampling import Device, Timed, calls_per_sample
from tunerd.vocabulary import Build, Profile

log = logging.getLogger(__name__)

MAX_GRAPH_CALLS = 400
_GRAPH_SECS = 0.001  # of one of several graphs: the gaps between them are some microseconds
MAX_KEPT_BYTES = 8 << 30  # of activations, for the next builds


def preload() -> tuple[Any, Any, Any]:
    """Import TVM, its FFI and CUDA's driver API, and return them; makes no context."""
    from tunerd.builder import nvrtc

    nvrtc.preload()
    import tvm
    import tvm_ffi
    from cuda.bindings import driver

    return tvm, tvm_ffi, driver


class CudaDevice(Device):
    """The GPU that this process sees first, through the driver API beside TVM's runtime.

    Every driver call that fails raises RuntimeError with CUDA's own name for the error.
    """

    tvm_name = "cuda"

    def __init__(self) -> None:
        tvm, tvm_ffi, driver = preload()
        self._tvm, self._ffi, self._driver = tvm, tvm_ffi, driver
        self._checked(driver.cuInit(0))  # names the error; TVM would only see no device
        self._device = tvm.cuda(0)
        if not self._device.exist:
            raise RuntimeError("TVM sees no CUDA device in the runner")
        self._device.sync()  # makes the context
        self._stream = self._checked(driver.cuStreamCreate(1))  # 1: CU_STREAM_NON_BLOCKING
        self._begin = self._checked(driver.cuEventCreate(0))
        self._end = self._checked(driver.cuEventCreate(0))
        self._handle = self._checked(driver.cuCtxGetDevice())
        self._l2_bytes = self._attribute("L2_CACHE_SIZE")
        self._next_copy = 0
        error, free_bytes, _ = driver.cuMemGetInfo()  # under MPS: what the slice's limit leaves
        self._checked((error,))
        max_bytes = min(MAX_KEPT_BYTES, free_bytes // 4)
        self._arguments = Arguments(
            lambda shape, dtype: tvm.runtime.empty(shape, dtype, self._device),
            self._device.sync,  # our stream does not wait for TVM's
            max_bytes=max_bytes,
        )

    def facts(self) -> dict[str, Any]:
        from tunerd.system import gpus

        driver = self._driver
        capability = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        name = self._checked(driver.cuDeviceGetName(128, self._handle))
        return {
            "device": name.split(b"\0")[0].decode(),
            "sm_count": self._attribute("MULTIPROCESSOR_COUNT"),
            "device_sm_count": self._attribute("MULTIPROCESSOR_COUNT"),  # under MPS: the share
            "mps_enabled": bool(self._attribute("MPS_ENABLED")),
            "compute_capability": f"{capability[0]}.{capability[1]}",
            "driver": gpus.driver_versions()[0],
        }

    def prepare(self, build: Build, path: Path, profile: Profile) -> Timed:
        kernel = self._kernel(path)
        range_bytes = range_of(profile, self._l2_bytes)
        sets = self._arguments.sets(build, range_bytes=range_bytes)
        with self._on_stream():
            kernel(*sets[0])  # loads the cubin
            self._checked(self._driver.cuStreamSynchronize(self._stream))
            once = self._time(lambda: kernel(*sets[-1]))
        calls = calls_per_sample(once, profile, MAX_GRAPH_CALLS)
        if not profile.cuda_graph or once > profile.min_sample_secs:
            return _Timed(calls, lambda: self._time_calls(kernel, sets, calls))
        each, count = graphs_of_a_sample(calls, len(sets), once)
        graphs = _Graphs(lambda first: self._captured(kernel, sets, first, each), each, len(sets))
        self._time_graphs(graphs, 1)  # a GPU that was idle raises its clock
        return _Timed(each * count, lambda: self._time_graphs(graphs, count))

    def loaded(self, path: Path) -> Callable[[Sequence[np.ndarray[Any, Any]]], list[Any]]:
        kernel = self._kernel(path)

        def call(arrays: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
            arguments = [self._tvm.runtime.tensor(array, device=self._device) for array in arrays]
            self._device.sync()
            with self._on_stream():
                kernel(*arguments)
            self._checked(self._driver.cuStreamSynchronize(self._stream))
            return [argument.numpy() for argument in arguments]

        return call

    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        return self._tvm.runtime.tensor(array, device=self._device)

    def is_alive(self) -> bool:
        # Of the whole context: TVM's synchronisation leaves out our stream, which is non-blocking.
        try:
            self._checked(self._driver.cuCtxSynchronize())
        except RuntimeError as error:
            log.warning("the device answers nothing any more: %s", error)
            return False
        return True

    def _kernel(self, path: Path) -> Any:
        return self._tvm.runtime.load_module(str(path))["main"]

    def _captured(
        self, kernel: Any, sets: Sequence[tuple[Any, ...]], first: int, calls: int
    ) -> _Graph:
        """Make a graph of calls with the arguments from the first given on, and upload it."""
        driver = self._driver
        # Relaxed: a kernel with a workspace may allocate it. No collection meanwhile, because
        # unloading an old module would break the capture.
        gc.disable()
        try:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            self._checked(driver.cuStreamBeginCapture(self._stream, mode))
            try:
                with self._on_stream():
                    for i in range(first, first + calls):
                        kernel(*sets[i % len(sets)])
            finally:
                graph = self._checked(driver.cuStreamEndCapture(self._stream))
        finally:
            gc.enable()
        captured = _Graph(driver, self._checked(driver.cuGraphInstantiate(graph, 0)))
        self._checked(driver.cuGraphDestroy(graph))
        self._checked(driver.cuGraphUpload(captured.executable, self._stream))
        return captured

    def _time_graphs(self, graphs: _Graphs, count: int) -> float:
        """Time so many graphs in a row, from where the copies that a rival took have ended."""
        first = math.ceil(self._next_copy % graphs.copies / graphs.calls)
        in_turn = [graphs[first + i] for i in range(count)]
        self._next_copy = ((first + count - 1) % len(graphs) + 1) * graphs.calls

        def run() -> None:
            for graph in in_turn:
                self._checked(self._driver.cuGraphLaunch(graph.executable, self._stream))

        return self._time(run) / (count * graphs.calls)

    def _time_calls(self, kernel: Any, sets: Sequence[tuple[Any, ...]], calls: int) -> float:
        def run() -> None:
            # Rivals share the copies: each goes on where the one before has stopped.
            first, self._next_copy = self._next_copy, self._next_copy + calls
            for i in range(first, first + calls):
                kernel(*sets[i % len(sets)])

        with self._on_stream():
            return self._time(run) / calls

    def _time(self, work: Callable[[], Any]) -> float:
        driver = self._driver
        self._checked(driver.cuEventRecord(self._begin, self._stream))
        work()
        self._checked(driver.cuEventRecord(self._end, self._stream))
        self._checked(driver.cuEventSynchronize(self._end))
        elapsed_ms: float = self._checked(driver.cuEventElapsedTime(self._begin, self._end))
        return elapsed_ms / 1e3

    def _on_stream(self) -> Any:
        return self._ffi.use_raw_stream(self._ffi.device("cuda:0"), int(self._stream))

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        value: int = self._checked(self._driver.cuDeviceGetAttribute(attribute, self._handle))
        return value

    def _checked(self, answer: Any) -> Any:
        error, *values = answer
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA: {error.name}")
        return values[0] if values else None


def graphs_of_a_sample(calls: int, copies: int, once_secs: float) -> tuple[int, int]:
    """Return how many calls are a graph, and how many graphs a sample.

    Graphs, because a kernel of microseconds is not to be timed by its launches. Several, because a
    graph begins at the same copy of the weights each time: one of fewer calls than there are copies
    would find its own in the cache. Together they hold each copy once, but for some that fill no
    graph, and a sample takes the graphs that come next. Where all copies are gone through within a
    graph's usual time, one graph does that some times over, as often as is nearest to the calls.

    >>> graphs_of_a_sample(calls=400, copies=64, once_secs=5e-6)
    (384, 1)
    >>> graphs_of_a_sample(calls=10, copies=64, once_secs=200e-6)
    (4, 3)
    """
    each = math.ceil(_GRAPH_SECS / max(once_secs, 1e-7))
    if each >= copies:
        return copies * max(1, round(calls / copies)), 1
    each = copies // math.ceil(copies / each)
    return each, math.ceil(calls / each)


class _Graphs:
    """The graphs of one kernel, each captured when it is first asked for."""

    def __init__(self, capture: Callable[[int], _Graph], calls: int, copies: int) -> None:
        self.calls = calls  # of each
        self.copies = copies
        self._capture = capture
        self._captured: dict[int, _Graph] = {}

    def __len__(self) -> int:
        return max(1, self.copies // self.calls)

    def __getitem__(self, number: int) -> _Graph:
        """Return a graph by its number; behind the last comes the first."""
        number %= len(self)
        if number not in self._captured:
            self._captured[number] = self._capture(number * self.calls)
        return self._captured[number]


class _Graph:
    def __init__(self, driver: Any, executable: Any) -> None:
        self._driver, self.executable = driver, executable

    def __del__(self) -> None:
        self._driver.cuGraphExecDestroy(self.executable)


class _Timed:
    def __init__(self, calls: int, sample: Callable[[], float]) -> None:
        self.calls = calls
        self.sample = sample
