"""Processes named so that a recycled pid is not taken for the one that was meant."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
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


def running() -> Iterator[ProcessId]:
    """Yield all processes that run, any user's; nothing is read of their memory."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (process := ProcessId.of(int(folder.name))) is not None:
            yield process


def parent(process: ProcessId) -> int:
    """Return the pid of who has started a process, or has adopted it; 0 where it has ended."""
    stat = _stat(process.pid)
    return int(stat[1]) if stat else 0


def children(pid: int) -> list[ProcessId]:
    return [process for process in running() if parent(process) == pid]


def with_children(of: Iterable[ProcessId]) -> list[ProcessId]:
    """Return living processes and their children.

    It reads no memory of a process, as its environment is: that waits while a driver holds it.
    """
    pids = {process.pid for process in of if process.alive}
    return [p for p in running() if p.pid in pids or parent(p) in pids]


def name(process: ProcessId) -> str:
    """Return the first 15 bytes of its program's name, "" where it has ended (proc(5), comm)."""
    return _read(process, "comm").decode(errors="replace").strip()


def command(process: ProcessId) -> list[bytes]:
    """Return the words of its command line, or its title, in one; none where it has ended."""
    return _read(process, "cmdline").rstrip(b"\0").split(b"\0")


def has_variable(process: ProcessId, name: str, value: str) -> bool:
    """Say whether a process of this user's was started with a variable of the environment."""
    return f"{name}={value}".encode() in _read(process, "environ").split(b"\0")


def _read(process: ProcessId, file: str) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/{file}").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return b""


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
    found = []
    for process in running():
        words = command(process)
        names = [os.path.basename(word) for word in words[:3]]
        if program.encode() not in names:
            continue
        if argued and names.index(program.encode()) == len(words) - 1:
            continue
        if has_variable(process, name, value):
            found.append(process)
    return found
