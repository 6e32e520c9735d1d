"""Ends what a private Ray cluster leaves when its driver or its raylet is killed.

Ray's processes end with their driver, but for two agents of the raylet: they first try for 60 s to
publish that the raylet is gone (`publish_error_to_driver` in ray/_private/utils.py), to nobody.
Workers that wait for work live on for some 16 s after their raylet, and a driver that goes on
without it is ended by Ray with exit status 1, which here means something else: see `Daemon`.

    python -m tunerd.cluster.reaper DRIVER

starts before Ray. On standard input the driver tells the raylet and its agents, as PID:TICKS, once
they are there, and holds the other end. When the driver or its raylet ends, this kills the agents,
a raylet that outlives its driver, and the workers. It looks for raylet and agents itself until it
is told; workers it knows by the cluster's token in their environment.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunerd.errors import InfrastructureError
from tunerd.system import processes, spawn
from tunerd.system.processes import ProcessId

_LOOK_SECS = 0.5
_START_LOOK_SECS = 0.1  # less than an agent takes until it has a title
_RAYLET_SECS = 5.0  # after its driver
_DAEMONS = ("raylet", "gcs_server")
# What Ray starts, each with Python, before they have a title: its workers, and its agents.
_SCRIPTS = (b"/default_worker.py", b"/dashboard/agent.py", b"/runtime_env/agent/main.py")
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
def reaping() -> Iterator[Callable[[], tuple[Daemon, ...]]]:
    """End the private cluster that this process starts in the block, whenever this process ends.

    The cluster's token is in the environment already. Yields what is to be called once the cluster
    is there: it returns its daemons, and from then on the cluster ends with its raylet as well.
    """
    holder = spawn.start(
        "tunerd.cluster.reaper",
        str(os.getpid()),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C and a killed group do not reach it
    )

    def hold() -> tuple[Daemon, ...]:
        started = [(processes.name(p), p) for p in processes.children(os.getpid())]
        known = _raylet_and_agents(os.getpid())
        if not known:
            raise _ended("raylet")
        assert holder.stdin is not None
        try:
            print(*(f"{p.pid}:{p.start_ticks}" for p in known), file=holder.stdin, flush=True)
        except BrokenPipeError as error:
            raise InfrastructureError(
                "the process that ends Ray with this one has itself ended, with "
                f"{holder.wait()}; where memory has run out, that is -9"
            ) from error
        return tuple(Daemon(name, p) for name, p in started if name in _DAEMONS)

    try:
        yield hold
    finally:
        with contextlib.suppress(BrokenPipeError):
            holder.communicate()


def end_daemons() -> None:
    """End the daemons that this process started: those of a start of Ray that failed."""
    for process in processes.children(os.getpid()):
        if processes.name(process) in _DAEMONS:
            process.signal(signal.SIGKILL)
            process.wait(_RAYLET_SECS)


def require_alive(daemons: Sequence[Daemon]) -> None:
    """Raise InfrastructureError where one has ended: Ray would end this process without a word."""
    ended = [d.name for d in daemons if not d.alive]
    if ended:
        raise _ended(" and ".join(ended))


def _ended(names: str) -> InfrastructureError:
    return InfrastructureError(
        f"Ray's {names} on this machine ended; what was measured is stored, and the same command "
        "goes on"
    )


def raylet_at(socket_name: str) -> tuple[Daemon, ...]:
    """Return the raylet of this machine that listens on a socket, none where there is none."""
    argument = f"--raylet_socket_name={socket_name}".encode()
    found = (process for process in processes.running() if argument in processes.command(process))
    return tuple(Daemon("raylet", process) for process in itertools.islice(found, 1))


def _of_cluster(token: str) -> list[ProcessId]:
    """Return a cluster's workers and agents: they have its token in their environment.

    Those that have just been started have no title yet. Left alone they look for their raylet for
    long.
    """
    return [p for p in _with_token(token) if _is_of_ray(processes.command(p))]


def _is_of_ray(command: Sequence[bytes]) -> bool:
    return command[0].startswith(b"ray::") or any(word.endswith(_SCRIPTS) for word in command)


def _with_token(token: str) -> Iterator[ProcessId]:
    return (p for p in processes.running() if processes.has_variable(p, _TOKEN, token))


def _raylet_and_agents(driver: int) -> list[ProcessId]:
    started = processes.children(driver)
    raylet = next((p for p in started if processes.name(p) == "raylet"), None)
    return [raylet, *processes.children(raylet.pid)] if raylet else []


def main() -> None:
    driver = int(sys.argv[1])
    known: list[ProcessId] = []
    # An agent's title may overwrite the token in its environment.
    while not select.select([sys.stdin], [], [], _START_LOOK_SECS)[0]:
        known = _raylet_and_agents(driver) or known
    if told := sys.stdin.readline():  # nothing where the driver ends while Ray starts
        known = [ProcessId(*map(int, each.split(":"))) for each in told.split()]
    while known and known[0].alive:
        if select.select([sys.stdin], [], [], _LOOK_SECS)[0]:
            break  # the driver has ended, and the raylet will
    token = os.environ[_TOKEN]
    for process in (*known[1:], *_of_cluster(token)):
        process.signal(signal.SIGKILL)
    started = [p for p in _with_token(token) if processes.name(p) == "raylet"]
    for raylet in (*known[:1], *started):
        if not raylet.wait(_RAYLET_SECS):
            raylet.signal(signal.SIGKILL)  # on a busy machine it takes long to see what has ended
    for process in _of_cluster(token):  # which the raylet has started meanwhile
        process.signal(signal.SIGKILL)


if __name__ == "__main__":
    main()
