"""The process of a `Lowerer`: gets a model, lowers it, and answers with its kernels.

    python -m tunerd.frontend.worker

Standard input is a socket (`system.wire`, `frontend.messages`). The process ends when the other end
of it does, so with its parent, however that ends.
"""

from __future__ import annotations

import os
import socket

from tunerd.errors import TunerdError
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.messages import asked_from, extracted_to, kernels_to
from tunerd.frontend.relax.lowering import import_all
from tunerd.system import spawn, wire
from tunerd.system.logs import collect
from tunerd.system.without_torch import keep_torch_from_tvm


def main() -> None:
    keep_torch_from_tvm()
    connection = socket.socket(fileno=0)
    import_all()
    asked = asked_from(*wire.receive(connection))
    spawn.end_with(connection.fileno(), 1)
    log = collect()
    try:
        kernels = kernels_of(*asked)
    except TunerdError as error:
        said = {"error": type(error).__name__, "message": str(error), "log": log}
        wire.send(connection, said)
    else:
        wire.send(connection, {**extracted_to(kernels), "log": log})
        wire.send(connection, *kernels_to(kernels))
    os._exit(0)  # TVM takes its time to throw everything away


if __name__ == "__main__":
    main()
