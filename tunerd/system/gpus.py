"""One GPU at one moment, as NVML tells it: who is on it, what is in use, what slows it down."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tunerd.system import host

SAMPLE_SECS = 0.2
# NVML's nvmlClocksEventReasons that make a GPU slower than its clocks were set to.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "hot: software thermal slowdown",
    0x40: "hot: hardware thermal slowdown",
    0x80: "power brake",
}
_POWER_CAP = 0x04  # of software: the board's power limit


@dataclass(frozen=True)
class GpuState:
    """What NVML says of one GPU. None: it does not tell, or was not asked."""

    pids: tuple[int, ...] | None  # of compute processes, those through MPS included
    graphics_pids: tuple[int, ...] | None
    mem_used_bytes: int | None  # without what the driver reserves, where NVML tells them apart
    mem_bytes: int | None
    busy_pct: int | None  # utilisation, the highest of some samples
    clock_reasons: int | None
    is_persistent: bool | None

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """What holds the clocks down, in words; the power limit of the board is none."""
        return tuple(word for bit, word in _SLOWDOWNS.items() if (self.clock_reasons or 0) & bit)

    @property
    def is_power_capped(self) -> bool:
        return bool((self.clock_reasons or 0) & _POWER_CAP)


def gpu_state(gpu_uuid: str, *, samples: int = 0) -> GpuState:
    """Ask NVML, in some milliseconds, and SAMPLE_SECS between samples of the utilisation.

    Never raises: without a driver nothing is told.
    """
    nvml, _ = host.nvml_library()
    memory = host.ask_gpu(
        gpu_uuid, "nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None)
    ) or host.ask_gpu(gpu_uuid, "nvmlDeviceGetMemoryInfo")
    reasons = host.ask_gpu(gpu_uuid, "nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = host.ask_gpu(gpu_uuid, "nvmlDeviceGetCurrentClocksThrottleReasons")
    persistent = host.ask_gpu(gpu_uuid, "nvmlDeviceGetPersistenceMode")
    return GpuState(
        pids=_pids(
            gpu_uuid,
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetMPSComputeRunningProcesses",
        ),
        graphics_pids=_pids(gpu_uuid, "nvmlDeviceGetGraphicsRunningProcesses"),
        mem_used_bytes=memory.used if memory else None,
        mem_bytes=memory.total if memory else None,
        busy_pct=busy_pct(gpu_uuid, samples=samples),
        clock_reasons=reasons,
        is_persistent=None if persistent is None else bool(persistent),
    )


def busy_pct(gpu_uuid: str, *, samples: int = 1) -> int | None:
    """Return the highest of some samples of a GPU's utilisation, of which NVML makes averages."""
    found = []
    for number in range(samples):
        if number:
            time.sleep(SAMPLE_SECS)
        if (rates := host.ask_gpu(gpu_uuid, "nvmlDeviceGetUtilizationRates")) is not None:
            found.append(int(rates.gpu))
    return max(found, default=None)


def _pids(gpu_uuid: str, *functions: str) -> tuple[int, ...] | None:
    lists = [found for f in functions if (found := host.ask_gpu(gpu_uuid, f)) is not None]
    return tuple(sorted({p.pid for each in lists for p in each})) if lists else None
