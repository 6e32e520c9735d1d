"""Runners that are plain children of the slice's process: no GPU context is shared with anybody."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tunerd.errors import InfrastructureError
from tunerd.slices.remote import START_SECS, RemoteSlice
from tunerd.vocabulary import SliceSpec

_EXIT_SECS = 5.0
# An operator's, or the kernel's where memory is short: of whoever has most of it. What a kernel
# does to its own process is another signal: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP}


class ChildSlice(RemoteSlice):
    """A slice whose runner ends with it, by signal if need be."""

    def __init__(self, spec: SliceSpec) -> None:
        super().__init__(spec)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def _arguments(self) -> tuple[str, ...]:
        """Return what the runner is told besides its socket."""
        raise NotImplementedError

    def _launch(self) -> socket.socket:
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="tunerd-"))
        path, log_path = self._folder / "runner.sock", self._folder / "runner.log"
        # Its end of this pipe closes with this process, however that ends: the runner exits then.
        command = [sys.executable, "-m", "tunerd.slices.runner", "--socket", str(path), "--leash"]
        with log_path.open("ab") as log_file:
            self._process = subprocess.Popen(
                [*command, *self._arguments()],
                env={**os.environ, **dict(self.spec.environment)},
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_SECS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
                return connection
            except OSError:
                connection.close()
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                tail = log_path.read_text(errors="replace")[-2000:]
                raise InfrastructureError(
                    f"the runner of {self.spec.slice_id} does not answer (exit status {status});"
                    f" it printed: {tail or 'nothing'}"
                )
            time.sleep(0.02)

    def _ended_from_outside(self) -> str:
        if self._process is None:
            return ""
        try:
            status = self._process.wait(_EXIT_SECS)
        except subprocess.TimeoutExpired:
            return ""
        return signal.Signals(-status).name if -status in _FROM_OUTSIDE else ""

    def _fence(self, reason: str) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _reap(process)

    def close(self) -> None:
        super().close()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECS)
            process.kill()
            _reap(process)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
