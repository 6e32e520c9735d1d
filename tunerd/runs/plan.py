"""What a run is going to do: model, slices, tuners, tasks. A dry run prints it, a run does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunerd.cluster.layout import Layout
from tunerd.frontend.model import FixedModel, read_model
from tunerd.records import RunFacts
from tunerd.runs.folder import require_free
from tunerd.runs.warm_start import WarmStart, read_warm_starts
from tunerd.settings import TuneSettings
from tunerd.vocabulary import Model, Task, to_json

if TYPE_CHECKING:
    pass

# Seconds of one core for a proposed and built trial, and of a slice for its measurement; measured
# once on each kind of host and good for an estimate only.
_CORE_SECS_PER_TRIAL = {"llvm": 0.15, "cuda": 0.6}
_SLICE_SECS_PER_TRIAL = {"llvm": 0.06, "cuda": 0.06}
_FIXED_SECS = {"llvm": 60.0, "cuda": 60.0}  # start-up, finalists, artifact, verification


def read(settings: TuneSettings) -> FixedModel:
    """Read the settings' model, with its shapes fixed."""
    return read_model(
        settings.model, shapes=settings.shapes, dims=settings.dims, batch=settings.batch
    )


def require_folder(settings: TuneSettings, model: Model | FixedModel, layout: Layout) -> None:
    """Raise FolderError where the settings' folder is not this run's to begin or go on in."""
    facts = RunFacts.of(settings, model, target=layout.target, device=layout.device, host={})
    require_free(settings.out, facts)


def warm_starts(settings: TuneSettings, layout: Layout) -> tuple[WarmStart, ...]:
    """Read the runs that the settings name; InputError or FolderError where one cannot teach."""
    return read_warm_starts(
        settings.warm_start,
        out=settings.out,
        target=layout.target,
        slice_kind=settings.slice_kind,
    )


def estimate_secs(settings: TuneSettings, layout: Layout) -> float | None:
    """Estimate the run's time from its trials, or None where they are not limited."""
    kind = layout.target.kind
    if settings.trials is None:
        return None if settings.budget_secs is None else settings.budget_secs + _FIXED_SECS[kind]
    cores = sum(t.cpus for t in layout.tuners)
    building = settings.trials * _CORE_SECS_PER_TRIAL[kind] / cores
    measuring = settings.trials * _SLICE_SECS_PER_TRIAL[kind] / len(layout.slices)
    shares_cores = any(s.lane is not None for s, _ in layout.slices)
    work = building + measuring if shares_cores else max(building, measuring)
    return min(work, settings.budget_secs or work) + _FIXED_SECS[kind]


def describe(
    settings: TuneSettings,
    model: Model,
    layout: Layout,
    tasks: Sequence[Task],
    earlier: Sequence[WarmStart] = (),
) -> dict[str, Any]:
    """Return what a run of these values would do, for --dry-run."""
    task_ids = {t.task_id for t in tasks}
    return {
        "out": str(settings.out),
        "model": {
            "name": model.name,
            "digest": model.digest,
            "inputs": to_json(model.inputs),
            "outputs": to_json(model.outputs),
            "notes": list(model.notes),
        },
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
            for t in tasks
        ],
        "warm_start": [
            {
                "folder": str(x.folder),
                "results": x.results,
                "tasks": len(x.transferred),
                "shared_tasks": len(x.shared(task_ids)),
                "sentence": x.sentence(task_ids),
            }
            for x in earlier
        ],
        "trials": settings.trials,
        "budget_secs": settings.budget_secs,
        "estimate_secs": estimate_secs(settings, layout),
    }
