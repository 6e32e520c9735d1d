"""Lower a model in a process of its own, beside whatever its run starts meanwhile.

    python -m tunerd.frontend.process

is the other end: its standard input is a socket (`system.wire`), it gets a model, lowers it, and
tells what it extracted first: a search can begin while the weights are on their way.

TVM reads variables of the environment while it lowers, and Ray sets some while it starts: a process
that does both at once may crash (setenv(3) is not thread-safe).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import IO, Any, Self

from tunerd import errors
from tunerd.errors import InfrastructureError, TunerdError
from tunerd.frontend.given import graph_from
from tunerd.frontend.kernels import Extracted, Kernels, kernels_of
from tunerd.frontend.model import FixedModel
from tunerd.frontend.relax.lowering import Lowered, import_all
from tunerd.system import spawn, wire
from tunerd.system.codec import arrays_from, arrays_to, value_from
from tunerd.system.logs import collect
from tunerd.system.without_torch import keep_torch_from_tvm
from tunerd.vocabulary import Graph, Model, Packed, TargetSpec, to_json

_TAIL_CHARS = 4000


class Lowerer:
    """A process that lowers one model. From its start on it imports what that takes, seconds.

    Close it, or use it as a context manager.
    """

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        self.printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs, _deaf_children():
            self.process = spawn.start(
                "tunerd.frontend.process",
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
        self._thread = threading.Thread(target=self._exchange, args=(model, target), daemon=True)
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

    def _exchange(self, model: FixedModel, target: TargetSpec) -> None:
        with self._lowerer.connection, self._lowerer.printed:
            try:
                body = {"model": to_json(model), "target": to_json(target)}
                packed = model.graph.packed()
                body |= {"graph": model.graph.kind, "key": packed.key}
                _send_file(self._lowerer.connection, packed.fd)
                wire.send(self._lowerer.connection, body, [packed.content])
                del packed
                body, _ = wire.receive(self._lowerer.connection)
                extracted = _extracted_of(body)
                self._extracted.set_result(extracted)
                rest = wire.receive(self._lowerer.connection)
                self._lowerer.process.wait()
                self._kernels.set_result(kernels_from(extracted, model.graph, *rest))
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


def _send_file(connection: socket.socket, fd: int | None) -> None:
    """Send an open file, or that there is none."""
    if fd is None:
        connection.sendall(b"\0")
    else:
        socket.send_fds(connection, [b"\0"], [fd])


def _extracted_of(body: dict[str, Any]) -> Extracted:
    for name, level, message in body["log"]:
        logging.getLogger(name).log(level, "%s", message)
    if "error" in body:
        kind: Any = getattr(errors, body["error"])
        raise kind(body["message"])
    return value_from(Extracted, body)


def kernels_from(
    extracted: Extracted, graph: Graph, body: dict[str, Any], blobs: Sequence[bytearray]
) -> Kernels:
    """Return the kernels of what was extracted, of the message that came after it.

    `graph` is the model's as its author wrote it, which is at hand: the simpler one stays where it
    was made.
    """
    weights = arrays_from(body["weights"], blobs)
    return Kernels(
        extracted.tasks,
        extracted.touched_bytes,
        value_from(Model, body["model"], graph=graph),
        value_from(Lowered, body["lowered"], weights=weights),
    )


# --- the process -------------------------------------------------------------------------------


def main() -> None:
    """Lower the model that comes on standard input; end when the other end of it does."""
    keep_torch_from_tvm()
    connection = socket.socket(fileno=0)
    import_all()
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    body, blobs = wire.receive(connection)
    spawn.end_with(connection.fileno(), 1)
    log = collect()
    try:
        kernels = _kernels(body, blobs, *files)
    except TunerdError as error:
        said = {"error": type(error).__name__, "message": str(error), "log": log}
        wire.send(connection, said)
    else:
        tasks = [asdict(task) for task in kernels.tasks]  # with what to_json leaves out
        extracted = {"tasks": tasks, "touched_bytes": kernels.touched_bytes}
        wire.send(connection, {**extracted, "log": log})
        weights, arrays = arrays_to(kernels.lowered.weights)
        lowered = {n: getattr(kernels.lowered, n) for n in ("mod_json", "num_inputs", "notes")}
        rest = {"model": to_json(kernels.model), "lowered": lowered, "weights": weights}
        wire.send(connection, rest, arrays)
    os._exit(0)  # TVM takes its time to throw everything away


def _kernels(body: dict[str, Any], blobs: list[bytearray], fd: int | None = None) -> Kernels:
    """Lower a model, and keep nothing of it on the way: it may be most of the memory."""
    target = value_from(TargetSpec, body["target"])
    graph = [graph_from(body["graph"], Packed(bytes(blobs.pop()), body["key"], fd))]
    return kernels_of(value_from(FixedModel, body["model"], graph=graph.pop()), target)


if __name__ == "__main__":
    main()
