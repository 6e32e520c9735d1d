"""A share, the slices that are asked for, a slice as planned, and what it obtained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

Mps = Literal["own", "external"]  # whose MPS daemon: one of our own, or the one that is there
IfShared = Literal["narrow", "refuse", "ignore"]  # `settings.TuneSettings.if_shared`


def unit_name(kind: str, count: int | None = None) -> str:
    """Return what a share is counted in: "SMs" or "cores", of one "SM" or "core".

    Args:
        kind: of a share, a slice or a target.
    """
    name = "core" if kind in ("cpu", "llvm") else "SM"
    return name if count == 1 else f"{name}s"


@dataclass(frozen=True)
class Share:
    """A percentage of a device."""

    unit: Literal["gpu", "cpu"]
    pct: int  # 1..100

    @property
    def label(self) -> str:
        """What names it in folders and tables: "gpu40"."""
        return f"{self.unit}{self.pct}"

    @property
    def unit_name(self) -> str:
        return unit_name(self.unit)


@dataclass(frozen=True)
class SliceRequest:
    """What slices every device is to be cut into."""

    kind: str  # "mps", "cpu", "whole", "simulated"
    pct: int  # of a device in each slice, 1..100
    _: KW_ONLY
    per_device: int | None = None  # as many as fit where it is None
    mps: Mps = "own"
    mem_bytes: int = 0  # that the runner of a slice may come to hold, where it is known
    if_shared: IfShared = "ignore"  # what is done where others hold memory of a GPU


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
    mps: Mps = "own"  # of slices of kind mps

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return what `to_json` made a document of; raises LookupError, TypeError or ValueError."""
        environment = tuple((str(name), str(value)) for name, value in document["environment"])
        cores = tuple(int(core) for core in document["cores"])
        return cls(**dict(document) | {"environment": environment, "cores": cores})


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
