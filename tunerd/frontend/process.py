"""Lower a model in a process of its own, beside whatever its run starts meanwhile.

TVM reads variables of the environment while it lowers, and Ray sets some while it starts: a process
that does both at once may crash (setenv(3) is not thread-safe).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import IO, Any, Self

from tunerd import errors
from tunerd.errors import InfrastructureError
from tunerd.frontend.kernels import Extracted, Kernels
from tunerd.frontend.messages import asked_to, extracted_from, kernels_from
from tunerd.frontend.model import FixedModel
from tunerd.system import spawn, wire
from tunerd.vocabulary import TargetSpec

_TAIL_CHARS = 2000


class Lowerer:
    """A process that lowers one model. From its start on it imports what that takes, seconds.

    Close it, or use it as a context manager.
    """

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        self.printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs, _deaf_children():
            self.process = spawn.start(
                "tunerd.frontend.worker",
                stdin=theirs.fileno(),
                stdout=self.printed,
                stderr=self.printed,
            )

    def close(self) -> None:
        """End the process, whatever it does. Idempotent."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.printed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Have processes that are started in the block never take SIGINT and SIGTERM.

    Those may reach a whole terminal or job, at any moment; the parent decides when a child ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Lowering:
    """A model that is being lowered, from the construction of this on.

    Args:
        lowerer: a process that has no model yet, which this takes over; None starts one.
    """

    def __init__(
        self,
        model: FixedModel,
        target: TargetSpec,
        *,
        lowerer: Lowerer | None = None,
    ) -> None:
        self._extracted: Future[Extracted] = Future()
        self._kernels: Future[Kernels] = Future()
        self._lowerer = lowerer or Lowerer()
        asked = (model, target)
        self._thread = threading.Thread(target=self._exchange, args=(asked,), daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._lowerer.process.pid

    def extracted(self) -> Extracted:
        """Wait for what a search needs; the rest is some hundred MB, and comes later.

        Raises as `kernels_of` does, and InfrastructureError where a signal ended the process.
        """
        return self._extracted.result()

    def result(self) -> Kernels:
        """Wait for the kernels; raises as `extracted` does."""
        return self._kernels.result()

    @property
    def problem(self) -> BaseException | None:
        """What `result` raises, None while nothing is known."""
        return self._kernels.exception() if self._kernels.done() else None

    def close(self) -> None:
        """End the process, if it still lowers. Idempotent."""
        self._lowerer.process.kill()
        self._thread.join()
        self._lowerer.close()

    def _exchange(self, asked: tuple[FixedModel, TargetSpec]) -> None:
        with self._lowerer.connection, self._lowerer.printed:
            try:
                wire.send(self._lowerer.connection, *asked_to(*asked))
                body, _ = wire.receive(self._lowerer.connection)
                extracted = _extracted_of(body)
                self._extracted.set_result(extracted)
                rest = wire.receive(self._lowerer.connection)
                self._lowerer.process.wait()
                self._kernels.set_result(kernels_from(extracted, *rest))
            except BaseException as error:
                problem = self._ended() if isinstance(error, OSError) else error
                for future in (self._extracted, self._kernels):
                    if not future.done():
                        future.set_exception(problem)

    def _ended(self) -> Exception:
        """Return the error of a process that ended without an answer."""
        status = self._lowerer.process.wait()
        self._lowerer.printed.seek(0)
        printed = self._lowerer.printed.read().decode(errors="replace")
        tail = printed.strip()[-_TAIL_CHARS:] or "nothing"
        if status >= 0:
            return RuntimeError(f"lowering the model failed; its process printed: {tail}")
        name = signal.Signals(-status).name
        return InfrastructureError(
            f"{name} ended the process that lowers the model; where memory has run out, that is "
            f"SIGKILL. It printed: {tail}"
        )


def _extracted_of(body: dict[str, Any]) -> Extracted:
    for name, level, message in body["log"]:
        logging.getLogger(name).log(level, "%s", message)
    if "error" in body:
        kind: Any = getattr(errors, body["error"])
        raise kind(body["message"])
    return extracted_from(body)
