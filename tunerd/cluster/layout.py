"""Where a run's workers go: the slices and tuners of its nodes, as planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunerd.cluster.nodes import Node, TunerSpec, cut_once, plan_tuners, survey_here
from tunerd.errors import HostError
from tunerd.settings import TuneSettings
from tunerd.slices.neighbors import require_neighbours
from tunerd.vocabulary import SliceRequest, SliceSpec, TargetSpec

if TYPE_CHECKING:
    from tunerd.cluster.ray_cluster import Cluster


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


def local_layout(settings: TuneSettings, request: SliceRequest | None = None) -> Layout:
    """Plan slices and tuners on this machine; HostError where it cannot do what is asked.

    request: instead of the settings' own.
    """
    here = survey_here(request or settings.slice_request)
    return layout_of([Node(None, here.cores, here, is_here=True)], settings)


def cluster_layout(
    settings: TuneSettings, cluster: Cluster, request: SliceRequest | None = None
) -> Layout:
    """Plan slices and tuners on a cluster's nodes; HostError where they cannot do what is asked."""
    return layout_of(cluster.nodes(request or settings.slice_request), settings)


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


def costs_to_others(layout: Layout) -> str:
    """Return what the slices may cost who else uses their GPUs, "" where nobody does."""
    several = len(layout.nodes) > 1
    return " ".join(
        f"{node.survey.hostname}: {note}" if several else note
        for node in layout.nodes
        if (note := node.survey.plan.note)
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
