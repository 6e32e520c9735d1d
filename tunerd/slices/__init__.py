"""Where a trial runs: mps (capped shares of a GPU), whole GPUs, cpu (sets of cores), simulated."""

from __future__ import annotations

from tunerd.slices.base import Plan, Slice


def member(kind: str) -> type[Slice]:
    """Return the slice class of a kind; KeyError for an unknown one."""
    from tunerd.slices.cpu import CpuSlice
    from tunerd.slices.mps.mps_slice import MpsSlice
    from tunerd.slices.simulated import SimulatedSlice
    from tunerd.slices.whole import WholeSlice

    return {m.kind: m for m in (MpsSlice, WholeSlice, CpuSlice, SimulatedSlice)}[kind]


def plan(kind: str, pct: int, per_device: int | None = None, *, external: bool = False) -> Plan:
    """Plan this host's slices of a kind; `external` uses the MPS daemon that is there."""
    if kind == "mps":
        from tunerd.slices.mps.mps_slice import MpsSlice

        return MpsSlice.plan(pct, per_device, external=external)
    return member(kind).plan(pct, per_device)
