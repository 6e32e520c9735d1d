"""Places without a device: the engine and its host alone are measured there.

In one segments end when they are started. The other has the streams of a GPU, whose graphs end
after a time without doing anything; what the host copies for them is copied, and what a driver's
calls take of the thread that makes them may be given.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.lib.fake_gpu import FakeInParts, HostMemory
from tests.lib.super_models import CONVNET, super_artifact, tenant
from tunerd.artifacts.outputs import Outputs
from tunerd.artifacts.segments import Cut
from tunerd.artifacts.staging import PinnedArrays, are_large
from tunerd.colocation import artifacts
from tunerd.colocation.places.base import Done, Loaded, Place, Told
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.colocation.places.staged import InPieces
from tunerd.colocation.plan import Member, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.vocabulary import Arrays, TargetSpec

_COPIED_BYTES = 64 << 10  # at a time, for a thread to be busy without the interpreter


class FreePlace(Place):
    """Segments end when they are started, in the thread that starts them."""

    kind: ClassVar[str] = "simulated: segments of no time"
    depth: ClassVar[int] = 2

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        return tuple(lanes)

    def capacity_bytes(self) -> int:
        return 1 << 60

    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        return 1

    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        proof = Proof(lane=lane.name, device="simulated", units=1, mechanism="none")
        return Loaded((1e-6,), proof)

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        told(Done(1e-6, {}))

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        return (seat,)

    def reload(self, seat: Seat) -> Loaded:
        raise NotImplementedError("nothing is lost here")

    def close(self) -> None: ...


class Calls:
    """What a driver's calls take of the thread that makes them, in microseconds.

    launch_us: of each launch, while other threads have the interpreter.
    queue_us: of what is queued around it, and query_us: of each look, while they do not.
    """

    def __init__(self, launch_us: float, queue_us: float, query_us: float) -> None:
        self._queue_secs, self._query_secs = queue_us / 1e6, query_us / 1e6
        self._from = np.zeros(_COPIED_BYTES, np.uint8)
        self._to = np.zeros_like(self._from)
        self._launched = round(launch_us / 1e6 / self._secs_of_a_byte())

    def queue(self) -> None:
        _spin(self._queue_secs)

    def query(self) -> None:
        _spin(self._query_secs)

    def launch(self) -> None:
        left = self._launched  # bytes, for whose copies NumPy gives the interpreter away
        while left > 0:
            count = min(left, _COPIED_BYTES)
            np.copyto(self._to[:count], self._from[:count])
            left -= count

    def _secs_of_a_byte(self) -> float:
        took = []
        for _ in range(100):
            since = time.perf_counter()
            np.copyto(self._to, self._from)
            took.append(time.perf_counter() - since)
        return statistics.median(took) / _COPIED_BYTES


def _spin(secs: float) -> None:
    if secs:
        end_at = time.perf_counter() + secs
        while time.perf_counter() < end_at:
            pass


class SimulatedGpu(GpuContext):
    """copies_outputs: also large ones, which callers else have where they are."""

    def __init__(self, calls: Calls, *, copies_outputs: bool = False) -> None:
        self.calls, self.copies_outputs = calls, copies_outputs
        self.driver = self._driver = HostMemory()
        self.name, self.uuid, self.sm_count = "simulated", "GPU-0", 132
        self.is_mps_client = False
        self.busy_until: list[float] = []  # by stream

    def make_current(self) -> None: ...

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stream(self) -> int:
        self.busy_until.append(0.0)
        return len(self.busy_until) - 1

    def destroy_stream(self, stream: int) -> None: ...

    def free_bytes(self) -> int:
        return 80 << 30

    def is_dead(self) -> bool:
        return False


class SimulatedGraph(FakeInParts):
    """Ends so long after what was launched before it on its stream. The host's copies are real."""

    def __init__(self, gpu: SimulatedGpu, folder: Path, secs: float, count: int = 0) -> None:
        """Take how many requests a launch has, where they are several tenants'."""
        self._gpu = gpu
        self._buffers = {n: array.copy() for n, array in artifacts.sample_inputs(folder).items()}
        each, rows = artifacts.outputs_of(folder), (count,) if count else ()
        specs = [replace(spec, shape=(*rows, *spec.shape)) for spec in each]
        self._outputs = Outputs(
            gpu.driver,
            specs,
            by_row=bool(count),
            gives_away=are_large(specs) and not gpu.copies_outputs,
        )
        self._secs, self._ends_at = secs, 0.0

    def launch(self, given: Any, stream: int, **_copies: Any) -> None:
        self._take(given)
        self._queue(stream)

    def _take(self, inputs: Arrays) -> None:
        self._gpu.calls.queue()
        if not isinstance(inputs, PinnedArrays):
            for name, buffer in self._buffers.items():
                buffer[...] = inputs[name]

    def _queue(self, stream: int) -> None:
        self._gpu.calls.launch()
        busy_until = self._gpu.busy_until
        self._ends_at = max(busy_until[stream], time.monotonic()) + self._secs
        busy_until[stream] = self._ends_at

    def is_done(self) -> bool:
        self._gpu.calls.query()
        return time.monotonic() >= self._ends_at

    def wait(self) -> None:
        while not self.is_done():
            pass

    def secs(self) -> float:
        return self._secs

    def read(self) -> Any:
        return self._outputs.read()[0]


