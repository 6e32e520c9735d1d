"""Ways in which one process runs eight models, one process runs one of eight, or an engine all.

Each is a worker's body: `prepare` makes what it can and says under which labels, `sample` runs one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.colocation import torch_models
from lab.colocation.queues import Sampler, Slot
from lab.colocation.windowed import Windowed

BATCHES = (8, 32)
STREAMS = (2, 4, 8)
_CLIENTS = {"saturated": 2, "closed": 1}  # of each tenant of an engine

Make = Callable[[], Sequence[Slot]]
Artifacts = dict[int, list[Path]]  # of all tenants, by the share of the tuning
# By "8@25", eight models in a launch tuned at 25%: an artifact, and weights of other tenants.
Together = dict[str, list[Path]]


class InOneProcess:
    """PyTorch's graphs and the artifacts: one after another, on streams, in green contexts."""

    def __init__(
        self,
        model: str,
        precision: str,
        tenants: int,
        artifacts: Artifacts,
        together: Together,
        *,
        compile: bool,
    ) -> None:
        self._model, self._precision, self._tenants = model, precision, tenants
        self._artifacts, self._together, self._compile = artifacts, together, compile
        self._slots: dict[str, Sequence[Slot]] = {}
        self._problems: dict[str, str] = {}
        self._kept: list[Any] = []
        self._sampler: Sampler | None = None

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        import torch

        # TVM's models first: what PyTorch keeps of the memory does not matter to them then.
        for pct, folders in self._artifacts.items():
            self._add_artifacts(pct, folders)
        for point, folders in self._together.items():
            self._add_together(point, folders)
        torch_models.set_precision(self._precision)
        self._add_graphs("PyTorch", folded=False)
        if self._model != "encoder":
            self._add_graphs("PyTorch, batch norms folded", folded=True)
        for batch in BATCHES:
            self._add(
                f"PyTorch, batch {batch} of one model", functools.partial(self._batched, batch)
            )
        self._add(f"PyTorch, vmap of {self._tenants}", self._vmapped)
        if self._model != "encoder":
            self._add(f"PyTorch, grouped convolutions of {self._tenants}", self._grouped)
        self._sampler = Sampler()
        return {
            "labels": list(self._slots),
            "problems": self._problems,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }

    def sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._sampler is not None
        slots, secs = self._slots[asked["label"]], asked["secs"]
        if asked["mode"] == "saturated":
            return {"per_sec": self._sampler.saturated(asked["label"], slots, secs)}
        per_sec, latencies = self._sampler.closed(slots, secs)
        return {"per_sec": per_sec, "latencies_us": latencies}

    def _add(self, label: str, make: Make) -> None:
        try:
            self._slots[label] = make()
        except Exception as error:
            self._problems[label] = f"{type(error).__name__}: {error}"[:400]

    # --- PyTorch -------------------------------------------------------------------------------

    def _add_graphs(self, label: str, *, folded: bool) -> None:
        made: list[torch_models.Graph] = []

        def one_after_another() -> Sequence[Slot]:
            made.extend(self._graphs(folded=folded))
            return [graph.on(made[0].stream) for graph in made]

        self._add(f"{label}, one after another", one_after_another)
        self._add_streams(label, made, STREAMS[-1:] if folded else STREAMS)
        if not folded:
            for count in (4, 8):
                name = f"{label}, {count} green contexts"
                self._add(name, functools.partial(self._in_green_contexts, count))
        if self._compile and not folded:
            quick: list[torch_models.Graph] = []

            def compiled() -> Sequence[Slot]:
                pairs = [self._placed(seed) for seed in range(self._tenants)]
                quick.extend(torch_models.compiled(*zip(*pairs, strict=True)))
                return [graph.on(quick[0].stream) for graph in quick]

            self._add(f"{label} compiled, one after another", compiled)
            self._add_streams(f"{label} compiled", quick, STREAMS[-1:])

    def _add_streams(
        self, label: str, graphs: Sequence[torch_models.Graph], counts: Sequence[int]
    ) -> None:
        for count in counts if graphs else ():
            slots = [g.on(graphs[i % count].stream) for i, g in enumerate(graphs)]
            self._add(f"{label}, {count} streams", functools.partial(list, slots))

    def _graphs(self, *, folded: bool) -> list[torch_models.Graph]:
        pairs = [self._placed(seed, folded=folded) for seed in range(self._tenants)]
        return [torch_models.captured(model, (x,)) for model, x in pairs]

    def _in_green_contexts(self, count: int) -> Sequence[Slot]:
        import torch

        graphs = []
        for seed, stream in enumerate(self._green_streams(count)):
            model, x = self._placed(seed)
            outside = torch.cuda.ExternalStream(stream)
            graphs.append(torch_models.captured(model, (x,), outside))
        return [graph.on() for graph in graphs]

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
        return [torch_models.captured(model, (x,)).on(inferences=batch)]

    def _vmapped(self) -> Sequence[Slot]:
        import torch

        pairs = [self._placed(seed) for seed in range(self._tenants)]
        try:
            call, arguments = torch_models.vmapped(*zip(*pairs, strict=True))
            return [torch_models.captured(call, arguments).on(inferences=self._tenants)]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    def _grouped(self) -> Sequence[Slot]:
        import torch

        from lab.colocation.tenants import build

        pairs = [build(self._model, seed) for seed in range(self._tenants)]
        model, x = torch_models.grouped(*zip(*pairs, strict=True))
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self._precision, torch.float32)
        model = model.cuda().to(dtype).to(memory_format=torch.channels_last)
        x = x.cuda().to(dtype).contiguous(memory_format=torch.channels_last)
        return [torch_models.captured(model, (x,)).on(inferences=self._tenants)]

    # --- artifacts -----------------------------------------------------------------------------

    def _add_artifacts(self, pct: int, folders: Sequence[Path]) -> None:
        import tunerd

        label = f"tuned at {pct}%"
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
        for count in STREAMS[1:]:
            self._add(f"{label}, {count} streams", functools.partial(on_streams, count))
        if (count := min(self._tenants, 100 // pct)) > 1:
            name = f"{label}, {count} green contexts"
            self._add(name, functools.partial(in_green_contexts, count))

    def _add_together(self, point: str, folders: Sequence[Path]) -> None:
        """Add launches that serve several models each: on one stream, on several, in slices."""
        import tunerd
        from tunerd.artifacts.super_model import SuperModel

        by, pct = (int(number) for number in point.split("@"))
        label = f"{by} together, tuned at {pct}%"
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

    def __init__(self, model: str, precision: str, seed: int, artifact: Path | None) -> None:
        super().__init__()
        self._model, self._precision, self._seed, self._artifact = model, precision, seed, artifact

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)  # there are as many such processes as cores
        problems: dict[str, str] = {}
        try:
            self._load()
        except Exception as error:
            problems["tuned"] = f"{type(error).__name__}: {error}"[:400]
        torch_models.set_precision(self._precision)
        model, x = torch_models.placed(self._model, self._seed, precision=self._precision)
        self._slots["PyTorch"] = torch_models.captured(model, (x,)).on()
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return {"labels": list(self._slots), "problems": problems, "sms": sms}

    def _load(self) -> None:
        import tunerd

        if self._artifact is not None:
            capture = tunerd.load(self._artifact).captured()
            self._slots["tuned"] = Slot(capture.launch, capture.stream)


class InEngines:
    """tunerd's engine under each policy, over artifacts of one share each.

    And under space-time for each launch of several models and share, in slices of that share.
    """

    def __init__(
        self, artifacts: Artifacts, together: Together, policies: Sequence[dict[str, Any]]
    ) -> None:
        self._artifacts, self._together, self._policies = artifacts, together, policies
        self._engines: dict[str, Any] = {}
        self._problems: dict[str, str] = {}

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        for said in self._policies if self._artifacts else ():
            place = said.get("place", "in-process")
            # Who has the whole GPU gets what was tuned for most of it, and who has a part, least.
            pct = (max if said["kind"] == "time" else min)(self._artifacts)
            where = "" if place == "in-process" else f" in {place}"
            policy = {key: value for key, value in said.items() if key != "place"}
            label = f"engine, {said['kind']}{where}, tuned at {pct}%"
            self._add(label, self._artifacts[pct], policy, place)
        for point, folders in self._together.items():
            by, pct = (int(number) for number in point.split("@"))
            slices = max(1, min(len(folders) // by, 100 // pct))
            policy = {"kind": "space-time", "slices": slices, "together": by}
            self._add(f"engine, space-time, {by} together, tuned at {pct}%", folders, policy)
        return {"labels": list(self._engines), "problems": self._problems}

    def _add(
        self,
        label: str,
        folders: Sequence[Path],
        policy: dict[str, Any],
        place: str = "in-process",
    ) -> None:
        from tunerd.colocation import Engine, Plan

        members = [{"name": f"m{i}", "artifact": str(folder)} for i, folder in enumerate(folders)]
        plan = {"device": "cuda", "place": place, "policy": policy, "members": members}
        try:
            self._engines[label] = Engine(Plan.model_validate(plan)).start()
        except Exception as error:
            self._problems[label] = f"{type(error).__name__}: {error}"[:400]

    def sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        from tunerd.colocation.bench import sample_inputs
        from tunerd.colocation.load.generator import DONE, run_load
        from tunerd.colocation.plan import LoadChoice

        engine = self._engines[asked["label"]]
        load = LoadChoice(duration=asked["secs"], clients=_CLIENTS[asked["mode"]])
        observed = run_load(engine, load, sample_inputs(engine.plan))
        done = [sample for sample in observed.counted if sample.end == DONE]
        first, last = observed.window
        latencies = [round(sample.latency_secs * 1e6) for sample in done]
        return {"per_sec": len(done) / (last - first), "latencies_us": latencies}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def read_artifacts(text: str) -> Artifacts:
    """Return what `json.dumps` made of artifacts: keys are texts there, and paths."""
    return {int(pct): [Path(p) for p in paths] for pct, paths in json.loads(text).items()}


def read_together(text: str) -> Together:
    """Return what `json.dumps` made of launches of several models."""
    return {point: [Path(p) for p in paths] for point, paths in json.loads(text).items()}
