#!/usr/bin/env python3
"""Measure what the engine costs the host for a request, and how many requests it takes a second.

    scripts/lab/colocation/engine_overhead.py                         # simulated places
    scripts/lab/colocation/engine_overhead.py --artifact FOLDER ...   # on the first GPU

Without an artifact the places are simulated and named so: one whose segments end when they are
started, so that the engine alone is measured, and one with streams of a GPU whose graphs end after
`--segment-us` without doing anything. With artifacts each is a member, and repeated in turn where
there are fewer than members. Requests come from one thread, from one event loop, or from the load
generator, which tells latencies, by how much members differ in rate and median, and how long the
collector of garbage stopped the process; as many at a time as `--window` says for each member; or
in bursts, of which each has --slo-ms, and what was in time is told, of all and of the admitted. CPU
time is that of the whole process, so it has the client's part in it: making the request and taking
the answer.

Prints a table, and with --json every number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from lab.lab import made_by, write
from tests.lib.fake_gpu import FakeInParts, HostMemory
from tests.lib.super_models import CONVNET, super_artifact, tenant
from tunerd.artifacts.outputs import Outputs
from tunerd.artifacts.segments import Cut
from tunerd.artifacts.staging import PinnedArrays, are_large
from tunerd.colocation import Engine, Plan, artifacts
from tunerd.colocation.buffers import InputBuffers
from tunerd.colocation.load.generator import run_load
from tunerd.colocation.places.base import Done, Loaded, Place, Told
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.colocation.places.staged import InPieces
from tunerd.colocation.plan import LoadChoice, Member, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.vocabulary import Arrays, TargetSpec

TOLD = (
    "p99_ms", "longest_ms", "longest_pause_ms", "rates_differ_pct", "medians_differ_pct",
    "in_time_pct", "of_admitted_pct",
)  # fmt: skip
Given = tuple[str, Any]  # a member, and inputs

WARM = 0.2  # of the time, before what is counted


# --- simulated ---------------------------------------------------------------------------------


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


class SimulatedGpu(GpuContext):
    """copies_outputs: also large ones, which callers else have where they are."""

    copies_outputs = False

    def __init__(self) -> None:
        self.driver = self._driver = HostMemory()
        self.name, self.uuid, self.sm_count = "simulated", "GPU-0", 132
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

    def launch(
        self, given: Any, stream: int, *, bring: int | None = None, fetch: int | None = None
    ) -> None:
        if not isinstance(given, PinnedArrays):
            for name, buffer in self._buffers.items():
                buffer[...] = given[name]
        busy_until = self._gpu.busy_until
        self._ends_at = max(busy_until[stream], time.monotonic()) + self._secs
        busy_until[stream] = self._ends_at

    def is_done(self) -> bool:
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

    def launch(
        self, given: Any, stream: int, *, bring: int | None = None, fetch: int | None = None
    ) -> None:
        self._filled, before = len(given), self._gpu.busy_until[stream]
        for _, inputs in given:
            self._gpu.busy_until[stream] = before  # one launch for all of them
            super().launch(inputs, stream)

    def read(self) -> Any:
        return self._outputs.read(self._filled)


class SimulatedGroup:
    """Serves several tenants in a launch, which takes no longer for more of them."""

    own = "own"

    def __init__(self, gpu: SimulatedGpu, folder: Path, secs: float, counts: Sequence[int]) -> None:
        self._gpu, self._secs, self.counts = gpu, secs, tuple(counts)
        self._folder = folder

    def add(self, name: str, source: Path) -> None: ...

    def bring(self, names: Sequence[str]) -> None: ...

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


def simulated_places(segment_us: float, together: int) -> dict[str, Any]:
    def streams() -> Place:
        gpu, secs = SimulatedGpu(), segment_us / 1e6
        place = CudaStreamsPlace(
            gpu,
            lambda path: SimulatedModel(gpu, path, secs),
            open_for_tenants=lambda path: SimulatedGroup(gpu, path, secs, (1, together)),
        )
        vars(place)["kind"] = f"simulated: graphs of {segment_us:g} us"
        vars(place)["cut"] = tuple  # as many lanes of their own as there are
        return place

    return {"free": FreePlace, "graphs": streams}


def make_artifact(folder: Path, side: int, together: int) -> Path:
    """Compile what no place here runs: one small layer, or what serves some tenants in a launch."""
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
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y], [])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(proto)
    one, other = (TensorSpec(name, shape, "float32") for name in "xy")
    model = Model("relu", "0" * 64, (one,), (other,), OnnxGraph(proto))
    target = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 1}))
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target)
    compile_artifact(lowered, tasks, {}, target, folder, model=model, pct=100)
    return folder


# --- clients -----------------------------------------------------------------------------------


class Meter:
    """Counts answers and CPU time from the moment at which the engine is warm."""

    def __init__(self, secs: float) -> None:
        now = time.monotonic()
        self._begin_at, self.end_at = now + WARM * secs, now + secs
        self._since: tuple[float, float] | None = None
        self._done = 0

    def answered(self) -> bool:
        """Count one; return whether to go on."""
        now = time.monotonic()
        if self._since is not None:
            self._done += 1
        elif now >= self._begin_at:
            self._since = now, time.process_time()
        return now < self.end_at

    def found(self) -> dict[str, float]:
        assert self._since is not None
        wall_secs = time.monotonic() - self._since[0]
        cpu_secs = time.process_time() - self._since[1]
        return {"per_sec": self._done / wall_secs, "cpu_us": 1e6 * cpu_secs / max(self._done, 1)}


def from_thread(engine: Engine, given: Sequence[Given], window: int, secs: float) -> Any:
    meter, under_way, nth = Meter(secs), deque[Any](), 0
    while True:
        name, inputs = given[nth % len(given)]
        nth += 1
        under_way.append(engine.submit(name, inputs))
        if len(under_way) >= window * len(given):
            under_way.popleft().result()
            if not meter.answered():
                break
    found = meter.found()
    for future in under_way:
        future.result()
    return found


def from_loop(engine: Engine, given: list[Given], window: int, secs: float) -> Any:
    async def client(name: str, inputs: Any, meter: Meter) -> None:
        while True:
            await engine.asubmit(name, inputs)
            if not meter.answered():
                return

    async def all_clients() -> Any:
        meter = Meter(secs)
        clients = [asyncio.create_task(client(*each, meter)) for each in given * window]
        await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
        found = meter.found()
        await asyncio.gather(*clients)
        return found

    return asyncio.run(all_clients())


class Pauses:
    """How long the collector of garbage stops the process, in this block."""

    def __enter__(self) -> Pauses:
        self.secs: list[float] = []
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.secs.append(time.perf_counter() - self._began)


def from_generator(
    engine: Engine, given: Sequence[Given], window: int, secs: float
) -> dict[str, float]:
    load = LoadChoice(kind="closed", duration=secs, clients=window)
    cpu_secs = time.process_time()
    with Pauses() as pauses:
        observed = run_load(engine, load, {name: dict(inputs) for name, inputs in given})
    cpu_secs = time.process_time() - cpu_secs
    first, last = observed.window
    took = sorted(sample.latency_secs for sample in observed.counted)
    of: dict[str, list[float]] = {}
    for sample in observed.counted:
        of.setdefault(sample.member, []).append(sample.latency_secs)
    return {
        "per_sec": len(took) / (last - first),
        "cpu_us": 1e6 * cpu_secs / len(observed.samples),
        "p99_ms": 1e3 * took[int(0.99 * len(took))],
        "longest_ms": 1e3 * took[-1],
        "rates_differ_pct": _differ_pct([len(each) for each in of.values()]),
        "medians_differ_pct": _differ_pct([statistics.median(each) for each in of.values()]),
        "longest_pause_ms": 1e3 * max(pauses.secs, default=0.0),
        "pauses_secs": sum(pauses.secs),
    }


def _differ_pct(values: Sequence[float]) -> float:
    return 100 * (max(values) / min(values) - 1)


def in_bursts(engine: Engine, given: Sequence[Given], window: int, secs: float) -> dict[str, float]:
    """Send bursts at the rates of the plan, and say what was answered in time."""
    load = LoadChoice(kind="bursts", duration=secs)
    cpu_secs = time.process_time()
    observed = run_load(engine, load, {name: dict(inputs) for name, inputs in given})
    cpu_secs = time.process_time() - cpu_secs
    (slo_ms,) = {member.slo_ms for member in engine.plan.members}
    assert slo_ms is not None, "--slo-ms is missing"
    done = [s.latency_secs for s in observed.counted if s.end == "done"]
    admitted = len(done) + sum(s.end == "dropped" for s in observed.counted)
    in_time, (first, last) = sum(1e3 * secs <= slo_ms for secs in done), observed.window
    return {
        "per_sec": len(done) / (last - first),
        "cpu_us": 1e6 * cpu_secs / len(observed.samples),
        "p99_ms": 1e3 * sorted(done)[int(0.99 * len(done))],
        "in_time_pct": 100 * in_time / len(observed.counted),
        "of_admitted_pct": 100 * in_time / admitted,
    }


CLIENTS = {
    "thread": from_thread,
    "asyncio": from_loop,
    "generator": from_generator,
    "bursts": in_bursts,
}


# --- the table ---------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folders: Sequence[Path]) -> list[dict[str, Any]]:
    places: dict[str, Any] = {"gpu": lambda: None}
    if not options.artifact:
        places = simulated_places(options.segment_us, options.together)
    found = []
    for place, make in places.items():
        if options.place and place not in options.place:
            continue
        for count in options.members:
            document = {
                "device": "cuda" if options.artifact else "cpu",
                "policy": {"kind": options.policy} | _together(options),
                "members": [
                    {"name": f"m{i}", "artifact": str(folders[i % len(folders)].resolve())}
                    | _asked(options, count)
                    for i in range(count)
                ],
            }
            plan = Plan.model_validate(document)
            given: list[Given] = [
                (m.name, artifacts.sample_inputs(m.artifact)) for m in plan.members
            ]
            with Engine(plan, place=make()) as engine:
                if options.buffers:
                    given = [(name, _buffered(engine, name, inputs)) for name, inputs in given]
                for client in options.client:
                    row = {"place": engine.stats().place, "members": count, "client": client}
                    row |= CLIENTS[client](engine, given, options.window, options.secs)
                    found.append(row)
                    print(
                        f"{row['place']:32} {count:3} members  {client:8} "
                        f"{row['per_sec']:9.0f}/s {row['cpu_us']:7.1f} us CPU a request"
                        + "".join(f", {n} {row[n]:.1f}" for n in TOLD if n in row),
                        flush=True,
                    )
    return found


def _asked(options: argparse.Namespace, count: int) -> dict[str, float]:
    """Say what is asked of each of so many members with a share each, where bursts are sent."""
    if options.slo_ms is None:
        return {}
    per_sec = 0.8 * 1e6 / options.segment_us  # what a simulated lane does
    return {"slo_ms": options.slo_ms, "rate": per_sec, "share": 100 // count}


def _together(options: argparse.Namespace) -> dict[str, int]:
    return {"together": options.together} if options.together > 1 else {}


def _buffered(engine: Engine, name: str, inputs: Arrays) -> InputBuffers:
    buffers = engine.input_buffers(name)
    for each, array in buffers.items():
        array[...] = inputs[each]
    return buffers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, nargs="+", help="of a GPU")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--client", nargs="+", choices=CLIENTS, default=list(CLIENTS)[:3])
    parser.add_argument("--place", nargs="+", choices=["free", "graphs"], help="simulated ones")
    parser.add_argument("--policy", default="streams")
    parser.add_argument("--segment-us", type=float, default=500.0, help="of a simulated graph")
    parser.add_argument("--together", type=int, default=1,
                        help="requests of a simulated launch, for --policy space-time")  # fmt: skip
    parser.add_argument("--side", type=int, default=32, help="of a simulated member's image")
    parser.add_argument("--window", type=int, default=4, help="requests of a member at a time")
    parser.add_argument("--slo-ms", type=float, help="of bursts, at 80%% of what the graphs do")
    parser.add_argument("--buffers", action="store_true", help="inputs are where the device reads")
    parser.add_argument("--secs", type=float, default=3.0, help="of each row")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--copy-outputs", action="store_true", help="of simulated graphs")
    options = parser.parse_args()
    SimulatedGpu.copies_outputs = options.copy_outputs
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.artifact or [
            make_artifact(Path(scratch) / "made", options.side, options.together)
        ]
        found = measure(options, folders)
    if options.json:
        write(options.json, {**made_by(), "rows": found})


if __name__ == "__main__":
    main()
