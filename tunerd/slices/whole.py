"""A slice that is a whole GPU: no sharing, the baseline."""

from __future__ import annotations

from typing import Any

from tunerd.errors import HostError
from tunerd.slices import gpu_tenants, room
from tunerd.slices.base import Plan, Usability
from tunerd.slices.child import ChildSlice
from tunerd.slices.gpu_tenants import Own
from tunerd.slices.mps.guard_client import private_folder
from tunerd.slices.mps.mps_slice import (
    beside_others,
    device_sms,
    missing_for_gpu,
    obtained,
)
from tunerd.system import host, targets
from tunerd.system.gpus import GpuFacts
from tunerd.system.host import HostFacts
from tunerd.vocabulary import CapProof, Conditions, SliceRequest, SliceSpec, TargetSpec


class WholeSlice(ChildSlice):
    """One GPU without MPS. Its runner is a child: there is no neighbour that its end could hurt."""

    kind = "whole"

    @classmethod
    def usability(cls) -> Usability:
        facts = host.facts()
        missing = missing_for_gpu(facts)
        return Usability(not missing, missing or f"{len(facts.gpus)} GPU(s)")

    @classmethod
    def plan(cls, request: SliceRequest) -> Plan:
        facts = host.facts()
        return beside_others(plan_for(facts, request), facts, request)

    def arguments(self) -> tuple[str, ...]:
        return ("--device", "cuda")

    def conditions(self, *, idle: bool = False) -> Conditions:
        return gpu_tenants.conditions(self.spec.gpu_uuid or "", self._own, idle=idle)

    def _own(self) -> Own | None:
        if self._process is None:
            return None
        return Own(frozenset({self._process.pid}), runners=1)

    def check(self, facts: dict[str, Any]) -> CapProof:
        return proof_of(self.spec, facts)


def plan_for(facts: HostFacts, request: SliceRequest) -> Plan:
    """Plan one slice for each GPU of a host, from its facts alone."""
    missing = missing_for_gpu(facts)
    if missing:
        return Plan((), TargetSpec("cuda", "{}"), "", problem=missing)
    first = facts.gpus[0]
    target = targets.cuda_target(first.compute_capability, l2_bytes=first.l2_bytes)
    bound = "a whole slice is 100% of its GPU: one for each"
    problem = ""
    if request.pct != 100:
        problem = (
            f"{request.pct}% of a GPU is no whole one; give --gpu-pct 100, or slices of the kind "
            "mps"
        )
    elif request.per_device is not None and request.per_device > 1:
        problem = f"{request.per_device} slices per GPU do not fit: {bound}"
    problem = problem or room.refusal(facts.gpus, request)
    least, needed = min(room.room_bytes(g, request) for g in facts.gpus), room.needed_bytes(request)
    if not problem and request.if_shared != "ignore" and least < needed:
        problem = (
            f"a run needs {needed / (1 << 30):.1f} GiB of a GPU, and others leave "
            f"{least / (1 << 30):.1f} GiB; end them, or choose another with CUDA_VISIBLE_DEVICES"
        )
    if problem:
        return Plan((), target, bound, problem=problem)
    slices = tuple(whole_spec(gpu, f"whole-{gpu.index}-0") for gpu in facts.gpus)
    return Plan(slices, target, bound)


def whole_spec(gpu: GpuFacts, slice_id: str) -> SliceSpec:
    """Return a slice that is all of a GPU, without MPS."""
    return SliceSpec(
        slice_id=slice_id,
        kind="whole",
        pct=100,
        device_index=gpu.index,
        gpu_uuid=gpu.uuid,
        # A folder without a daemon: a client that finds none runs without MPS (man page).
        environment=(
            ("CUDA_MPS_PIPE_DIRECTORY", str(private_folder() / "no-mps")),
            ("CUDA_VISIBLE_DEVICES", gpu.uuid),
        ),
    )


def proof_of(spec: SliceSpec, facts: dict[str, Any]) -> CapProof:
    """Check that a runner sees all SMs of its GPU and no MPS; raises HostError otherwise."""
    sm_count = int(facts["sm_count"])
    device_sm_count = device_sms(spec, facts) or sm_count
    if sm_count != device_sm_count or facts["mps_enabled"]:
        raise HostError(
            f"the slice {spec.slice_id} sees {sm_count} of {device_sm_count} SMs"
            f"{' through MPS' if facts['mps_enabled'] else ''}, where a whole GPU was asked for;"
            " stop what limits it, or unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
        )
    return obtained(facts, spec, mechanism="none", device_sm_count=device_sm_count)
