"""A slice's hold on the guard of its GPU: an open connection. The guard is started where needed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tunerd.errors import HostError, InfrastructureError
from tunerd.runner.host import RUNNER_COMMAND
from tunerd.slices.mps.gpu_runner import runner_environment
from tunerd.system import wire
from tunerd.vocabulary import SliceSpec, to_json

_ACQUIRE_SECS = 60.0  # includes the clean-up after a guard that was killed
_STARTER_SECS = 5.0  # for whoever started a guard early to be gone
_BUSY_SECS = 1.0  # a run that ends now may look alive for a moment
_REQUEST_SECS = 60.0  # the slowest request is a fence: seconds
_MAX_SOCKET_PATH = 107  # sockaddr_un.sun_path holds 108 bytes with its end: unix(7)
_LONGEST_NAME = 32 + len(".999999.sock.new")  # of a runner's socket


class Lease:
    """A connection to the guard. close() is idempotent; when it ends, its runners are stopped."""

    def __init__(self, connection: socket.socket, guard_pid: int) -> None:
        self.guard_pid = guard_pid
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def acquire(
        cls,
        gpu_uuid: str,
        run: str,
        *,
        external: Path | None = None,
        runner_command: tuple[str, ...] = RUNNER_COMMAND,
    ) -> Self:
        """Connect to the guard of a GPU, starting one if none lives.

        Args:
            run: names the run; slices of one run share a guard.
            external: the pipe folder of the MPS daemon to use; None for one of our own.

        Raises:
            HostError: the guard of another live run has the GPU, or there can be none.
        """
        folder = gpu_folder(gpu_uuid)
        started = time.monotonic()
        while True:
            answer = _hello(folder, run, external or folder / "pipe")
            if isinstance(answer, tuple):
                connection, state = answer
                return cls(connection, state["guard"]["pid"])
            if answer is None:
                _start(folder, gpu_uuid, run, external=external, runner_command=runner_command)
            elif answer["leases"] and time.monotonic() > started + _BUSY_SECS:
                raise HostError(
                    f"the GPU {gpu_uuid} is in use by the run {answer['run']} (guard pid"
                    f" {answer['pid']}); wait for it to end, stop it, or choose another GPU with"
                    " CUDA_VISIBLE_DEVICES"
                )
            if time.monotonic() > started + _ACQUIRE_SECS:
                raise InfrastructureError(
                    f"the guard of {gpu_uuid} neither answers nor ends for {_ACQUIRE_SECS:.0f} s;"
                    f" see {folder / 'guard.log'}"
                )
            time.sleep(0.05)

    def request(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Ask the guard; raises InfrastructureError where it refuses or is gone."""
        try:
            with self._lock:
                wire.send(self._connection, {"op": operation, **fields})
                answer, _ = wire.receive(self._connection)
        except (OSError, ValueError) as error:
            self.close()
            raise InfrastructureError(
                f"the GPU guard (pid {self.guard_pid}) is gone: {error}; the next start cleans up"
            ) from error
        if "error" in answer:
            raise InfrastructureError(f"the GPU guard (pid {self.guard_pid}): {answer['error']}")
        ok: dict[str, Any] = answer["ok"]
        return ok

    @property
    def closed(self) -> bool:
        return self._connection.fileno() == -1

    def close(self) -> None:
        self._connection.close()


