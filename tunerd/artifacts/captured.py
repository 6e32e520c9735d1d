"""One inference of a loaded model as one CUDA graph with buffers of its own.

TVM makes a graph of a model's kernels, too, but on a stream that it chooses, in a mode that breaks
when another thread allocates meanwhile, and it goes through its virtual machine at each call. Here
a virtual machine of the capture's own runs the model's code once more, and where it would capture,
it queues the kernels on the stream that is being captured. The graph's intermediate tensors belong
to that machine: several captures of one model run at once, and nobody else gets their memory.

A graph comes in two forms. A CapturedModel has its inputs and outputs on the device. A StagedModel
begins and ends in pinned memory of the host, so that no call waits: the inputs are copied from
where the request has them, and to copy the outputs is part of the graph. Large ones are copied on
streams of their own, while the stream of the graphs has other work; large outputs are the caller's
where they are (`outputs`), and what is very large comes and goes in parts (`parts`), where who
launches sees to it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from tunerd.artifacts.device import zeros
from tunerd.artifacts.marked_graph import Copy, MarkedGraph
from tunerd.artifacts.outputs import Outputs
from tunerd.artifacts.parts import Nothing, Part, Parts, Written, go_in_parts
from tunerd.artifacts.segments import Cut, GraphPieces
from tunerd.artifacts.staging import PinnedArrays, Writes, are_large, bytes_of, written
from tunerd.system.cuda_driver import ShortCalls, checked, current
from tunerd.vocabulary import Arrays, TensorSpec

_RUN_OR_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream

_capturing = threading.Lock()  # what a virtual machine finds under a name is one for the process


class Recorder:
    """A model's virtual machine with buffers of its own on one stream, which makes graphs of it.

    Its graphs have the buffers in common: they may be launched one after the other on one stream,
    and not at once. `inputs` are tensors on the device by name.
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
        """Make the machine; `LoadedModel` does it. Without a stream it has one of its own."""
        import tvm
        from cuda.bindings import driver
        from tvm.runtime.vm import VirtualMachine

        # Zeros, for the run below: what memory held before may be rows or slots that are nowhere.
        self.inputs = {s.name: zeros(tvm, s.shape, s.dtype, device) for s in inputs}
        device.sync()  # they and the weights are there, and this thread has the device's context
        self.driver = driver
        self._own: Any = None
        if stream is None:
            self._own = checked(driver.cuStreamCreate(_NON_BLOCKING))
        self.stream = int(self._own) if stream is None else stream
        self._device, self._tensor_type = device, tvm.runtime.Tensor
        self._zeros = functools.partial(zeros, tvm)
        self.input_specs, self.output_specs = inputs, outputs
        self._arguments = (*self.inputs.values(), *weights)
        with _capturing, _kernels_one_by_one(tvm) as running:
            self._machine = running.machine = VirtualMachine(library, [device])
        self._main = self._machine["main"]
        with self.queued():
            self._main(*self._arguments)  # loads the kernels, and makes the memory they need
            self.wait()

    @functools.cached_property
    def short(self) -> ShortCalls:
        return ShortCalls(self.driver.CUresult)

    def more_inputs(self) -> dict[str, Any]:
        """Return tensors on the device like the inputs, the caller's."""
        return {s.name: self._zeros(s.shape, s.dtype, self._device) for s in self.input_specs}

    def recorded(
        self,
        after: Callable[[dict[str, Any]], None] = lambda outputs: None,
        *,
        before: Callable[[], None] = lambda: None,
    ) -> tuple[Any, dict[str, Any]]:
        """Return a graph, which is the caller's, and its outputs by name, tensors of its own.

        before, after: queue what the graph does before the model and after it; the one after is
        given the outputs.
        """
        driver = self.driver
        # Of this thread alone: others may allocate meanwhile. No collection, because unloading an
        # old module would break the capture.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        gc.disable()
        try:
            with self.queued():
                checked(driver.cuStreamBeginCapture(self.stream, mode))
                try:
                    before()
                    outputs = self._named(self._main(*self._arguments))
                    after(outputs)
                finally:
                    graph = checked(driver.cuStreamEndCapture(self.stream))
        finally:
            gc.enable()
        return graph, outputs

    def executable(self, graph: Any) -> Any:
        """Return a graph made ready to be launched, which is the caller's, too."""
        made = checked(self.driver.cuGraphInstantiate(graph, 0))
        checked(self.driver.cuGraphUpload(made, self.stream))
        self.wait()
        return made

    def wait(self) -> None:
        """Wait until all that was queued on the stream has ended."""
        checked(self.driver.cuStreamSynchronize(self.stream))

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Have the stream's context, which may be a green one, as the current one in this block."""
        return current(self.driver, checked(self.driver.cuStreamGetCtx(self.stream)))

    def queued(self) -> contextlib.AbstractContextManager[Any]:
        """Have what TVM queues in this block go to the stream."""
        import tvm_ffi

        context: contextlib.AbstractContextManager[Any] = tvm_ffi.use_raw_stream(
            self._device, self.stream
        )
        return context

    def __del__(self) -> None:
        if getattr(self, "_own", None) is not None:
            self.driver.cuStreamDestroy(self._own)

    def _named(self, made: Any) -> dict[str, Any]:
        tensors = [made] if isinstance(made, self._tensor_type) else list(made)
        return dict(zip((s.name for s in self.output_specs), tensors, strict=True))


