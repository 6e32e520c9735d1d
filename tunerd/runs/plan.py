"""What a run is going to do: model, slices, tuners, tasks. A dry run prints it, a run does it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tunerd.candidates.triton.source import is_installed
from tunerd.cluster.layout import (
    Layout,
    cluster_layout,
    costs_to_others,
    local_layout,
    open_cluster,
)
from tunerd.errors import HostError, InputError
from tunerd.frontend.kernels import Kernels, Selection
from tunerd.frontend.model import FixedModel, read_model
from tunerd.frontend.samples import read_samples
from tunerd.libraries import packages
from tunerd.records import RunFacts
from tunerd.runs.folder import require_free
from tunerd.runs.warm_start import WarmStart, read_warm_starts
from tunerd.settings import TuneSettings
from tunerd.slices.room import needed_bytes
from tunerd.system import host
from tunerd.vocabulary import BF16, FP16, FP32, Arrays, Model, SliceRequest, Task, to_json

if TYPE_CHECKING:
    from tunerd.cluster.ray_cluster import Cluster

# Seconds of one core for a proposed and built trial, and of a slice for its measurement; measured
# once on each kind of host and good for an estimate only.
_CORE_SECS_PER_TRIAL = {"llvm": 0.15, "cuda": 0.6}
_SLICE_SECS_PER_TRIAL = {"llvm": 0.06, "cuda": 0.06}
# As a process with one captured model holds (`colocation.places.base`), and what rotates.
_CONTEXT_BYTES = 1 << 30
FIXED_SECS = {"llvm": 60.0, "cuda": 60.0}  # start-up, finalists, artifact, verification


@dataclass(frozen=True)
class RunPlan:
    """What a run does. `plan_run` makes it, `runs.run.execute` does it."""

    settings: TuneSettings
    model: FixedModel
    layout: Layout  # has the exact environment of each runner
    warm_starts: tuple[WarmStart, ...] = field(repr=False)
    facts: RunFacts = field(repr=False)
    selection: Selection | None = None  # of the tasks; all where it is None
    samples: tuple[Arrays, ...] = field(default=(), repr=False, compare=False)  # inputs, if given
    simplified: Model | None = None  # once it is lowered
    tasks: tuple[Task, ...] = ()  # likewise

    @property
    def warning(self) -> str:
        """What a person should know before the run begins, or ""."""
        said = (
            costs_to_others(self.layout),
            open_cluster(self.layout),
            self._without_templates(),
            self._widened(),
        )
        return " ".join(filter(None, said))

    def _without_templates(self) -> str:
        """Say what is missing for tensor cores, where they are asked for; or ""."""
        is_wanted = self.settings.precision not in (None, FP32) and self.layout.target.is_cuda
        if not is_wanted or is_installed():
            return ""
        return (
            "Triton is not installed here, so tensor cores are left to MetaSchedule, which uses "
            "them in fp16 and bf16 alone and knows no attention: "
            "pip install 'tunerd[triton]'"
        )

    def _widened(self) -> str:
        """Say what 16 bits cost on CPUs, where they are asked for; or ""."""
        precision = self.settings.precision
        if precision not in (FP16, BF16) or self.layout.target.is_cuda:
            return ""
        return (
            f"On CPUs kernels compute in fp32, and widen what is stored in {precision}, so that "
            "they take several times as long: leave out --precision, unless that is what you want."
        )

    @property
    def estimate_secs(self) -> float | None:
        """The run's time, estimated from its trials; None where they are not limited."""
        settings, layout = self.settings, self.layout
        kind = layout.target.kind
        if settings.trials is None:
            return None if settings.budget_secs is None else settings.budget_secs + FIXED_SECS[kind]
        cores = sum(t.cpus for t in layout.tuners)
        building = settings.trials * _CORE_SECS_PER_TRIAL[kind] / cores
        measuring = settings.trials * _SLICE_SECS_PER_TRIAL[kind] / len(layout.slices)
        shares_cores = any(s.lane is not None for s, _ in layout.slices)
        work = building + measuring if shares_cores else max(building, measuring)
        return min(work, settings.budget_secs or work) + FIXED_SECS[kind]

    def require_folder(self) -> None:
        """Raise FolderError where the settings' folder is not this run's to begin or go on in."""
        require_free(self.settings.out, self.facts)

    def with_model_at(self, path: Path) -> Self:
        """Return the same plan with its model's file elsewhere."""
        settings = self.settings.model_copy(update={"model": path})
        facts = replace(self.facts, settings=settings.model_dump(mode="json"))
        return replace(self, settings=settings, facts=facts)

    def with_tasks(self, kernels: Kernels) -> Self:
        """Return the plan of a model that was lowered."""
        return replace(self, simplified=kernels.model, tasks=kernels.tasks)

    def describe(self) -> dict[str, Any]:
        """Return the document of --dry-run. The model must have been lowered."""
        settings, layout, model = self.settings, self.layout, self.simplified
        assert model is not None
        task_ids = {t.task_id for t in self.tasks}
        return {
            "out": str(settings.out),
            "model": {
                "name": model.name,
                "digest": model.digest,
                "inputs": to_json(model.inputs),
                "outputs": to_json(model.outputs),
                "notes": list(model.notes),
            },
            "tenants": settings.lanes,
            "share_pct": settings.pct,
            "target": layout.target.json,
            "device": layout.device,
            "bound": list(layout.bounds),
            "slices": [
                {
                    "slice_id": s.slice_id,
                    "kind": s.kind,
                    "pct": s.pct,
                    "gpu_uuid": s.gpu_uuid,
                    "cores": list(s.cores),
                    "environment": dict(s.environment),
                    "node_id": node_id,
                }
                for s, node_id in layout.slices
            ],
            "tuners": [to_json(t) for t in layout.tuners],
            "tasks": [
                {"task_id": t.task_id, "name": t.name, "weight": t.weight, "flops": t.flops}
                for t in self.tasks
            ],
            "warm_start": [
                {
                    "folder": str(x.folder),
                    "results": x.results,
                    "tasks": len(x.task_ids),
                    "shared_tasks": len(x.shared(task_ids)),
                    "sentence": x.sentence(task_ids),
                }
                for x in self.warm_starts
            ],
            "trials": settings.trials,
            "budget_secs": settings.budget_secs,
            "estimate_secs": self.estimate_secs,
        }


