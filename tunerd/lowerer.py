"""The process of a `Lowering`: gets a model, lowers it, and answers with its kernels.

    python -m tunerd.lowerer

Standard input is a socket (`slices.wire`, `lowering_messages`). The process ends when the other end
of it does, so with its parent, however that ends.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

from tunerd.errors import TunerdError
from tunerd.extraction import Selection, kernels_of
from tunerd.lowering_messages import asked_from, kernels_to
from tunerd.models.model import FixedModel
from tunerd.slices import wire
from tunerd.vocabulary import TargetSpec
from tunerd.watching.logs import collect
from tunerd.without_torch import keep_torch_from_tvm


def main() -> None:
    # They may reach a whole terminal or job; the parent decides when this ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_torch_from_tvm()
    connection = socket.socket(fileno=0)
    asked = asked_from(*wire.receive(connection))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    log = collect()
    body, blobs = _answer(*asked)
    wire.send(connection, {**body, "log": log}, blobs)
    os._exit(0)  # TVM takes its time to throw everything away


def _answer(
    model: FixedModel, target: TargetSpec, selection: Selection | None
) -> tuple[dict[str, Any], list[bytes]]:
    try:
        return kernels_to(kernels_of(model, target, selection))
    except TunerdError as error:
        return {"error": type(error).__name__, "message": str(error)}, []


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
