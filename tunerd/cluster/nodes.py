"""The machines of a run: what each says of itself, which slices it gets, and which tuners.

A *node* is what Ray calls one; a *host* is a machine. Several nodes of one host (raylets, or
containers) see the same cores and GPUs, so each device of a host is cut by one of its nodes only.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunerd.errors import HostError
from tunerd.slices import plan
from tunerd.slices.base import Plan
from tunerd.system import host
from tunerd.system.without_torch import keep_torch_from_tvm
from tunerd.vocabulary import SliceRequest, SliceSpec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Survey:
    """What a node says of itself: the machine, and how it would be cut."""

    hostname: str
    boot_id: str  # the same in all containers of a machine
    cores: int  # that a process of the node can keep busy
    device: str  # what the slices' proofs will name
    plan: Plan
    is_open: bool = False  # whether Ray there asks for no token


@dataclass(frozen=True)
class Node:
    """One node. `node_id` is Ray's, None on this machine without a cluster."""

    node_id: str | None
    cpus: int  # that Ray hands out
    survey: Survey
    is_here: bool  # shares the driver's files
    is_driver: bool = False  # the run ends with it
    kept: tuple[SliceSpec, ...] | None = None  # by cut_beside; None: not cut yet

    @property
    def slices(self) -> tuple[SliceSpec, ...]:
        return self.survey.plan.slices if self.kept is None else self.kept


@dataclass(frozen=True)
class TunerSpec:
    """A tuner as planned: the CPUs that it holds, and the cores that it is pinned to."""

    tuner_id: str
    cpus: int
    cores: tuple[int, ...] = ()
    lane: str | None = None
    node_id: str | None = None


def survey_here(request: SliceRequest) -> Survey:
    """Survey this machine for slices. Creates no CUDA context."""
    keep_torch_from_tvm()
    facts = host.facts()
    if request.kind == "simulated":
        device = "simulated device"
    elif request.kind == "cpu":
        device = facts.cpu_model
    else:
        device = facts.gpus[0].name if facts.gpus else ""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else facts.hostname
    # Ray's daemons hand the mode they were started with to their workers, and no other one.
    is_open = os.environ.get("RAY_AUTH_MODE", "").lower() in ("", "disabled")
    return Survey(facts.hostname, boot_id, facts.usable_cores, device, plan(request), is_open)


