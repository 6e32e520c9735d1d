"""What a run is going to do: model, slices, tuners, tasks. A dry run prints it, a run does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.cluster.nodes import Node, TunerSpec, cut_once, plan_tuners, survey_here
from tunerd.errors import HostError
from tunerd.frontend.model import FixedModel, read_model
from tunerd.records import RunFacts
from tunerd.runs.folder import require_free
from tunerd.runs.warm_start import WarmStart, read_warm_starts
from tunerd.settings import TuneSettings
from tunerd.slices.neighbors import require_neighbours
from tunerd.vocabulary import Model, SliceSpec, TargetSpec, Task, to_json

if TYPE_CHECKING:
    from tunerd.cluster.ray_cluster import Cluster

# Seconds of one core for a proposed and built trial, and of a slice for its measurement; measured
# once on each kind of host and good for an estimate only.
_CORE_SECS_PER_TRIAL = {"llvm": 0.15, "cuda": 0.6}
_SLICE_SECS_PER_TRIAL = {"llvm": 0.06, "cuda": 0.06}
_FIXED_SECS = {"llvm": 60.0, "cuda": 60.0}  # start-up, finalists, artifact, verification


@dataclass(frozen=True)
class Layout:
    """Where the run's workers go."""

    target: TargetSpec
    device: str
    slices: tuple[tuple[SliceSpec, str | None], ...]  # with the node that each is bound to
    tuners: tuple[TunerSpec, ...]
    bounds: tuple[str, ...]
    nodes: tuple[Node, ...]
    is_lockstep: bool  # workers take turns, so that a seed repeats a run exactly


def read(settings: TuneSettings) -> FixedModel:
    """Read the settings' model, with its shapes fixed."""
    return read_model(
        settings.model, shapes=settings.shapes, dims=settings.dims, batch=settings.batch
    )


def local_layout(settings: TuneSettings) -> Layout:
    """Plan slices and tuners on this machine; HostError where it cannot do what is asked."""
    here = survey_here(
        settings.slice_kind, settings.pct, settings.slices, external=settings.mps == "external"
    )
    return layout_of([Node(None, here.cores, here, is_here=True)], settings)


def cluster_layout(settings: TuneSettings, cluster: Cluster) -> Layout:
    """Plan slices and tuners on a cluster's nodes; HostError where they cannot do what is asked."""
    nodes = cluster.nodes(
        settings.slice_kind, settings.pct, settings.slices, external=settings.mps == "external"
    )
    return layout_of(nodes, settings)


def open_cluster(layout: Layout) -> str:
    """Return the sentence of a warning where a run has joined a cluster that asks for no token."""
    names = sorted({n.survey.hostname for n in layout.nodes if n.node_id and n.survey.is_open})
    if not names:
        return ""
    return (
        f"Ray asks for no token on {', '.join(names)}: whoever reaches it there runs code as its "
        "user; start the cluster again with RAY_AUTH_MODE=token and a secret in RAY_AUTH_TOKEN, "
        "the same everywhere"
    )


def layout_of(nodes: Sequence[Node], settings: TuneSettings) -> Layout:
    """Join the plans of nodes; those without slices still search and build."""
    nodes = cut_once(nodes)
    with_slices = [n for n in nodes if n.slices]
    if not with_slices:
        if len(nodes) == 1:
            raise HostError(nodes[0].survey.plan.problem)
        problems = sorted({f"{n.survey.hostname}: {n.survey.plan.problem}" for n in nodes})
        raise HostError("; ".join(problems) or "the cluster has no node")
    devices = {(n.survey.device, n.survey.plan.target.json) for n in with_slices}
    if len(devices) > 1:
        raise HostError(
            "the nodes differ in their devices, and a model is tuned for one: "
            + "; ".join(f"{device} ({target})" for device, target in sorted(devices))
        )
    first = with_slices[0].survey
    slices = tuple((s, n.node_id) for n in with_slices for s in n.slices)
    require_neighbours(slices, settings.neighbours)
    tuners = plan_tuners(nodes, settings.tuners)
    return Layout(
        target=first.plan.target,
        device=first.device,
        slices=slices,
        tuners=tuple(tuners),
        bounds=tuple(n.survey.plan.bound for n in with_slices),
        nodes=tuple(nodes),
        is_lockstep=len(tuners) == 1 and all(s.kind == "simulated" for s, _ in slices),
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
                "tasks": len(x.lessons),
                "shared_tasks": len(x.shared(task_ids)),
                "sentence": x.sentence(task_ids),
            }
            for x in earlier
        ],
        "trials": settings.trials,
        "budget_secs": settings.budget_secs,
        "estimate_secs": estimate_secs(settings, layout),
    }
