"""One runner process under the GPU guard: how it is started, and the order in which it is stopped.

    ask to close -> terminate_client -> SIGTERM -> SIGKILL

A GPU client that dies by a signal with work running takes every other client of its GPU with it, so
no signal is sent before the MPS server has destroyed the client's contexts, or is gone itself. A
client of which neither is so in time is killed all the same, and the guard fences the GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunerd.slices.mps.control import MpsControl, clean_environment
from tunerd.system.forks import ForkServer, start
from tunerd.system.processes import ProcessId
from tunerd.system.spawn import python_path

log = logging.getLogger(__name__)

_SIGNAL_SECS = 1.0
_LOG_TAIL_BYTES = 2000


class GpuRunner:
    """A runner of one slice. stop() may be called from several threads.

    Args:
        forks: what starts it at once, where it is ready.
    """

    def __init__(
        self,
        slice_id: str,
        command: Sequence[str],
        *,
        socket_path: Path,
        log_path: Path,
        environment: Mapping[str, str],
        forks: ForkServer | None = None,
    ) -> None:
        self.slice_id = slice_id
        self.socket_path = socket_path
        self._log_path = log_path
        self._stopping = threading.Lock()
        arguments = [*command, "--socket", str(socket_path), "--device", "cuda"]
        with log_path.open("ab") as output:
            self._process = start(
                arguments,
                runner_environment() | dict(environment),
                output=output.fileno(),
                by=forks,
            )
        self.identity = ProcessId.of(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def log_tail(self) -> str:
        """Return the end of what it printed, for an error message."""
        try:
            return self._log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    def stop(self, control: MpsControl, *, grace_secs: float) -> bool:
        """Stop the process as drawn above.

        Args:
            grace_secs: how long it may take to end by itself once its connection has ended.

        Returns:
            False where it had to be killed as a GPU client that could not be terminated first: its
            neighbours have then most likely died with it.
        """
        with self._stopping:
            safe = True
            if grace_secs > 0:
                self._ask_to_close()
            if not self.wait(grace_secs):
                safe = end_client(control, self.pid)
                for send in (self._process.terminate, self._process.kill):
                    if self.wait(_SIGNAL_SECS):
                        break
                    send()
                self._process.wait()
            self.socket_path.unlink(missing_ok=True)
            return safe

    def kill(self) -> None:
        """Kill the process, after the server that does its GPU work."""
        self._process.kill()
        self.socket_path.unlink(missing_ok=True)

    def _ask_to_close(self) -> None:
        """End the one connection that a runner accepts, if no slice has made it yet."""
        if self.exit_status is None:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(0.5)
                sock.connect(str(self.socket_path))

    def wait(self, timeout_secs: float) -> bool:
        """Wait for the end of the process; True once it has ended."""
        try:
            self._process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            return False
        return True


def end_client(control: MpsControl, pid: int) -> bool:
    """Have the MPS server destroy what `pid` holds on the GPU; True where no work of it is left.

    A process that was stopped goes on first: the server waits for what it has to say.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGCONT)
    server = control.server_of(pid)
    if server is not None:
        return control.terminate(server, pid)
    if control.is_client(pid, frozenset()) is False or control.servers() == []:
        return True
    # The daemon lists its clients in another pid namespace, or does not answer: try by our own pid.
    answers = [control.terminate(server, pid) for server in control.servers() or ()]
    log.warning("pid %d is in no client list; terminate_client by its pid: %s", pid, answers)
    return any(answers)


def runner_environment() -> dict[str, str]:
    """Return what every runner starts from: our environment without CUDA's, MPS's and Ray's."""
    kept = {k: v for k, v in clean_environment().items() if not k.startswith("RAY_")}
    return kept | {"PYTHONPATH": python_path()}