def cut_once(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with each core and GPU of a host in the slices of one of its nodes only.

    The driver's node comes first, then those of its host, then Ray's order. Ids and lanes are made
    distinct: they are numbered by host alone.
    """
    ordered = sorted(nodes, key=lambda n: (not n.is_driver, not n.is_here))
    several = sum(bool(n.slices) for n in ordered) > 1
    found: list[Node] = []
    for number, node in enumerate(ordered):
        found.append(cut_beside(node, found, number=number if several else None))
    return found


def cut_beside(node: Node, others: Iterable[Node], *, number: int | None) -> Node:
    """Return a node with what it keeps, and what it can have that no other node of its host has.

    number: that the slices get in their names, None to leave them as they are.
    """
    taken = {
        part
        for other in (*others, node)
        if other.survey.boot_id == node.survey.boot_id and (other is not node or node.kept)
        for spec in other.slices
        for part in _parts(spec)
    }
    free = tuple(s for s in node.survey.plan.slices if not _parts(s) & taken)
    if number is not None:
        free = tuple(_numbered(s, number) for s in free)
    return replace(node, kept=(node.kept or ()) + free)


def plan_tuners(nodes: Sequence[Node], wanted: int | None) -> list[TunerSpec]:
    """Plan the search and build processes of nodes that `cut_once` returned."""
    specs: list[TunerSpec] = []
    for number, node in enumerate(nodes):
        specs += tuners_beside(node, number, nodes, specs)
    if not specs:
        raise HostError("no node has a CPU for a tuner; start Ray's nodes with --num-cpus")
    if wanted is not None and wanted > len(specs):
        raise HostError(
            f"--tuners {wanted} is more than the {len(specs)} that fit the cores; give fewer"
        )
    return specs[:wanted]


def tuners_beside(
    node: Node, number: int, nodes: Iterable[Node], planned: Iterable[TunerSpec]
) -> list[TunerSpec]:
    """Plan the tuners that a node can have beside those that are planned.

    On a host with CPU slices each lane gets one, on its cores, and no other core works. On other
    hosts each CPU gets one, and nodes of one host share its cores. Runners and the driver need
    little of a core and get it at once: tuners there have a lower priority.
    """
    planned = list(planned)
    own = [t for t in planned if t.node_id == node.node_id]
    host_nodes = [n for n in (node, *nodes) if n.survey.boot_id == node.survey.boot_id]
    if any(s.lane for n in host_nodes for s in n.slices):
        lanes = [s for s in node.slices if s.lane is not None]
        _require_cpus(node, lanes)
        tuned = {t.lane for t in own}
        new = [(len(s.cores), s.cores, s.lane) for s in lanes if s.lane not in tuned]
    else:
        node_ids = {n.node_id for n in host_nodes}
        left = node.survey.cores - sum(t.cpus for t in planned if t.node_id in node_ids)
        free = node.cpus - sum(t.cpus for t in own)
        new = [(1, (), None)] * min(free, left)
    return [
        TunerSpec(f"tuner-{number}-{i}", *one, node_id=node.node_id)
        for i, one in enumerate(new, len(own))
    ]


def is_on(spec: SliceSpec, gpu_ids: Sequence[str]) -> bool:
    """Whether the GPU that Ray gave an actor is the one that a slice was planned on.

    Args:
        gpu_ids: as `ray.get_gpu_ids()` has them: an index, or what the raylet's
            CUDA_VISIBLE_DEVICES says, which may be a UUID or the beginning of one.
    """
    if spec.gpu_uuid is None or not gpu_ids:
        return True
    given = gpu_ids[0]
    if given.isdecimal():
        return int(given) == spec.device_index
    return spec.gpu_uuid.startswith(given)


def match_slices(
    free: Collection[tuple[str | None, tuple[str, ...]]],
    waiting: Iterable[tuple[SliceSpec, str | None]],
) -> tuple[list[SliceSpec | None], list[tuple[SliceSpec, str | None]]]:
    """Give each actor, by (node, GPU ids), a slice planned on that GPU of that node.

    Returns:
        a slice or None for each actor, and the slices that are still waiting.
    """
    left = list(waiting)
    chosen: list[SliceSpec | None] = []
    for node_id, gpu_ids in free:
        fits = (w for w in left if w[1] == node_id and is_on(w[0], gpu_ids))
        found = next(fits, None)
        if found is not None:
            left.remove(found)
        chosen.append(found[0] if found else None)
    return chosen, left


def _parts(spec: SliceSpec) -> set[str]:
    """Name what a slice takes of its host. Slices of one plan may share a GPU."""
    if spec.gpu_uuid is not None:
        return {spec.gpu_uuid}
    if spec.cores:
        return {f"core {core}" for core in spec.cores}
    return {f"{spec.kind} {spec.device_index}"}


def _numbered(spec: SliceSpec, number: int) -> SliceSpec:
    lane = None if spec.lane is None else f"n{number}-{spec.lane}"
    return replace(spec, slice_id=f"n{number}-{spec.slice_id}", lane=lane)


def _require_cpus(node: Node, lanes: Sequence[SliceSpec]) -> None:
    needed = sum(len(s.cores) for s in lanes)
    if needed > node.cpus:
        raise HostError(
            f"the slices of {node.survey.hostname} take {needed} cores, and its Ray node has "
            f"{node.cpus} CPUs; start it with --num-cpus={needed}, or ask for fewer slices"
        )
