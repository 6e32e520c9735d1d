"""The process of a slice: loads libraries, runs them, answers over a Unix socket.

    python -m tunerd.runner.process --socket PATH --device cuda|cpu [--cores 0,1] [--leash]

It listens on PATH, serves exactly one connection, and exits by itself when that ends: a GPU client
that ends by itself disturbs nobody. On a leash it ends when its standard input does, in the middle
of a kernel, too: for clients that share their GPU with nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from tunerd.runner.preload import preload
from tunerd.system import wire
from tunerd.system.spawn import end_with

_FIRST_CONNECTION_SECS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description="one slice's runner; started by tunerd")
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--device", required=True, choices=("cuda", "cpu"))
    parser.add_argument("--cores", type=_cores, default=())
    parser.add_argument("--leash", action="store_true")
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole terminal; whoever started this runner decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.cores:  # before any thread is started: each inherits it
        os.sched_setaffinity(0, arguments.cores)
    if arguments.leash:
        end_with(0, 1)
    listener = socket.socket(socket.AF_UNIX)
    # Bound under another name first: a path that exists can be connected to.
    hidden = f"{arguments.socket}.new"
    listener.bind(hidden)
    os.chmod(hidden, 0o600)
    listener.listen(1)
    os.rename(hidden, arguments.socket)
    since = time.monotonic()
    preload(arguments.device)
    from tunerd.runner.service import RunnerService, say_secs

    say_secs("imports", since)
    listener.settimeout(_FIRST_CONNECTION_SECS)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        sys.exit("nobody connected")
    finally:
        listener.close()
        arguments.socket.unlink(missing_ok=True)
    connection.settimeout(None)
    with connection, contextlib.suppress(wire.Closed, BrokenPipeError, ConnectionResetError):
        RunnerService(connection, arguments.device, arguments.cores).serve()


def _cores(text: str) -> tuple[int, ...]:
    return tuple(int(c) for c in text.split(","))


if __name__ == "__main__":
    main()
