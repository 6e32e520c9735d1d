"""Lower a model in a process of its own, beside whatever its run starts meanwhile.

TVM reads variables of the environment while it lowers, and Ray sets some while it starts: a process
that does both at once may crash (setenv(3) is not thread-safe).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from typing import IO, Any

from tunerd import errors
from tunerd.errors import InfrastructureError
from tunerd.extraction import Kernels, Selection
from tunerd.lowering_messages import asked_to, kernels_from
from tunerd.models.model import FixedModel
from tunerd.slices import wire
from tunerd.slices.processes import python_path
from tunerd.vocabulary import TargetSpec

_TAIL_CHARS = 2000


class Lowering:
    """A model that is being lowered, from the construction of this on."""

    def __init__(
        self, model: FixedModel, target: TargetSpec, selection: Selection | None = None
    ) -> None:
        self._future: Future[Kernels] = Future()
        connection, theirs = socket.socketpair()
        printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tunerd.lowerer"],
                env={**os.environ, "PYTHONPATH": python_path()},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=printed,
                stderr=printed,
            )
        arguments = (connection, printed, (model, target, selection))
        threading.Thread(target=self._exchange, args=arguments, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def result(self) -> Kernels:
        """Wait for the kernels.

        Raises as `kernels_of` does, and InfrastructureError where a signal ended the process.
        """
        return self._future.result()

    def close(self) -> None:
        """End the process, if it still lowers. Idempotent."""
        self._process.kill()
        self._process.wait()

    def _exchange(
        self,
        connection: socket.socket,
        printed: IO[bytes],
        asked: tuple[FixedModel, TargetSpec, Selection | None],
    ) -> None:
        with connection, printed:
            try:
                self._future.set_result(self._kernels(connection, printed, asked))
            except BaseException as error:
                self._future.set_exception(error)

    def _kernels(
        self,
        connection: socket.socket,
        printed: IO[bytes],
        asked: tuple[FixedModel, TargetSpec, Selection | None],
    ) -> Kernels:
        try:
            wire.send(connection, *asked_to(*asked))
            body, blobs = wire.receive(connection)
            self._process.wait()
        except OSError:
            status = self._process.wait()
            printed.seek(0)
            raise _ended(status, printed.read().decode(errors="replace")) from None
        for name, level, message in body["log"]:
            logging.getLogger(name).log(level, "%s", message)
        if "error" in body:
            kind: Any = getattr(errors, body["error"])
            raise kind(body["message"])
        return kernels_from(body, blobs)


def _ended(status: int, printed: str) -> Exception:
    """Return the error of a process that ended without an answer."""
    tail = printed.strip()[-_TAIL_CHARS:] or "nothing"
    if status >= 0:
        return RuntimeError(f"lowering the model failed; its process printed: {tail}")
    name = signal.Signals(-status).name
    return InfrastructureError(
        f"{name} ended the process that lowers the model; where memory has run out, that is "
        f"SIGKILL. It printed: {tail}"
    )
