"""Ways in which one process runs eight models, one process runs one of eight, or an engine all.

Each is a worker's body: `prepare` makes what it can and says under which labels, `sample` runs one.
Labels are those of lab/colocation/ways.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.colocation import torch_models, ways
from lab.colocation.queues import Sampler, Slot
from lab.colocation.steps import say
from lab.colocation.torch_models import slot
from lab.colocation.ways import BATCHES, STREAMS
from lab.colocation.windowed import Windowed
from tunerd.runner.pytorch import Graph, as_graph, set_precision

_CLIENTS = {"saturated": 2, "closed": 1}  # of each tenant of an engine

Make = Callable[[], Sequence[Slot]]
Artifacts = dict[int, list[Path]]  # of all tenants, by the share of the tuning
# By "8@25", eight models in a launch tuned at 25%: an artifact, and weights of other tenants.
Together = dict[str, list[Path]]


class InOneProcess:
    """PyTorch's graphs and the artifacts: one after another, on streams, in green contexts.

    labels: which of these are wanted.
    """

    def __init__(
        self,
        model: str,
        precision: str,
        tenants: int,
        artifacts: Artifacts,
        together: Together,
        labels: Sequence[str],
    ) -> None:
        self._model, self._precision, self._tenants = model, precision, tenants
        self._artifacts, self._together, self._labels = artifacts, together, labels
        self._slots: dict[str, Sequence[Slot]] = {}
        self._problems: dict[str, str] = {}
        self._kept: list[Any] = []
        self._sampler: Sampler | None = None

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for pct, folders in self._artifacts.items():
            self._add_artifacts(pct, folders)
        for point, folders in self._together.items():
            self._add_together(point, folders)
        if any(label.startswith("PyTorch") for label in self._labels):
            import torch

            torch.zeros(1, device="cuda")  # a context, which green ones are made in
            self._add_pytorch()
            said["torch"] = torch.__version__
        self._sampler = Sampler()
        return said | {"labels": list(self._slots), "problems": self._problems}

    def sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._sampler is not None
        slots, secs = self._slots[asked["label"]], asked["secs"]
        if asked["mode"] == "saturated":
            return {"per_sec": self._sampler.saturated(asked["label"], slots, secs)}
        per_sec, latencies = self._sampler.closed(slots, secs)
        return {"per_sec": per_sec, "latencies_us": latencies}

    def _add(self, label: str, make: Make) -> None:
        if label not in self._labels:
            return
        say(label)
        try:
            self._slots[label] = make()
        except Exception as error:
            self._problems[label] = f"{type(error).__name__}: {error}"[:400]

    # --- PyTorch -------------------------------------------------------------------------------

    def _add_pytorch(self) -> None:
        self._add_graphs("PyTorch", functools.cache(self._graphs))
        for count in (8, 4):
            name = f"PyTorch, {count} green contexts"
            self._add(name, functools.partial(self._in_green_contexts, count))
        folded = functools.cache(functools.partial(self._graphs, folded=True))
        self._add_graphs("PyTorch, batch norms folded", folded)
        for batch in BATCHES:
            self._add(
                f"PyTorch, batch {batch} of one model", functools.partial(self._batched, batch)
            )
        self._add(f"PyTorch, vmap of {self._tenants}", self._vmapped)
        self._add(f"PyTorch, grouped convolutions of {self._tenants}", self._grouped)
        self._add_graphs("PyTorch compiled", functools.cache(self._compiled))

    def _add_graphs(self, label: str, made: Callable[[], list[Graph]]) -> None:
        """Add graphs, which are made when the first of their labels is wanted, on streams."""

        def on(count: int) -> Sequence[Slot]:
            graphs = made()
            return [slot(g, graphs[i % count].stream) for i, g in enumerate(graphs)]

        self._add(f"{label}, one after another", lambda: on(1))
        for count in STREAMS:
            self._add(f"{label}, {count} streams", functools.partial(on, count))

    def _compiled(self) -> list[Graph]:
        pairs = [self._placed(seed) for seed in range(self._tenants)]
        return torch_models.compiled(*zip(*pairs, strict=True))

    def _graphs(self, *, folded: bool = False) -> list[Graph]:
        pairs = [self._placed(seed, folded=folded) for seed in range(self._tenants)]
        return [as_graph(model, (x,)) for model, x in pairs]

    def _in_green_contexts(self, count: int) -> Sequence[Slot]:
        import torch

        graphs = []
        for seed, stream in enumerate(self._green_streams(count)):
            model, x = self._placed(seed)
            outside = torch.cuda.ExternalStream(stream)
            graphs.append(as_graph(model, (x,), outside))
        return [slot(graph) for graph in graphs]

    def _green_streams(self, count: int) -> list[int]:
        """Return a stream for each tenant, in so many equal green contexts by turns."""
        from tunerd.colocation.places.green_contexts import GreenContexts

        contexts = GreenContexts()
        parts = contexts.cut([(f"part {i}", 100 // count) for i in range(count)])
        self._kept.append(contexts)
        return [int(contexts.stream(parts[i % count])) for i in range(self._tenants)]

    def _placed(self, seed: int, batch: int = 1, *, folded: bool = False) -> tuple[Any, Any]:
        return torch_models.placed(
            self._model, seed, batch=batch, precision=self._precision, folded=folded
        )

    def _batched(self, batch: int) -> Sequence[Slot]:
        model, x = self._placed(0, batch)
        return [slot(as_graph(model, (x,)), inferences=batch)]

    def _vmapped(self) -> Sequence[Slot]:
        import torch

        pairs = [self._placed(seed) for seed in range(self._tenants)]
        try:
            call, arguments = torch_models.vmapped(*zip(*pairs, strict=True))
            return [slot(as_graph(call, arguments), inferences=self._tenants)]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    def _grouped(self) -> Sequence[Slot]:
        import torch

        from lab.colocation.tenants import build

        pairs = [build(self._model, seed) for seed in range(self._tenants)]
        set_precision(self._precision)
        model, x = torch_models.grouped(*zip(*pairs, strict=True))
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self._precision, torch.float32)
        model = model.cuda().to(dtype).to(memory_format=torch.channels_last)
        x = x.cuda().to(dtype).contiguous(memory_format=torch.channels_last)
        return [slot(as_graph(model, (x,)), inferences=self._tenants)]

    # --- artifacts -----------------------------------------------------------------------------

    def _add_artifacts(self, pct: int, folders: Sequence[Path]) -> None:
        import tunerd

        label = f"tuned at {pct}%"
        say(f"loading what was {label}")
        try:
            models = [tunerd.load(folder) for folder in folders]
        except Exception as error:
            self._problems[label] = f"{type(error).__name__}: {error}"[:400]
            return

        def on(streams: Sequence[Any]) -> Sequence[Slot]:
            captures = [m.captured(s) for m, s in zip(models, streams, strict=True)]
            return [Slot(c.launch, c.stream) for c in captures]

        def on_streams(count: int) -> Sequence[Slot]:
            first = [m.captured() for m in models[:count]]
            rest = [
                m.captured(first[i % count].stream)
                for i, m in enumerate(models[count:], start=count)
            ]
            return [Slot(c.launch, c.stream) for c in (*first, *rest)]

        def in_green_contexts(count: int) -> Sequence[Slot]:
            return on(self._green_streams(count))

        self._add(f"{label}, one after another", functools.partial(on_streams, 1))
        for count in STREAMS:
            self._add(f"{label}, {count} streams", functools.partial(on_streams, count))
        if (count := min(self._tenants, 100 // pct)) > 1:
            name = f"{label}, {count} green contexts"
            self._add(name, functools.partial(in_green_contexts, count))

    def _add_together(self, point: str, folders: Sequence[Path]) -> None:
        """Add launches that serve several models each: on one stream, on several, in slices."""
        import tunerd
        from tunerd.artifacts.super_model import SuperModel

        (by, pct), label = ways.split(point), ways.together_label(point)
        say(f"loading {label}")
        try:
            model = tunerd.load(folders[0])
            assert isinstance(model, SuperModel)
            for number, folder in enumerate(folders[1:], start=1):
                model.add(str(number), folder)
        except Exception as error:
            self._problems[label] = f"{type(error).__name__}: {error}"[:400]
            return
        self._kept.append(model)
        names = model.tenants
        launches = [names[i : i + by] for i in range(0, len(names), by)]

        def on(streams: Sequence[Any]) -> Sequence[Slot]:
            slots, own = [], None
            for tenants, stream in zip(launches, streams, strict=True):
                capture = model.captured_lanes(tenants, own if stream == "the first's" else stream)
                own = own or capture.stream
                slots.append(Slot(capture.launch, capture.stream, inferences=len(tenants)))
            return slots

        rest = len(launches) - 1
        self._add(f"{label}, one after another", lambda: on([None, *["the first's"] * rest]))
        if len(launches) > 1:
            self._add(f"{label}, {len(launches)} streams", lambda: on([None] * len(launches)))
        if (count := min(len(launches), 100 // pct)) > 1:
            self._add(
                f"{label}, {count} green contexts",
                lambda: on(self._green_streams(count)[: len(launches)]),
            )


class OneOfMany(Windowed):
    """One tenant in a process of its own: PyTorch's graph and, where there is one, an artifact."""

    def __init__(
        self,
        model: str,
        precision: str,
        seed: int,
        artifact: Path | None,
        labels: Sequence[str],
    ) -> None:
        super().__init__()
        self._model, self._precision, self._seed, self._artifact = model, precision, seed, artifact
        # As the table has them: "PyTorch, where", "tuned at 12%, where".
        self._label_of = {label.partition(" ")[0].rstrip(","): label for label in labels}

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        problems: dict[str, str] = {}
        for kind, load in (("tuned", self._load), ("PyTorch", self._capture)):
            if label := self._label_of.get(kind):
                say(label)
                try:
                    self._slots[label] = load()
                except Exception as error:
                    problems[label] = f"{type(error).__name__}: {error}"[:400]
        sms = {"sms": _sms()} if self._slots else {}
        return {"labels": list(self._slots), "problems": problems} | sms

    def _load(self) -> Slot:
        import tunerd

        assert self._artifact is not None
        capture = tunerd.load(self._artifact).captured()
        return Slot(capture.launch, capture.stream)

    def _capture(self) -> Slot:
        import torch

        torch.set_num_threads(1)  # there are as many such processes as cores
        model, x = torch_models.placed(self._model, self._seed, precision=self._precision)
        return slot(as_graph(model, (x,)))