def _hello(
    folder: Path, run: str, pipe_folder: Path
) -> tuple[socket.socket, dict[str, Any]] | dict[str, Any] | None:
    """Return (connection, state), who else has the guard, or None where no guard answers."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_REQUEST_SECS)
    try:
        connection.connect(str(folder / "guard.sock"))
        wire.send(connection, {"op": "hello", "run": run, "pipe_folder": str(pipe_folder)})
        answer, _ = wire.receive(connection)
    except (OSError, ValueError):
        connection.close()
        return None
    if "ok" in answer:
        return connection, answer["ok"]
    connection.close()
    busy: dict[str, Any] = answer["busy"]
    return busy


def _start(
    folder: Path,
    gpu_uuid: str,
    run: str,
    *,
    external: Path | None,
    runner_command: tuple[str, ...],
) -> None:
    """Start a guard; nothing where another one holds the lock, be it at its start or its end."""
    try:
        done = subprocess.run(
            _command(folder, gpu_uuid, run, external, runner_command),
            env=_environment(),
            cwd="/",  # no module of the user's folder is taken for one of Python's
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ACQUIRE_SECS,
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"{error}; see {folder / 'guard.log'}") from error
    if not done.stdout:
        raise InfrastructureError(
            f"the GPU guard did not start: {done.stderr.strip()[-500:]}; see {folder / 'guard.log'}"
        )
    told = json.loads(done.stdout)
    if "error" in told:
        raise (HostError if told["host"] else InfrastructureError)(told["error"])


def _command(
    folder: Path, gpu_uuid: str, run: str, external: Path | None, runner_command: tuple[str, ...]
) -> list[str]:
    command = [sys.executable, "-m", "tunerd.slices.mps.guard", f"--gpu={gpu_uuid}"]
    # A run is named after its model's file, which may begin with a hyphen.
    command += [f"--folder={folder}", f"--run={run}", f"--runner={json.dumps(runner_command)}"]
    return command if external is None else [*command, f"--external={external}"]


def _environment() -> dict[str, str]:
    """Return a guard's: it looks for the log of a daemon that is not ours where that is said."""
    kept = {k: v for k, v in os.environ.items() if k == "CUDA_MPS_LOG_DIRECTORY"}
    return runner_environment() | kept


@contextlib.contextmanager
def guarded_early(
    gpu_uuid: str,
    run: str,
    expected: Sequence[SliceSpec],
    *,
    external: Path | None = None,
    runner_command: tuple[str, ...] = RUNNER_COMMAND,
) -> Iterator[None]:
    """Start a guard, without waiting, with the runners that slices of a run will ask for.

    It has a lease until the context ends, or this process. Where there can be no such guard, slices
    say so when they start; where there is one, they find it.
    """
    command = _command(gpu_folder(gpu_uuid), gpu_uuid, run, external, runner_command)
    starter = subprocess.Popen(
        [*command, "--expect", json.dumps(to_json(expected))],
        env=_environment(),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert starter.stdin is not None
    try:
        yield
    finally:
        starter.stdin.close()
        try:
            starter.wait(_STARTER_SECS)
        except subprocess.TimeoutExpired:  # it waits for a guard that is stuck, and has no lease
            starter.kill()
            starter.wait()


def private_folder() -> Path:
    """Return this user's folder for sockets and state, made with mode 0700 where it is missing.

    /tmp rather than a run folder: all runs of a user meet there, and paths of sockets are short.
    TUNERD_RUNTIME_FOLDER names another one. Raises HostError where there can be none.
    """
    named = os.environ.get("TUNERD_RUNTIME_FOLDER") or f"/tmp/tunerd-{os.getuid()}"
    folder = Path(named).absolute()  # guards and runners work in another folder
    _make(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HostError(
            f"{folder} is not a folder that only you can enter; remove it, or set"
            " TUNERD_RUNTIME_FOLDER to one of yours with mode 0700"
        )
    return folder


def gpu_folder(gpu_uuid: str) -> Path:
    """Return the private folder of one GPU: lock, state, sockets, logs, the daemon's pipes."""
    short = hashlib.sha256(gpu_uuid.encode()).hexdigest()[:8]
    folder = private_folder() / f"gpu-{short}"
    if len(os.fsencode(folder)) + 1 + _LONGEST_NAME > _MAX_SOCKET_PATH:
        raise HostError(
            f"{folder} is too long for the path of a socket ({_MAX_SOCKET_PATH} bytes); set"
            " TUNERD_RUNTIME_FOLDER to a shorter one"
        )
    _make(folder)
    return folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise HostError(
            f"{folder} cannot be made a folder: {error.strerror}; mend that, or set"
            " TUNERD_RUNTIME_FOLDER to a folder that only you can enter"
        ) from error