class CapturedModel:
    """A model that is ready on one stream: write the inputs, launch, wait, read the outputs.

    `inputs` and `outputs` are tensors on the device by name, the same at each inference, which
    `from_dlpack` takes as they are. `stream` is the handle of the stream as an int, and `graph` the
    graph of which copies may be made. One thread at a time; captures of different threads know
    nothing of each other.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Capture what a recorder makes; `LoadedModel.captured` does it."""
        self._recorder, self._driver = recorder, recorder.driver
        self.stream, self.inputs = recorder.stream, recorder.inputs
        self.graph, self.outputs = recorder.recorded()
        self._executable = recorder.executable(self.graph)

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy arrays or tensors by name into the inputs; the others stay.

        What was launched before must have ended: TVM copies on the default stream, and waits.
        """
        with self._recorder.queued():
            for name, value in inputs.items():
                self.inputs[name].copyfrom(value)

    def launch(self) -> None:
        """Queue one inference on the stream."""
        checked(self._driver.cuGraphLaunch(self._executable, self.stream))

    def wait(self) -> None:
        """Wait until all that was queued on the stream has ended."""
        self._recorder.wait()

    def read(self) -> dict[str, Any]:
        """Return copies of the outputs by name as NumPy arrays, when the stream has made them."""
        with self._recorder.queued():
            self.wait()
            return {name: output.numpy() for name, output in self.outputs.items()}

    def __del__(self) -> None:
        # Of a context that is gone, all is gone: what these answer does not matter.
        if executable := getattr(self, "_executable", None):
            self._driver.cuGraphExecDestroy(executable)
        if graph := getattr(self, "graph", None):
            self._driver.cuGraphDestroy(graph)


class _Staging:
    """Pinned memory for a model's inputs and outputs, and where the inputs are on the device.

    is_ahead: large inputs are brought while the launch before reads its own, and large outputs are
    fetched while the next one runs. is_alone: no other launch reads inputs where these are.

    may_go_in_parts: its inputs may be so large that they are to be brought in parts: `begin`
    instead of `launch`, and `follow` when all parts are queued.
    comes_in_parts: its outputs are so large, or no graph is behind which their copies could be
    queued: launched so that it `leaves` them, it has them fetched by `parts_back` when it is done.
    """

    _marked: MarkedGraph  # which reads the inputs
    _is_by_row: ClassVar[bool] = False  # each row of the outputs is a result of its own
    _filled = 1  # results of the last launch

    def __init__(
        self, recorder: Recorder, *, is_ahead: bool = False, is_alone: bool = False
    ) -> None:
        self._recorder, self._driver = recorder, recorder.driver
        inputs, outputs = map(self._as_held, (recorder.input_specs, recorder.output_specs))
        self._inputs = PinnedArrays(self._driver, inputs)
        self._brings_apart = is_ahead and are_large(inputs)
        self.fetches_apart = (is_ahead or is_alone) and are_large(outputs)
        self.comes_in_parts = self.fetches_apart and (
            is_alone or go_in_parts(sum(map(bytes_of, outputs)))
        )
        self._outputs = Outputs(
            self._driver,
            outputs,
            by_row=self._is_by_row,
            gives_away=self.fetches_apart,
        )
        self._brought = recorder.more_inputs() if self._brings_apart else recorder.inputs
        self._there = {name: self._brought[name].data_ptr() for name in self._inputs.places}
        self._left: dict[str, int] = {}  # outputs on the device that no graph copies
        self.may_go_in_parts = (is_alone or self._brings_apart) and go_in_parts(
            sum(map(bytes_of, inputs))
        )
        self._parts = Parts(self._driver, recorder.short) if self.may_go_in_parts else None
        self._parts_back: Parts | None = None
        if self.comes_in_parts:
            with recorder.entered():  # as the stream on which they are queued
                self._parts_back = Parts(self._driver, recorder.short, to_host=True)
        self._last_part, self._has_begun = 0, False  # its event; and the time of the launch
        self._writer: ThreadPoolExecutor | None = None

    def _as_held(self, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """Return how the host has tensors of the device, of as many bytes each."""
        return specs

    def goes_in_parts(self, given: Any) -> bool:
        """Say whether these inputs, which `launch` takes, are so large."""
        return self.may_go_in_parts

    def begin(self, given: Any, stream: int | None) -> list[Part | Written | Nothing]:
        """Return the parts of inputs that `launch` takes, to be queued on a stream of this device.

        One is queued when all but one of those before it have ended, or all where one goes alone.
        What is in no pinned memory is written there by a thread: that takes milliseconds.

        Args:
            stream: that of the graph, where the time of the launch begins now.
        """
        assert self._parts is not None
        writes: Writes = []
        parts = self._parts.of(self._copies_of(given, writes))
        self._last_part, self._has_begun = parts[-1].event, stream is not None
        if stream is not None:
            self._marked.begin(stream)
        if not writes:
            return [*parts]
        return [self._by_thread(lambda: [write() for write in writes]), *parts]

    def _by_thread(self, write: Callable[[], object]) -> Written:
        """Return what has a thread of this model write something before what is behind it."""
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="tunerd-inputs")
        return Written(write, self._writer)

    def follow(self, stream: int, *, fetch: int | None = None, leaves: bool = False) -> None:
        """Queue the launch behind its parts, all of which are queued; the rest as in `launch`."""
        self._recorder.short.wait(stream, self._last_part)
        back = () if leaves else self._back()
        self._marked.launch(stream, fetch=fetch, back=back, has_begun=self._has_begun)

    def give_up(self) -> None:
        """Have what was begun never launched; the parts that are queued are to be waited for."""

    def parts_back(self) -> list[Part]:
        """Return what brings the outputs of a launch that has left them, and is done.

        To be queued as the parts of inputs, on a stream of the graph's context.
        """
        assert self._parts_back is not None
        return self._parts_back.of(self._back())

    def is_readable(self) -> bool:
        """Say whether `read` takes no time, when the outputs are there; else it soon will."""
        return self._outputs.is_ready(self._filled)

    def read(self) -> Arrays:
        """Return the outputs by name, once for each launch; the arrays are the caller's."""
        (outputs,) = self._outputs.read()
        return outputs

    def _back(self) -> list[Copy]:
        """Return what brings the outputs to the host that no graph copies."""
        places = self._outputs.places
        return [(places[name][0], there, places[name][1]) for name, there in self._left.items()]

    def _recorded(self) -> tuple[Any, Any]:
        """Return a graph that ends with the copies of the outputs, and what it keeps."""
        driver, stream = self._driver, self._recorder.stream

        def take() -> None:
            for name, there in self._there.items() if self._brings_apart else ():
                read = self._recorder.inputs[name].data_ptr()
                _, size = self._inputs.places[name]
                checked(driver.cuMemcpyDtoDAsync(read, there, size, stream))

        def fetch(outputs: dict[str, Any]) -> None:
            self._left = {name: outputs[name].data_ptr() for name in self._outputs.places}
            if not self.fetches_apart:
                for copy in self._back():
                    checked(driver.cuMemcpyDtoHAsync(*copy, stream))
                self._left = {}

        graph, tensors = self._recorder.recorded(after=fetch, before=take)
        return graph, (self._recorder, self._inputs, self._outputs, self._brought, tensors)

    def _copies_of(self, inputs: Any, writes: Writes | None = None) -> list[Copy]:
        """Return what brings inputs to the device: PinnedArrays as they are, others copied here.

        writes: is given what copies them, to be called before; else that was done.
        """
        held = inputs if isinstance(inputs, PinnedArrays) else self._inputs
        if held is not inputs:
            written(functools.partial(held.write, inputs), writes)
        places = held.places
        return [(there, *places[name]) for name, there in self._there.items()]


