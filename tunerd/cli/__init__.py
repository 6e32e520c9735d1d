"""The command line: a file per command."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress


def main() -> None:
    """Run `tunerd` with the arguments of this process."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first to be registered is the last to be called
    from tunerd.cli.app import app
    from tunerd.cli.errors import run
    from tunerd.without_torch import keep_torch_from_tvm

    keep_torch_from_tvm()
    codes.append(run(app, sys.argv[1:]))
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """End this process with its exit code while a thread of it is still in TVM.

    A run that ends early does not wait for the model to be lowered. Python (before 3.14) ends the
    thread when it comes back from C++, by unwinding frames of TVM that must not be unwound, which
    aborts the process: the exit code would be SIGABRT's.
    """
    if codes and any(t is not threading.main_thread() for t in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody reads
                stream.flush()
        os._exit(codes[0])
