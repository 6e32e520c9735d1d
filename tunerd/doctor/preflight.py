"""Is this machine quiet enough to measure on? Looked at before a run that nobody watches.

What other programs do on a GPU or its host's cores changes every number of a run, and a nightly
comparison then speaks of them. NVML lists the processes of a GPU, but in a container the list may
be empty or hold pids of another namespace: then memory in use and utilisation decide.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd.doctor.checks import Finding, Status, mps_processes, program_of
from tunerd.slices.gpu_tenants import ALLOWED_BUSY_PCT
from tunerd.slices.mps.control import MPS_SERVER
from tunerd.system import cores, gpus
from tunerd.system.gpus import GpuFacts, GpuState, gpu_state

SAMPLES = 5  # of the utilisation, which NVML averages over a sixth of a second to a second
POLL_SECS = 5.0
TELL_SECS = 30.0


@dataclass(frozen=True)
class Limits:
    """What a quiet machine stays below."""

    load_per_core: float = 0.5
    mem_pct: float = 2.0  # of a GPU's memory: a context takes 0.2 to 1 GiB
    busy_pct: float = ALLOWED_BUSY_PCT  # NVML's utilisation
    is_mps_external: bool = False  # somebody's daemon is to be used


def preflight(
    limits: Limits,
    *,
    with_gpus: bool = True,
    wait_secs: float = 0.0,
    tell: Callable[[Sequence[Finding], float], None] = lambda busy, left_secs: None,
) -> list[Finding]:
    """Look at the machine, again and again until it is quiet or the time is over.

    A finding that fails says that the machine is not quiet; one that warns, what may disturb.

    Args:
        tell: called with what fails and the seconds left, when waiting begins, when what fails
            changes, and every TELL_SECS.
    """
    deadline = time.monotonic() + wait_secs
    told: list[str] = []
    tell_again = 0.0
    while True:
        findings = list(look(limits, with_gpus=with_gpus))
        busy = [finding for finding in findings if finding.status is Status.FAIL]
        now = time.monotonic()
        left = deadline - now
        if left <= 0 or not busy:
            return findings
        names = [finding.name for finding in busy]
        if names != told or now >= tell_again:
            tell(busy, left)
            told, tell_again = names, now + TELL_SECS
        time.sleep(min(POLL_SECS, left))


def look(limits: Limits, *, with_gpus: bool) -> Iterator[Finding]:
    """Yield what is to be said of the machine now."""
    yield of_load(os.getloadavg()[0], os.cpu_count() or 1, limits)
    if not with_gpus:
        return
    found, why = gpus.visible_gpus()
    if not found:
        yield Finding("GPUs", Status.WARN, f"{why}; only the cores were looked at")
        return
    yield of_mps(mps_processes(), limits)
    for gpu in found:
        yield from of_gpu(gpu, gpu_state(gpu.uuid, samples=SAMPLES), limits)


def of_load(load: float, core_count: int, limits: Limits) -> Finding:
    """Judge the load average of the last minute; like the kernel's number, of the whole machine."""
    cores = f"{core_count} core{'s' * (core_count != 1)}"
    fact = f"{load:.2f} on {cores} in the last minute"
    if load / core_count <= limits.load_per_core:
        return Finding("load", Status.OK, fact)
    allowed = limits.load_per_core * core_count
    return Finding(
        "load",
        Status.FAIL,
        f"{fact}, over {allowed:.6g}",
        "end what runs, wait with --wait 10m, or allow more with --max-load",
    )


def of_mps(processes: Sequence[tuple[int, int]], limits: Limits) -> Finding:
    """Judge the MPS daemons and servers of this machine, given by pid and uid."""
    name = "MPS"
    if limits.is_mps_external:
        if processes:
            return Finding(name, Status.OK, "a daemon runs, as --mps external wants")
        return Finding(
            name,
            Status.FAIL,
            "no daemon runs, and --mps external wants one",
            "start it with nvidia-cuda-mps-control -d, or leave --mps out",
        )
    if not processes:
        return Finding(name, Status.OK, "no daemon of anybody")
    who = ", ".join(f"pid {pid} of uid {uid}" for pid, uid in processes)
    if any(program_of(pid) == MPS_SERVER for pid, _ in processes):
        return Finding(
            name,
            Status.FAIL,
            f"an MPS server has clients: {who}",
            "end its clients, or use that daemon with --mps external",
        )
    return Finding(name, Status.WARN, f"a daemon without clients: {who}")


