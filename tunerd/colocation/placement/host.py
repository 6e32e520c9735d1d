"""One machine: its devices, and the programs that were placed on them. Creates no CUDA context."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunerd.colocation.placement.job_file import GIB, CoresChoice, DevicesChoice, SimulatedChoice
from tunerd.colocation.placement.keeper import STOP_SECS
from tunerd.colocation.placement.values import Device
from tunerd.errors import HostError
from tunerd.slices.mps.control import clean_environment
from tunerd.system import cores, gpus, host
from tunerd.system.mig import mig_instances
from tunerd.system.processes import ProcessId, has_variable
from tunerd.system.spawn import python_path

_MARK = "TUNERD_PLACED"  # in the environment of a job and of all that it starts
_TAIL_BYTES = 4096
_CLOSE_SECS = 2 * STOP_SECS + 10.0


@dataclass(frozen=True)
class Found:
    """A device of a machine. model: what pairs were measured on, where they were on this one."""

    device: Device
    model: str
    uuid: str = ""  # of a GPU or an instance
    cores: tuple[int, ...] = ()
    is_instance: bool = False  # of MIG


@dataclass(frozen=True)
class Seen:
    """What a job is seen to hold, and how many units to keep busy; None where nobody tells."""

    memory_bytes: int | None
    units: float | None


@dataclass(frozen=True)
class Ended:
    job: str
    status: int
    tail: str  # of what it printed


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    found: Found
    log: Path
    mark: str
    busy: tuple[float, float] | None = field(default=None)  # a moment, and CPU seconds until then


def devices_here(choice: DevicesChoice) -> tuple[Found, ...]:
    """Return the devices of this machine; none is an answer, too."""
    if isinstance(choice, SimulatedChoice):
        size = int(choice.memory_gib * GIB)
        return tuple(
            Found(Device(f"simulated-{nth}", size, choice.units), "simulated")
            for nth in range(choice.simulated)
        )
    if isinstance(choice, CoresChoice):
        own = host.facts()
        all_cores, count = own.cores, choice.cores
        if count > len(all_cores):
            raise HostError(
                f"{own.hostname} has {len(all_cores)} cores, which are not {count} devices; give "
                "fewer `cores`"
            )
        size = cores.memory_bytes() // count
        parts = [
            tuple(all_cores[nth * len(all_cores) // count : (nth + 1) * len(all_cores) // count])
            for nth in range(count)
        ]
        return tuple(
            Found(Device(f"cores-{nth}", size, len(part)), own.cpu_model, cores=part)
            for nth, part in enumerate(parts)
        )
    found = [
        Found(Device(f"gpu-{gpu.index}", gpu.mem_free_bytes, gpu.sm_count or 1), gpu.name, gpu.uuid)
        for gpu in gpus.visible_gpus()[0]
        if not gpu.mig
    ]
    found += [
        Found(
            Device(f"mig-{nth}", one.mem_free_bytes, one.sm_count), one.name, one.uuid,
            is_instance=True,
        )
        for nth, one in enumerate(mig_instances())
    ]  # fmt: skip
    return tuple(found)


class Host:
    """Runs programs on the devices of this machine. close() ends them, and is idempotent."""

    def __init__(self, choice: DevicesChoice) -> None:
        self._found = {one.device.name: one for one in devices_here(choice)}
        self._running: dict[str, _Running] = {}
        self._token = secrets.token_hex(8)
        self._started = 0

    def devices(self) -> tuple[str, tuple[Found, ...]]:
        """Return the machine's name and its devices."""
        return host.facts().hostname, tuple(self._found.values())

    def start(self, job: str, words: Sequence[str], device: str, folder: Path, log: Path) -> None:
        """Start a program on a device; `ended` says what became of it.

        Args:
            words: the program and its arguments.
            folder: in which it runs.
            log: gets what it prints.

        Raises HostError where that cannot be: a folder that is not there.
        """
        found = self._found[device]
        self._started += 1
        mark = f"{self._token}-{self._started}"
        environment = {k: v for k, v in clean_environment().items() if not k.startswith("RAY_")}
        environment |= {"PYTHONPATH": python_path(), _MARK: mark}
        if found.uuid:
            environment["CUDA_VISIBLE_DEVICES"] = found.uuid
        module = "tunerd.colocation.placement.keeper"
        argv = [sys.executable, "-m", module, ",".join(map(str, found.cores)), *words]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = subprocess.Popen(
                    argv, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,  # Ctrl-C is for us alone
                )  # fmt: skip
        except OSError as error:
            name = host.facts().hostname
            raise HostError(
                f"{job} cannot be started on {name}: {error.filename}: {error.strerror}; the "
                "folder of the jobs and that of the results have to be there"
            ) from None
        self._running[job] = _Running(process, found, log, mark)

    def ended(self) -> list[Ended]:
        """Return the programs that ended since the last call."""
        over = [(n, r) for n, r in self._running.items() if r.process.poll() is not None]
        for name, _ in over:
            del self._running[name]
        return [Ended(name, r.process.returncode, _tail(r.log)) for name, r in over]

    def seen(self) -> dict[str, Seen]:
        """Return what running jobs are seen to take, by name."""
        beside: dict[str, int] = {}
        for running in self._running.values():
            name = running.found.device.name
            beside[name] = beside.get(name, 0) + 1
        return {
            job: self._seen(running, beside[running.found.device.name])
            for job, running in self._running.items()
        }

    def _seen(self, running: _Running, count: int) -> Seen:
        """count: of the jobs on its device, which share what the device says of itself."""
        uuid, units = running.found.uuid, running.found.device.units
        if uuid:
            pct = gpus.busy_pct(uuid)
            busy = None if pct is None else pct / 100 * units / count
            return Seen(_gpu_bytes(uuid, running.mark), busy)
        if running.found.cores:
            return _on_cores(running)
        return Seen(None, None)

    def close(self) -> None:
        """End what runs, in order."""
        running, self._running = list(self._running.values()), {}
        for each in running:
            assert each.process.stdin is not None
            with contextlib.suppress(OSError):
                each.process.stdin.close()
        for each in running:
            try:
                each.process.wait(_CLOSE_SECS)
            except subprocess.TimeoutExpired:
                each.process.kill()


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def _gpu_bytes(uuid: str, mark: str) -> int | None:
    """Return what the processes with a mark hold of a GPU; None where NVML does not say."""
    found = [
        size
        for pid, size in gpus.process_bytes(uuid).items()
        if (own := ProcessId.of(pid)) is not None and has_variable(own, _MARK, mark)
    ]
    return sum(found) if found else None


def _on_cores(running: _Running) -> Seen:
    import psutil

    memory, spent = 0, 0.0
    with contextlib.suppress(psutil.Error):
        keeper = psutil.Process(running.process.pid)
        for process in (keeper, *keeper.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                times: Any = process.cpu_times()
                spent += times.user + times.system
    now, before = time.monotonic(), running.busy
    running.busy = (now, spent)
    if before is None or now <= before[0]:
        return Seen(memory, None)
    return Seen(memory, max(0.0, spent - before[1]) / (now - before[0]))
