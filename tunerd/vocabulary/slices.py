"""A slice as planned, and what it obtained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SliceSpec:
    """A share of a device, as planned. `environment` is exactly what its runner adds to its own."""

    slice_id: str  # "mps-0-1": kind, device index, position on the device
    kind: str  # "mps", "cpu", "whole", "simulated"
    pct: int  # of the device, 1..100
    device_index: int = 0
    gpu_uuid: str | None = None
    cores: tuple[int, ...] = ()  # for cpu slices: the cores that the runner is pinned to
    lane: str | None = None  # workers of one lane share cores: one of them works at a time
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CapProof:
    """What a slice obtained, read inside its client before the first measurement."""

    slice_id: str
    device: str  # GPU or CPU model
    sm_count: int  # SMs that the client sees; cores on CPUs
    device_sm_count: int  # SMs (or cores) of the whole device
    mechanism: str  # "mps", "affinity", "none", "simulated"
    attached: bool  # the client is in the MPS server's list; true where none is needed
    driver: str = ""
    compute_capability: str = ""  # "9.0"
    runner_pid: int = 0
