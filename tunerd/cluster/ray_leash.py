"""Ends what a private Ray cluster leaves when its driver or its raylet is killed.

Ray's processes end with their driver, but for two agents of the raylet: they first try for 60 s to
publish that the raylet is gone (`publish_error_to_driver` in ray/_private/utils.py), to nobody.
Workers that wait for work live on for some 16 s after their raylet, and a driver that goes on
without it is ended by Ray with exit status 1, which here means something else: see `Daemon`.

    python -m tunerd.cluster.ray_leash RAYLET:TICKS AGENT:TICKS ...

watches the raylet, and its standard input, whose other end the driver holds. When one of them ends
it kills the agents, a raylet that outlives its driver, and the workers of the driver's cluster.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd.errors import InfrastructureError
from tunerd.slices.processes import ProcessId

_LOOK_SECS = 0.5
_RAYLET_SECS = 5.0  # after its driver
_DAEMONS = ("raylet", "gcs_server")
_WORKER = b"/default_worker.py\0"  # what Ray starts
_TOKEN = "RAY_AUTH_TOKEN"  # no two private clusters have the same


@dataclass(frozen=True)
class Daemon:
    """A process of Ray without which a driver cannot go on."""

    name: str
    process: ProcessId

    @property
    def alive(self) -> bool:
        return self.process.alive


@contextlib.contextmanager
def leashed() -> Iterator[tuple[Daemon, ...]]:
    """Hold the cluster that this process has started, and yield its daemons.

    What is left of it is killed when this process ends, or leaves the block.
    """
    daemons = [Daemon(name, p) for p in children(os.getpid()) if (name := _name(p)) in _DAEMONS]
    raylets = [d.process for d in daemons if d.name == "raylet"]
    agents = [agent for raylet in raylets for agent in children(raylet.pid)]
    holder = subprocess.Popen(
        [sys.executable, "-m", "tunerd.cluster.ray_leash", *map(_text, (*raylets, *agents))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and a killed group do not reach it
    )
    try:
        yield tuple(daemons)
    finally:
        with contextlib.suppress(BrokenPipeError):
            holder.communicate()


def require_alive(daemons: Sequence[Daemon]) -> None:
    """Raise InfrastructureError where one has ended: Ray would end this process without a word."""
    ended = [d.name for d in daemons if not d.alive]
    if ended:
        raise InfrastructureError(
            f"Ray's {' and '.join(ended)} on this machine ended; what was measured is stored, and "
            "the same command goes on"
        )


def raylet_at(socket_name: str) -> tuple[Daemon, ...]:
    """Return the raylet of this machine that listens on a socket, none where there is none."""
    argument = f"--raylet_socket_name={socket_name}".encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not folder.name.isdigit():
                continue
            if argument in (folder / "cmdline").read_bytes().split(b"\0"):
                process = ProcessId.of(int(folder.name))
                return () if process is None else (Daemon("raylet", process),)
    return ()


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


def _workers(token: str) -> list[ProcessId]:
    """Return the workers of a cluster: Ray gives them its token in their environment, and a title.

    Those that have just been started have none yet. Left alone they look for their raylet for long.
    """
    entry = f"{_TOKEN}={token}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            command = (folder / "cmdline").read_bytes()
            if not command.startswith(b"ray::") and _WORKER not in command:
                continue
            is_ours = entry in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and (worker := ProcessId.of(int(folder.name))) is not None:
                found.append(worker)
    return found


def _text(process: ProcessId) -> str:
    return f"{process.pid}:{process.start_ticks}"


def main(arguments: Sequence[str]) -> None:
    raylet, *agents = (ProcessId(*map(int, a.split(":"))) for a in arguments)
    while raylet.alive:
        if select.select([sys.stdin], [], [], _LOOK_SECS)[0]:
            break  # the driver has ended, and the raylet will
    for agent in agents:
        agent.signal(signal.SIGKILL)
    if not raylet.wait(_RAYLET_SECS):
        raylet.signal(signal.SIGKILL)  # on a busy machine it takes long to see what has ended
    for worker in _workers(os.environ[_TOKEN]):
        worker.signal(signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
