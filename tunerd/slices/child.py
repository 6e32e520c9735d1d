"""Runners that are plain children of the slice's process: no GPU context is shared with anybody."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from abc import abstractmethod
from pathlib import Path

from tunerd.errors import InfrastructureError
from tunerd.runner.host import EXIT_SECS, RUNNER_COMMAND, START_SECS, Blame, outside_signal
from tunerd.slices.base import ProcessSlice
from tunerd.system import spawn
from tunerd.system.forks import ForkServer, Process, start
from tunerd.vocabulary import SliceSpec


class ChildSlice(ProcessSlice):
    """A slice whose runner ends with it, by signal if need be.

    Args:
        forks: what starts the runner at once, where it is ready.
    """

    def __init__(self, spec: SliceSpec, forks: ForkServer | None = None) -> None:
        super().__init__(spec)
        self._forks = forks
        self._process: Process | None = None
        self._killed: list[Process] = []  # that may not have ended yet
        self._folder: Path | None = None

    @abstractmethod
    def arguments(self) -> tuple[str, ...]:
        """Return what the runner is told besides its socket."""

    def connect(self) -> socket.socket:
        self._reap()  # a device has no room for the next one before
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="tunerd-"))
        path, log_path = self._folder / "runner.sock", self._folder / "runner.log"
        # Its end of this pipe closes with this process, however that ends: the runner exits then.
        command = (*RUNNER_COMMAND, "--socket", str(path), "--leash", *self.arguments())
        with log_path.open("ab") as log_file:
            self._process = start(
                command,
                spawn.environment(dict(self.spec.environment)),
                output=log_file.fileno(),
                has_stdin=True,
                by=self._forks,
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

    def ended_from_outside(self) -> str:
        if self._process is None:
            return ""
        try:
            status = self._process.wait(EXIT_SECS)
        except subprocess.TimeoutExpired:
            return ""
        return outside_signal(status)

    def fence(self, reason: str, *, is_alone: bool) -> Blame:
        """Kill the runner. A driver lets go of one that faulted only after seconds; the next one,
        and `close`, wait for that, and who wants to know whose fault it was does not."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._killed.append(process)
        return Blame()

    def close(self) -> None:
        super().close()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECS)
            process.kill()
            self._killed.append(process)
        self._reap()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _reap(self) -> None:
        while self._killed:
            process = self._killed.pop()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
