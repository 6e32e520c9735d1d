"""Processes named so that a recycled pid is not taken for the one that was meant.

psutil is imported where it is used: most who import this module do not look at processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_POLL_SECS = 0.02


@dataclass(frozen=True)
class ProcessId:
    """A pid and the process's start, in clock ticks since boot (field 22 of /proc/PID/stat).

    psutil's create_time, a time of day, differs between processes where the clock is set meanwhile;
    these two are written to files and told to other processes.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of a running process, or None where there is none or a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # from field 3: the name may hold brackets
        return None if fields[0] in ("Z", "X") else cls(pid, int(fields[19]))

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


def running() -> Iterator[ProcessId]:
    """Yield all processes that run, any user's; nothing is read of their memory."""
    import psutil

    return (process for pid in psutil.pids() if (process := ProcessId.of(pid)) is not None)


def children(pid: int) -> list[ProcessId]:
    """Return the processes that a process has started and that live."""
    import psutil

    try:
        found = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child for p in found if (child := ProcessId.of(p.pid)) is not None]


def with_children(of: Iterable[ProcessId]) -> list[ProcessId]:
    """Return living processes and their children.

    It reads no memory of a process, as its environment is: that waits while a driver holds it.
    """
    living = [process for process in of if process.alive]
    return list(dict.fromkeys(p for one in living for p in (one, *children(one.pid))))


def name(process: ProcessId) -> str:
    """Return the first 15 bytes of its program's name, "" where it has ended (proc(5), comm)."""
    return _read(process, "comm").decode(errors="replace").strip()


def command(process: ProcessId) -> list[bytes]:
    """Return the words of its command line, or its title, in one; none where it has ended."""
    return _read(process, "cmdline").rstrip(b"\0").split(b"\0")


def has_variable(process: ProcessId, name: str, value: str) -> bool:
    """Say whether a process of this user's was started with a variable of the environment.

    Ray's workers write their title over the first of them. psutil reads up to the gap that follows.
    """
    return f"{name}={value}".encode() in _read(process, "environ").split(b"\0")


def _read(process: ProcessId, file: str) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/{file}").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return b""


def is_stopped(pid: int) -> bool:
    """Say whether a process is stopped, by a signal or a debugger, and not ended."""
    import psutil

    try:
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return psutil.Process(pid).status() in stopped
    except psutil.NoSuchProcess:
        return False


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