def plan_run(
    settings: TuneSettings,
    *,
    model: FixedModel | None = None,
    cluster: Cluster | None = None,
    selection: Selection | None = None,
    is_beside_own: bool = False,
) -> RunPlan:
    """Plan a run on this machine, or on a cluster that is open; changes nothing.

    Args:
        is_beside_own: what holds memory of the devices may be this process's other runs.
        model: that of the settings, where it was read before.
        selection: of its tasks.

    Raises HostError where the devices cannot be cut as asked, ModelError or InputError where the
    model, its inputs or a run to learn from cannot be used, and FolderError where the latter is
    damaged.
    """
    _require_module(settings)
    if cluster is None:
        _require_libraries(settings)
    request = settings.slice_request
    if is_beside_own:
        request = replace(request, if_shared="ignore")

    def laid_out(request: SliceRequest) -> Layout:
        if cluster is None:
            return local_layout(settings, request)
        return cluster_layout(settings, cluster, request)

    layout = laid_out(request)
    model = model or read(settings)
    if layout.target.is_cuda:
        needed = tuning_bytes(model)
        if needed > needed_bytes(request):
            layout = laid_out(replace(request, mem_bytes=needed))
    warm_starts = read_warm_starts(
        settings.warm_start,
        out=settings.out,
        target=layout.target,
        slice_kind=settings.slice_kind,
        tenants=model.tenants or 1,
    )
    facts = RunFacts.of(
        settings, model, target=layout.target, device=layout.device, host=host.facts()
    )
    samples = read_samples(settings.inputs, model.inputs, settings.values)
    return RunPlan(settings, model, layout, warm_starts, facts, selection, samples)


def tuning_bytes(model: FixedModel) -> int:
    """Return what a runner comes to hold of a GPU at most, about, when a model is tuned.

    A context with its kernels, the copies of a task's arguments that rotate, and at the end two
    artifacts side by side, the default's and the tuned one's: each with its weights and, between
    its kernels, with no more than that again.
    """
    return _CONTEXT_BYTES + 4 * (model.tenants or 1) * model.graph.weight_bytes()


def _require_module(settings: TuneSettings) -> None:
    if settings.against is not None:
        path, _, function = settings.against.rpartition(":")
        if not Path(path).is_file():
            raise InputError(
                f"--against: there is no file {path}; give the one in which {function}() returns "
                "the torch.nn.Module that the ONNX file was exported from"
            )


def _require_libraries(settings: TuneSettings) -> None:
    for name in settings.libraries:
        if lacking := packages.missing(name):
            raise HostError(f"--libraries {name}: {lacking}")


def read(settings: TuneSettings) -> FixedModel:
    """Read the settings' model, with its shapes fixed."""
    return read_model(
        settings.model,
        shapes=settings.shapes,
        dims=settings.dims,
        batch=settings.batch,
        precision=settings.precision or "",
        io_precision=settings.io_precision or "",
        constants=settings.constants,
        tenants=settings.lanes,
    )
