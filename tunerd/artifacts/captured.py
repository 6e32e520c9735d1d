"""One inference of a loaded model as one CUDA graph with buffers of its own.

TVM makes a graph of a model's kernels, too, but on a stream that it chooses, in a mode that breaks
when another thread allocates meanwhile, and it goes through its virtual machine at each call. Here
a virtual machine of the capture's own runs the model's code once more, and where it would capture,
it queues the kernels on the stream that is being captured. The graph's intermediate tensors belong
to that machine: several captures of one model run at once, and nobody else gets their memory.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunerd.system.cuda_driver import checked
from tunerd.vocabulary import TensorSpec

_RUN_OR_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_capturing = threading.Lock()  # what a virtual machine finds under a name is one for the process


class CapturedModel:
    """A model that is ready on one stream: write the inputs, launch, wait, read the outputs.

    `inputs` and `outputs` are tensors on the device by name, the same at each inference, which
    `from_dlpack` takes as they are. `stream` is the handle of the stream as an int, and `graph` the
    graph of which copies may be made. One thread at a time; captures of different threads know
    nothing of each other.
    """

    def __init__(
        self,
        library: Any,
        device: Any,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        weights: Sequence[Any],
        stream: int | None,
    ) -> None:
        """Capture the model of a library; `LoadedModel.captured` makes it."""
        import tvm
        from cuda.bindings import driver
        from tvm.runtime.vm import VirtualMachine

        self._driver, self._device = driver, device
        device.sync()  # gives this thread the device's context
        self._own: Any = None
        if stream is None:
            self._own = checked(driver.cuStreamCreate(_NON_BLOCKING))
        self.stream = int(self._own) if stream is None else stream
        self.inputs = {s.name: tvm.runtime.empty(s.shape, s.dtype, device) for s in inputs}
        self._arguments = (*self.inputs.values(), *weights)
        with _capturing, _kernels_one_by_one(tvm) as running:
            self._machine = running.machine = VirtualMachine(library, [device])
        main = self._machine["main"]
        with self._queued():
            main(*self._arguments)  # loads the kernels, and makes the memory that they need
            self.wait()
            self.graph, made = self._recorded(main)
        tensors = [made] if isinstance(made, tvm.runtime.Tensor) else list(made)
        self.outputs = dict(zip((s.name for s in outputs), tensors, strict=True))
        self._executable = checked(driver.cuGraphInstantiate(self.graph, 0))
        checked(driver.cuGraphUpload(self._executable, self.stream))
        self.wait()

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy arrays or tensors by name into the inputs; the others stay.

        What was launched before must have ended: TVM copies on the default stream, and waits.
        """
        with self._queued():
            for name, value in inputs.items():
                self.inputs[name].copyfrom(value)

    def launch(self) -> None:
        """Queue one inference on the stream."""
        checked(self._driver.cuGraphLaunch(self._executable, self.stream))

    def wait(self) -> None:
        """Wait until all that was queued on the stream has ended."""
        checked(self._driver.cuStreamSynchronize(self.stream))

    def read(self) -> dict[str, Any]:
        """Return copies of the outputs by name as NumPy arrays, when the stream has made them."""
        with self._queued():
            self.wait()
            return {name: output.numpy() for name, output in self.outputs.items()}

    def _recorded(self, main: Any) -> tuple[Any, Any]:
        driver = self._driver
        # Of this thread alone: others may allocate meanwhile. No collection, because unloading an
        # old module would break the capture.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        gc.disable()
        try:
            checked(driver.cuStreamBeginCapture(self.stream, mode))
            try:
                outputs = main(*self._arguments)
            finally:
                graph = checked(driver.cuStreamEndCapture(self.stream))
        finally:
            gc.enable()
        return graph, outputs

    def _queued(self) -> contextlib.AbstractContextManager[Any]:
        import tvm_ffi

        context: contextlib.AbstractContextManager[Any] = tvm_ffi.use_raw_stream(
            self._device, self.stream
        )
        return context

    def __del__(self) -> None:
        # Of a context that is gone, all is gone: what these answer does not matter.
        if executable := getattr(self, "_executable", None):
            self._driver.cuGraphExecDestroy(executable)
        if graph := getattr(self, "graph", None):
            self._driver.cuGraphDestroy(graph)
        if getattr(self, "_own", None) is not None:
            self._driver.cuStreamDestroy(self._own)


class _Running:
    """What takes the place of TVM's capture: it runs the kernels on the current stream."""

    machine: Any = None  # which calls it

    def __call__(
        self, _machine: Any, function: Any, arguments: Any, _index: int, _shape: Any = None
    ) -> Any:
        return self.machine.invoke_closure(function, *arguments)


@contextlib.contextmanager
def _kernels_one_by_one(tvm: Any) -> Iterator[_Running]:
    """Have a virtual machine that is made in this block make no graph of its own."""
    import tvm_ffi

    usual, running = tvm.get_global_func(_RUN_OR_CAPTURE), _Running()
    tvm_ffi.register_global_func(_RUN_OR_CAPTURE, running.__call__, override=True)
    try:
        yield running
    finally:
        tvm_ffi.register_global_func(_RUN_OR_CAPTURE, usual, override=True)
