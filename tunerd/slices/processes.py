"""Processes named so that a recycled pid is not taken for the one that was meant."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_POLL_SECS = 0.02


def python_path() -> str:
    """Return the PYTHONPATH of a child that finds this package in whatever folder it starts."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


@dataclass(frozen=True)
class ProcessId:
    """A pid and the process's start, in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of a running process, or None where there is none or a zombie."""
        stat = _stat(pid)
        return None if stat is None or stat[0] in ("Z", "X") else cls(pid, int(stat[19]))

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Send a signal; nothing where the process has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_secs: float) -> bool:
        """Wait for the end of a process that need not be a child; True once it has ended."""
        deadline = time.monotonic() + timeout_secs
        while self.alive:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECS)
        return True


def _stat(pid: int) -> list[str] | None:
    """Return /proc/PID/stat from field 3 on: field 2, the name, may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def with_children(of: Iterable[ProcessId]) -> list[ProcessId]:
    """Return living processes and their children.

    It reads no memory of a process, as its environment is: that waits while a driver holds it.
    """
    pids = {process.pid for process in of if process.alive}
    found = []
    for pid in (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()):
        stat, process = _stat(pid), ProcessId.of(pid)
        if stat and process and (pid in pids or int(stat[1]) in pids):
            found.append(process)
    return found


def is_stopped(pid: int) -> bool:
    """Say whether a process is stopped, by a signal or a debugger, and not ended."""
    stat = _stat(pid)
    return stat is not None and stat[0] in ("T", "t")


def with_environment(
    program: str, name: str, value: str, *, argued: bool = False
) -> list[ProcessId]:
    """Find this user's processes of a program that were started with an environment variable.

    Args:
        program: the file name of the program or of a script it runs.
        argued: whether only those count that were started with arguments.
    """
    entry = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            names = [os.path.basename(word) for word in words[:3]]
            if program.encode() not in names:
                continue
            if argued and names.index(program.encode()) == len(words) - 1:
                continue
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        identity = ProcessId.of(int(folder.name))
        if identity is not None and entry in environment:
            found.append(identity)
    return found
