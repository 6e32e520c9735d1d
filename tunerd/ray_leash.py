"""Ends what a private Ray cluster leaves when its driver is killed.

Ray's processes end with their driver, but for two agents of the raylet: they first try for 60 s to
publish that the raylet is gone (`publish_error_to_driver` in ray/_private/utils.py), to nobody.

    python -m tunerd.ray_leash PID:TICKS ...

waits for the end of its standard input, whose other end the driver holds, and then kills those
processes where they live.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunerd.slices.processes import ProcessId


@contextlib.contextmanager
def leashed() -> Iterator[None]:
    """Kill this process's raylets' children of now when it ends, or leaves the block."""
    raylets = [p for p in children(os.getpid()) if _name(p) == "raylet"]
    agents = [f"{p.pid}:{p.start_ticks}" for raylet in raylets for p in children(raylet.pid)]
    holder = subprocess.Popen(
        [sys.executable, "-m", "tunerd.ray_leash", *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and a killed group do not reach it
    )
    try:
        yield
    finally:
        holder.communicate()


def children(pid: int) -> list[ProcessId]:
    """Return the processes that a process has started and that live."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and (child := ProcessId.of(int(folder.name))) is not None:
                found.append(child)
    return found


def _name(process: ProcessId) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


def main(arguments: Sequence[str]) -> None:
    sys.stdin.buffer.read()
    for argument in arguments:
        pid, ticks = argument.split(":")
        ProcessId(int(pid), int(ticks)).signal(signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
