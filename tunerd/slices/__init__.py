"""Where a trial runs: mps (capped shares of a GPU), whole GPUs, cpu (sets of cores), simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunerd.errors import HostError
from tunerd.vocabulary import SliceRequest, TargetSpec

if TYPE_CHECKING:  # a guard needs neither runners nor NumPy
    from tunerd.slices.base import Plan, Slice


def member(kind: str) -> type[Slice]:
    """Return the slice class of a kind; KeyError for an unknown one."""
    from tunerd.slices.cpu import CpuSlice
    from tunerd.slices.mps.mps_slice import MpsSlice
    from tunerd.slices.simulated import SimulatedSlice
    from tunerd.slices.whole import WholeSlice

    return {m.kind: m for m in (MpsSlice, WholeSlice, CpuSlice, SimulatedSlice)}[kind]


def plan(request: SliceRequest) -> Plan:
    """Cut this host's devices into the slices that are asked for, if it can have such slices."""
    from tunerd.slices.base import Plan

    usable = member(request.kind).usability()
    if usable.ok:
        return member(request.kind).plan(request)
    problem = f"no {request.kind} slices here: {usable.why}"
    return Plan((), TargetSpec("llvm", "{}"), "", problem=problem)


def require_plan(request: SliceRequest) -> Plan:
    """Cut this host's devices as `plan` does; HostError where they cannot be cut so."""
    planned = plan(request)
    if planned.problem:
        raise HostError(planned.problem)
    return planned
