"""Start Python programs by forks of a process that has imported what they need.

Who asks holds a `ForkServer`; `start` takes it where it can, and starts a program else. Either way
there is a `Process`, of which Popen's are, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from tunerd.system import spawn
from tunerd.system.fork_server import MESSAGE_BYTES

log = logging.getLogger(__name__)

UNKNOWN_STATUS = 255  # of a process whose server has ended before it
_ANSWER_SECS = 10.0  # for a fork, which takes milliseconds
_END_SECS = 2.0


class Process(Protocol):
    """A process that this one has started. Any thread may ask."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None:
        """What it reads, where that was asked for."""

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal that ended it; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status; raises subprocess.TimeoutExpired where it lives that long."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkServer:
    """A process that imports a module, calls its `preload`, and starts others by forks.

    It starts at once and is used as soon as it is ready. It ends with this process.

    Args:
        module, arguments: what it is to have: `module.preload(*arguments)` is called in it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._lock = threading.Lock()  # held while there is a message to send or to receive
        self._statuses: dict[int, int] = {}  # of what has ended, by pid, until it is asked for
        self._is_ready = False
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = spawn.start(
                "tunerd.system.fork_server",
                module,
                *arguments,
                # A library of linear algebra would start a thread for each core.
                changes={"OPENBLAS_NUM_THREADS": "1"},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def is_ready(self) -> bool:
        """Whether what it is to have is imported."""
        with self._lock:
            self._hear()
            return self._is_ready

    def wait_until_ready(self, timeout_secs: float) -> bool:
        """Wait until it is ready; False where it is not in time, or has ended."""
        deadline = time.monotonic() + timeout_secs
        while not self.is_ready:
            if time.monotonic() > deadline or self._process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, stdin: int, output: int
    ) -> Forked | None:
        """Start a Python program; None where this server cannot, or is not ready.

        Args:
            command: what stands behind the interpreter's name, without options of it.
            stdin, output: descriptors of its standard input, and of what it prints.
        """
        message = json.dumps({"command": list(command), "environment": dict(environment)}).encode()
        with self._lock:
            self._hear()
            if not self._is_ready or len(message) > MESSAGE_BYTES:
                return None
            try:
                socket.send_fds(self._connection, [message], [stdin, output])
                while True:
                    said, descriptors = self._received(_ANSWER_SECS)
                    if "started" in said:
                        return Forked(self, said["started"], descriptors[0])
                    if "refused" in said:
                        log.warning("%s", said["refused"])
                        return None
            except OSError as error:  # a message that is too long for the system, too
                log.warning("the fork server (pid %d): %s", self._process.pid, error)
                self._give_up()
                return None

    def ended(self, pid: int) -> int:
        """Return the exit status of a fork that is seen to have ended; waits until that is told."""
        with self._lock:
            while pid not in self._statuses:
                try:
                    self._received(_ANSWER_SECS)
                except OSError:
                    return UNKNOWN_STATUS
            return self._statuses.pop(pid)

    def close(self) -> None:
        """End the server; what it has started goes on. Idempotent."""
        with self._lock:
            self._give_up()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # --- with the lock held ----------------------------------------------------------------------

    def _hear(self) -> None:
        """Take what it has said."""
        try:
            while True:
                self._received(0.0)
        except BlockingIOError:
            pass
        except OSError:
            self._give_up()

    def _received(self, timeout_secs: float) -> tuple[dict[str, Any], list[int]]:
        """Return the next message; what it says of ends is noted. Raises OSError at the end."""
        self._connection.settimeout(timeout_secs)
        data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
        if not data:
            raise ConnectionResetError("it has ended")
        said = json.loads(data)
        self._is_ready |= "ready" in said
        if "ended" in said:
            self._statuses[said["ended"]] = said["status"]
        return said, descriptors

    def _give_up(self) -> None:
        self._is_ready = False
        self._connection.close()


class Forked:
    """A process that a server has forked: as Popen's, as far as `Process` says."""

    def __init__(self, server: ForkServer, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = None
        self._server = server
        self._file = io.FileIO(descriptor)  # of the process: closes with this object
        self._status: int | None = None
        self._lock = threading.Lock()  # held while the status is asked for, which is told once

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(["fork", str(self.pid)], timeout or 0.0)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _ended(self, timeout_secs: float | None) -> int | None:
        ends = select.poll()
        ends.register(self._file.fileno(), select.POLLIN)
        if not ends.poll(None if timeout_secs is None else max(0.0, timeout_secs) * 1e3):
            return None
        with self._lock:
            if self._status is None:
                self._status = self._server.ended(self.pid)
            return self._status

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file.fileno(), number)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int,
    has_stdin: bool = False,
    by: ForkServer | None = None,
) -> Process:
    """Start a Python program in a session of its own, in the root folder.

    Args:
        command: with the interpreter.
        output: a descriptor of what it prints.
        has_stdin: whether its standard input is a pipe of ours; else there is none.
        by: what forks it, where it is ready and the command is one of its interpreter's.
    """
    if by is not None and can_fork(command):
        forked = _forked(by, command[1:], environment, output, has_stdin)
        if forked is not None:
            return forked
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
    )


def can_fork(command: Sequence[str]) -> bool:
    """Say whether a command is one of this interpreter, with no option but a module's name."""
    program, first, *_ = command
    return program == sys.executable and (first == "-m" or not first.startswith("-"))


def _forked(
    by: ForkServer,
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    has_stdin: bool,
) -> Forked | None:
    theirs, ours = os.pipe() if has_stdin else (os.open(os.devnull, os.O_RDONLY), None)
    try:
        forked = by.start(command, environment, stdin=theirs, output=output)
    finally:
        os.close(theirs)
    if ours is not None:
        if forked is None:
            os.close(ours)
        else:
            forked.stdin = os.fdopen(ours, "wb", buffering=0)
    return forked