class StagedModel(_Staging):
    """A model that is launched with arrays of the host, and leaves its outputs there.

    After `launch`, `is_done` says without waiting whether the outputs are there; then `secs` and
    `read` say how long it had its stream, and what came of it. It takes the next launch after
    that. Of several that one recorder made, each has host memory of its own and the device's in
    common, so all are to be launched on one stream at a time: they run in the order of launching.
    The second's inputs are brought while the first runs if it `is_ahead`. `launch` and what follows
    may be called from different threads, in this order, with the device's context current.

    fetches_apart: it can use a stream of its own for its outputs.

    Raises RuntimeError with CUDA's name for an error.
    """

    def __init__(self, recorder: Recorder, *, is_ahead: bool = False) -> None:
        super().__init__(recorder, is_ahead=is_ahead)
        graph, kept = self._recorded()
        self._marked = MarkedGraph(recorder, recorder.executable(graph), kept)
        checked(self._driver.cuGraphDestroy(graph))

    def launch(
        self,
        inputs: Mapping[str, Any],
        stream: int,
        *,
        bring: int | None = None,
        fetch: int | None = None,
        leaves: bool = False,
    ) -> None:
        """Queue an inference with inputs by name.

        PinnedArrays are read until it has ended; what is elsewhere is copied first.

        Args:
            stream: of the recorder's context.
            bring: for inputs, a stream of this device on which nothing waits; while `stream` has
                work, it saves the time of their copies.
            fetch: for outputs, a stream on which others of these models do the same.
            leaves: outputs that come in parts stay on the device, until `parts_back`.
        """
        copies, back = self._copies_of(inputs), () if leaves else self._back()
        bring = bring if self._brings_apart else None
        self._marked.launch(stream, copies, bring=bring, fetch=fetch, back=back)

    def is_done(self) -> bool:
        """Say whether the last launch has ended; raises what the stream has met."""
        return self._marked.is_done()

    def wait(self) -> None:
        """Wait until the last launch has ended."""
        self._marked.wait()

    def secs(self) -> float:
        """Return how long the last launch had its stream, by the GPU's clock."""
        return self._marked.secs()


class StagedSegments(_Staging):
    """A StagedModel in several graphs: who launches one decides when the next one follows.

    pieces: to be launched in their order on one stream, the first by `launch`. segment_secs: of
    each, as it was tried. ends: after which kernels they end.
    """

    def __init__(self, recorder: Recorder, limits: Cut) -> None:
        """Run pieces some times on the recorder's stream to find where the model is to be cut."""
        super().__init__(recorder, is_alone=True)
        graph, kept = self._recorded()
        with recorder.entered():
            made = GraphPieces(self._driver, graph, recorder.stream, limits)
        self.ends, self.segment_secs = made.ends, made.segment_secs
        self.pieces = tuple(MarkedGraph(recorder, each, kept) for each in made.graphs)
        self._marked = self.pieces[0]
        checked(self._driver.cuGraphDestroy(graph))

    def launch(self, inputs: Mapping[str, Any], stream: int) -> None:
        """Queue the first piece with inputs by name, as a StagedModel does."""
        self.pieces[0].launch(stream, self._copies_of(inputs))


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