class SimulatedLanes(SimulatedGraph):
    """Takes requests of several tenants, and has the host's work of a launch for each."""

    _filled = 0

    def launch(self, given: Any, stream: int, **_copies: Any) -> None:
        self._filled = len(given)
        for _, inputs in given:
            self._take(inputs)
        self._queue(stream)

    def read(self) -> Any:
        return self._outputs.read(self._filled)


class SimulatedGroup:
    """Serves several tenants in a launch, which takes no longer for more of them."""

    own, brought = "own", 0

    def __init__(self, gpu: SimulatedGpu, folder: Path, secs: float, counts: Sequence[int]) -> None:
        self._gpu, self._secs, self.counts = gpu, secs, tuple(counts)
        self._folder = folder

    def add(self, name: str, source: Path) -> None: ...

    def bring(self, names: Sequence[str]) -> None: ...

    def limit_weights(self, size_bytes: int) -> None: ...

    def run(self, requests: Any) -> Any:
        raise NotImplementedError("members are launched here")

    def staged_lanes(self, stream: int, count: int = 1) -> dict[int, tuple[SimulatedLanes, ...]]:
        def made(lanes: int) -> SimulatedLanes:
            return SimulatedLanes(self._gpu, self._folder, self._secs, lanes)

        return {lanes: tuple(made(lanes) for _ in range(count)) for lanes in self.counts}


class SimulatedModel:
    """Runs whole only."""

    def __init__(self, gpu: SimulatedGpu, folder: Path, secs: float) -> None:
        self._gpu, self._folder, self._secs = gpu, folder, secs

    def staged_segments(self, stream: int, limits: Cut) -> InPieces:
        raise NotImplementedError("members are whole here")

    def staged(self, stream: int, count: int = 1) -> tuple[SimulatedGraph, ...]:
        return tuple(SimulatedGraph(self._gpu, self._folder, self._secs) for _ in range(count))


def simulated_places(
    segment_us: float, together: int, *, calls: Calls, copies_outputs: bool = False
) -> dict[str, Any]:
    """Return what makes each place: its segments take no time, or graphs so many microseconds."""

    def streams() -> Place:
        gpu, secs = SimulatedGpu(calls, copies_outputs=copies_outputs), segment_us / 1e6
        place = CudaStreamsPlace(
            gpu,
            lambda path: SimulatedModel(gpu, path, secs),
            open_for_several=lambda path: SimulatedGroup(gpu, path, secs, (1, together)),
        )
        vars(place)["kind"] = f"simulated: graphs of {segment_us:g} us"
        vars(place)["cut"] = tuple  # as many lanes of their own as there are
        return place

    return {"free": FreePlace, "graphs": streams}


def make_artifact(folder: Path, side: int, together: int = 1, *, layer: str = "Relu") -> Path:
    """Compile what no place here runs: one small layer, or what serves some tenants in a launch.

    layer: an operator of ONNX: Relu, or GlobalAveragePool for small outputs.
    """
    if together > 1:
        return super_artifact(tenant(CONVNET, 0, folder), folder, (1, together))
    import onnx
    from onnx import TensorProto, helper

    from tunerd.artifacts.compile import compile_artifact
    from tunerd.frontend.onnx.onnx_graph import OnnxGraph
    from tunerd.frontend.relax.lowering import lower
    from tunerd.frontend.tasks import extract_tasks
    from tunerd.vocabulary import Model, TensorSpec

    shape = (1, 3, side, side)
    shapes = {"x": shape, "y": (1, 3, 1, 1) if layer == "GlobalAveragePool" else shape}
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, of) for n, of in shapes.items())
    graph = helper.make_graph([helper.make_node(layer, ["x"], ["y"])], "layer", [x], [y], [])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(proto)
    one, other = (TensorSpec(name, of, "float32") for name, of in shapes.items())
    model = Model("layer", "0" * 64, (one,), (other,), OnnxGraph(proto))
    target = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 1}))
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target)
    compile_artifact(lowered, tasks, {}, target, folder, model=model, pct=100)
    return folder