# --- one GPU -----------------------------------------------------------------------------------


def of_gpu(gpu: GpuFacts, state: GpuState, limits: Limits) -> Iterator[Finding]:
    """Judge one GPU."""
    name = f"GPU {gpu.index}"
    yield _of_processes(name, state)
    yield _of_memory(name, gpu, state, limits)
    yield _of_utilisation(name, state, limits)
    yield from _of_clocks(name, state)
    if state.graphics_pids:
        fact = f"graphics processes {_pids(state.graphics_pids)}"
        yield Finding(f"{name} display", Status.WARN, fact)
    if state.is_persistent is False:
        yield Finding(
            f"{name} persistence",
            Status.WARN,
            "off: the driver may unload between two programs, and clocks fall",
            "nvidia-smi -pm 1, or the service nvidia-persistenced",
        )


def _of_processes(name: str, state: GpuState) -> Finding:
    name = f"{name} processes"
    if state.pids is None:
        return Finding(name, Status.WARN, "NVML does not tell; memory and utilisation decide")
    if not state.pids:
        seen = "none that NVML lists"
        if _is_contained():
            seen += "; in a container it may hide others: memory and utilisation decide"
        return Finding(name, Status.OK, seen)
    foreign = [pid for pid in state.pids if not Path(f"/proc/{pid}").exists()]
    fact = f"compute processes {_pids(state.pids)}"
    if foreign:
        fact += f", of which {_pids(foreign)} of another container or of its host"
    return Finding(name, Status.FAIL, fact, "end them, or wait with --wait 10m")


def _of_memory(name: str, gpu: GpuFacts, state: GpuState, limits: Limits) -> Finding:
    used, total = state.mem_used_bytes, gpu.mem_bytes
    if used is None:
        used = gpu.mem_bytes - gpu.mem_free_bytes
    pct = 100 * used / total
    fact = f"{used / (1 << 20):,.0f} MiB in use, {pct:.1f}% of {total / (1 << 30):.0f} GiB"
    if pct <= limits.mem_pct:
        return Finding(f"{name} memory", Status.OK, fact)
    return Finding(
        f"{name} memory",
        Status.FAIL,
        f"{fact}, over {limits.mem_pct:g}%",
        "somebody holds it, perhaps in another container; allow more with --max-mem-pct",
    )


def _of_utilisation(name: str, state: GpuState, limits: Limits) -> Finding:
    name = f"{name} utilisation"
    if state.busy_pct is None:
        return Finding(name, Status.WARN, "NVML does not tell")
    fact = f"{state.busy_pct}%"
    if state.busy_pct <= limits.busy_pct:
        return Finding(name, Status.OK, fact)
    return Finding(
        name,
        Status.FAIL,
        f"{fact}, over {limits.busy_pct:g}%",
        "somebody computes, perhaps in another container; wait with --wait 10m",
    )


def _of_clocks(name: str, state: GpuState) -> Iterator[Finding]:
    if state.clock_reasons is None:
        return
    if state.slowdowns:
        yield Finding(
            f"{name} clocks",
            Status.FAIL,
            ", ".join(state.slowdowns),
            "let it cool down, and look at its power and fans: nvidia-smi -q -d PERFORMANCE",
        )
    elif state.is_power_capped:
        yield Finding(f"{name} clocks", Status.WARN, "held down by the power limit")
    else:
        yield Finding(f"{name} clocks", Status.OK, "nothing slows them down")


def _pids(pids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pids[:8]))
    return shown + (f" and {len(pids) - 8} more" if len(pids) > 8 else "")


def _is_contained() -> bool:
    """Say whether this process has a pid namespace or root of its own, as far as it can be told."""
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        return True
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return True
    words = ("docker", "kubepods", "containerd", "lxc")
    return any(word in line for line in cores.own_cgroups() for word in words)