def _sms() -> int:
    """Return how many SMs this process is given, which has a context."""
    from cuda.bindings import driver

    from tunerd.system.cuda_driver import checked

    count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(checked(driver.cuDeviceGetAttribute(count, checked(driver.cuCtxGetDevice()))))


class InEngine:
    """tunerd's engine over artifacts.

    plan: of an engine but for the members. folders: of these.
    """

    def __init__(self, label: str, plan: dict[str, Any], folders: Sequence[Path]) -> None:
        self._label, self._plan, self._folders = label, plan, folders
        self._engine: Any = None

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        from tunerd.colocation import Engine, Plan

        members = [
            {"name": f"m{i}", "artifact": str(folder)} for i, folder in enumerate(self._folders)
        ]
        plan = Plan.model_validate(self._plan | {"members": members})
        self._engine = Engine(plan, on_step=say).start()
        say("started")
        return {"labels": [self._label], "problems": {}}

    def sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        from tunerd.colocation.bench import sample_inputs
        from tunerd.colocation.load.generator import DONE, run_load
        from tunerd.colocation.plan import LoadChoice

        load = LoadChoice(duration=asked["secs"], clients=_CLIENTS[asked["mode"]])
        observed = run_load(self._engine, load, sample_inputs(self._engine.plan))
        done = [sample for sample in observed.counted if sample.end == DONE]
        first, last = observed.window
        latencies = [round(sample.latency_secs * 1e6) for sample in done]
        return {"per_sec": len(done) / (last - first), "latencies_us": latencies}

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def engine_plan(each: ways.Ways, device: str) -> dict[str, Any]:
    """Return the plan of an engine but for its members: of a policy, or of a launch and share."""
    if each.policy:
        place, policy = ways.PLACES.get(each.policy, "in-process"), ways.POLICIES[each.policy]
    else:
        by, pct = ways.split(each.points[0])
        slices = max(1, min(ways.TENANTS // by, 100 // pct))
        place, policy = "in-process", {"kind": "space-time", "slices": slices, "together": by}
    return {"device": device, "place": place, "policy": policy}


def read_artifacts(text: str) -> Artifacts:
    """Return what `json.dumps` made of artifacts: keys are texts there, and paths."""
    return {int(pct): [Path(p) for p in paths] for pct, paths in json.loads(text).items()}


def read_together(text: str) -> Together:
    """Return what `json.dumps` made of launches of several models."""
    return {point: [Path(p) for p in paths] for point, paths in json.loads(text).items()}
