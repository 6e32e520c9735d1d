"""A share of a GPU as a runner times kernels on it: CUDA graphs, events, and TVM's own stream."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.measuring.measure import BufferCache, Device, Timed, argument_sets, calls_per_sample
from tunerd.vocabulary import Build, Profile

MAX_GRAPH_CALLS = 400
MAX_KEPT_BYTES = 8 << 30  # of arguments, for the next builds


def preload() -> tuple[Any, Any, Any]:
    """Import TVM, its FFI and CUDA's driver API, and return them; makes no context."""
    from tunerd import cuda

    cuda.preload()
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
        self._buffers = BufferCache(
            lambda a: tvm.runtime.tensor(a, device=self._device),
            max_bytes=min(MAX_KEPT_BYTES, free_bytes // 4),
        )

    def facts(self) -> dict[str, Any]:
        from tunerd import host

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
            "driver": host.driver_versions()[0],
        }

    def prepare(self, build: Build, path: Path, profile: Profile) -> Timed:
        kernel = self._tvm.runtime.load_module(str(path))["main"]
        rotate = 0 if profile.weights == "warm" else 2 * self._l2_bytes
        sets = argument_sets(build, self._buffers, rotate_over_bytes=rotate)
        with self._on_stream():
            kernel(*sets[0])  # loads the cubin
            self._checked(self._driver.cuStreamSynchronize(self._stream))
            once = self._time(lambda: kernel(*sets[-1]))
            calls = calls_per_sample(once, profile, MAX_GRAPH_CALLS)
            if profile.weights == "cold" and once <= profile.min_sample_secs:
                calls = max(calls, len(sets))  # a graph begins at the first copy each time
            if not profile.cuda_graph or once > profile.min_sample_secs:
                return _Timed(calls, lambda: self._time_calls(kernel, sets, calls))
            graph = self._captured(kernel, sets, calls)
        return _Timed(calls, lambda: self._time_graph(graph))

    def call(self, path: Path, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
        arguments = [self._tvm.runtime.tensor(array, device=self._device) for array in arrays]
        kernel = self._tvm.runtime.load_module(str(path))["main"]
        self._device.sync()
        with self._on_stream():
            kernel(*arguments)
        self._checked(self._driver.cuStreamSynchronize(self._stream))
        return [argument.numpy() for argument in arguments]

    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        return self._tvm.runtime.tensor(array, device=self._device)

    def _captured(self, kernel: Any, sets: Sequence[tuple[Any, ...]], calls: int) -> _Graph:
        driver = self._driver
        # Relaxed: a kernel with a workspace may allocate it. No collection meanwhile, because
        # unloading an old module would break the capture.
        gc.disable()
        try:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            self._checked(driver.cuStreamBeginCapture(self._stream, mode))
            try:
                for i in range(calls):
                    kernel(*sets[i % len(sets)])
            finally:
                graph = self._checked(driver.cuStreamEndCapture(self._stream))
        finally:
            gc.enable()
        executable = self._checked(driver.cuGraphInstantiate(graph, 0))
        self._checked(driver.cuGraphDestroy(graph))
        captured = _Graph(driver, executable, calls, keep=(kernel, sets))
        self._time_graph(captured)  # uploads it
        return captured

    def _time_graph(self, graph: _Graph) -> float:
        launch = self._driver.cuGraphLaunch
        secs = self._time(lambda: self._checked(launch(graph.executable, self._stream)))
        return secs / graph.calls

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


class _Graph:
    def __init__(self, driver: Any, executable: Any, calls: int, keep: Any) -> None:
        self._driver, self.executable, self.calls = driver, executable, calls
        self._keep = keep  # what the captured launches point to

    def __del__(self) -> None:
        self._driver.cuGraphExecDestroy(self.executable)


class _Timed:
    def __init__(self, calls: int, sample: Callable[[], float]) -> None:
        self.calls = calls
        self.sample = sample
