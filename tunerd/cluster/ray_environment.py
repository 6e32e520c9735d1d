"""What surrounds Ray: the environment of a cluster, a private one's folder and logs, its words.

    /tmp/tunerd-UID/ray-XXXXXXXX/        locked by the driver while it lives
        session_.../                     Ray's sockets and logs
        scratch/                         temporary files of tuners and slices
        cubins/                          of tuners, for the process that compiles the model

A driver that was killed leaves its folder; the next start removes every folder that nobody locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunerd.candidates.triton.compile import CUBINS
from tunerd.cluster import private_ray
from tunerd.errors import HostError, InfrastructureError, InputError
from tunerd.slices.mps.guard_client import private_folder

log = logging.getLogger(__name__)

_PREFIX = "ray-"
_UNLOCKED_PREFIX = "new-"  # for a moment
_LOCK_SECS = 60.0  # a long moment, on a busy machine
# sun_path holds 108 bytes with its end (unix(7)); Ray adds a session's name, 39 to 43 bytes long,
# and sockets/plasma_store.
_LONGEST_FOLDER = 107 - 1 - 43 - len("/sockets/plasma_store")
OBJECT_STORE_BYTES = 256 << 20
_KEPT_LOG_BYTES = 1 << 20
_PROBE_SECS = 5.0
_MAX_SENTENCE_CHARS = 500


@functools.cache
def _token() -> str:
    """Return the token of this process's private clusters, which it has one after the other."""
    return secrets.token_hex(32)


def environment(run: str, folder: RayFolder) -> dict[str, str]:
    """Return what a private cluster is started with, with a token of this process.

    The token lives in the environment of the cluster's processes alone, and in no file.
    """
    return {
        # On Linux, Ray listens on all interfaces without it. Read when ray is imported.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _token(),
        # Leaves CUDA_VISIBLE_DEVICES alone where an actor holds no GPU.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TUNERD_RUN": run,
        CUBINS: str(folder.path / "cubins"),
    }


def environment_to_join(address: str, run: str) -> dict[str, str]:
    """Check that something listens at an address, and return what joining it needs.

    Ray itself would try for minutes, and does not use a token unless it is told to.
    """
    values = {"TUNERD_RUN": run}
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        values["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE", "token")
    if address == "auto":
        return values
    name, _, port = address.rpartition(":")
    if not name or not port.isdecimal() or "/" in name:
        raise InputError(
            f"--address '{address}' is not HOST:PORT; give what `ray start --head` printed, on a "
            "machine that is a node of the cluster"
        )
    try:
        socket.create_connection((name.strip("[]"), int(port)), timeout=_PROBE_SECS).close()
    except (OSError, OverflowError) as error:
        raise InfrastructureError(
            f"nothing answers at --address {address}: {error}; give the HOST:PORT that "
            "`ray start --head` printed, or leave --address out for a private cluster"
        ) from error
    return values


class Environment:
    """Variables that are set for a while. undo() is idempotent."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def undo(self) -> None:
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class RayFolder:
    """The private folder of one cluster, locked while this process lives. close() removes it."""

    def __init__(self) -> None:
        root = private_folder()
        if len(os.fsencode(root)) + 1 + len(_PREFIX) + 8 > _LONGEST_FOLDER:
            raise HostError(
                f"{root} is too long for the paths of Ray's sockets; set TUNERD_RUNTIME_FOLDER to "
                f"a folder of at most {_LONGEST_FOLDER - 9 - len(_PREFIX)} bytes"
            )
        _remove_dead(root)
        # Under another name until it is locked: what has the prefix and no lock is dead.
        hidden = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=root))
        self._lock: int | None = _locked(hidden)
        self.path = hidden.rename(root / hidden.name.replace(_UNLOCKED_PREFIX, _PREFIX, 1))
        self.scratch = self.path / "scratch"
        self.scratch.mkdir(mode=0o700)

    def keep_logs(self, into: Path) -> bool:
        """Copy the ends of the logs of Ray's workers and daemons; False where there are none."""
        logs = [
            path
            for path in (self.path / "session_latest" / "logs").glob("*")
            if path.is_file() and path.suffix in (".out", ".err", ".log") and path.stat().st_size
        ]
        if logs:
            into.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in logs:
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - _KEPT_LOG_BYTES))
                (into / path.name).write_bytes(log.read())
        return bool(logs)

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def start_private(
    ray: Any, folder: RayFolder, *, cpus: int, gpus: int, end_failed: Callable[[], None]
) -> None:
    """Start a private cluster; InfrastructureError where it does not start.

    end_failed: ends what a start that failed has left.
    """
    options = {
        "address": "local",  # whatever RAY_ADDRESS says
        "num_cpus": cpus,
        "num_gpus": gpus,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(folder.path),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        try:
            with private_ray.bare():
                ray.init(**options)
        except (AttributeError, ImportError, TypeError) as error:
            # A Ray whose private functions are others: let it start everything that it has.
            log.debug("Ray does not start bare: %s", sentence(error))
            ray.shutdown()
            end_failed()
            ray.init(**options)
    except Exception as error:
        raise InfrastructureError(
            f"Ray does not start on this machine: {sentence(error)}"
        ) from error


def join(ray: Any, address: str, run: str) -> None:
    """Join a cluster with ray.init; InfrastructureError where it does not let us in."""
    said: list[str] = []
    try:
        with stderr_kept() as said:
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": {"TUNERD_RUN": run}},
            )
    except Exception as error:
        # Without its token, and without a cluster, Ray ends in the same ConnectionError.
        refused = any("AuthToken" in line for line in said) or "RAY_AUTH_TOKEN" in str(error)
        if refused:
            problem = (
                f"the Ray cluster at {address} does not let us in; set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to its token (`ray get-auth-token` prints it on the head)"
            )
        elif isinstance(error, ConnectionError):
            problem = (
                f"there is no Ray cluster at --address {address}; give the HOST:PORT that "
                "`ray start --head` printed, or leave --address out for a private cluster"
            )
        else:
            problem = f"the Ray cluster at {address} cannot be used: {sentence(error)}"
        raise InfrastructureError(problem) from error


def _remove_dead(root: Path) -> None:
    unnamed = [f for f in root.glob(f"{_UNLOCKED_PREFIX}*") if _is_old(f)]
    for folder in (*root.glob(f"{_PREFIX}*"), *unnamed):
        with contextlib.suppress(OSError):  # locked: its driver lives; or gone meanwhile
            lock = _locked(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _is_old(folder: Path) -> bool:
    """Say whether whoever made a folder has had the time to lock it, or has taken it away."""
    try:
        return time.time() > folder.stat().st_mtime + _LOCK_SECS
    except OSError:
        return True


def _locked(folder: Path) -> int:
    """Lock a folder and return what holds the lock; BlockingIOError where another process does."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def stderr_kept() -> Iterator[list[str]]:
    """Keep the lines that are written to file descriptor 2 for after the block.

    Ray's core repeats there, once a second, why it cannot connect.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile() as said:
        before = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            said.seek(0)
            lines += said.read().decode(errors="replace").splitlines()
            for line in lines:
                log.debug("%s", line)


def sentence(error: BaseException) -> str:
    """Return what an error of Ray says, in one line, without the tracebacks."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"[:_MAX_SENTENCE_CHARS]
    lines = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line) or type(error).__name__
    return text[:_MAX_SENTENCE_CHARS]
