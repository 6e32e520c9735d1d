"""Start processes of this package, and end with whoever has started this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def python_path() -> str:
    """Return the PYTHONPATH of a child that finds this package in whatever folder it starts."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment for a child that finds this package, with some variables changed."""
    return {**os.environ, "PYTHONPATH": python_path(), **(changes or {})}


def start(
    module: str, *arguments: str, changes: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a module of this package as a program.

    Args:
        changes: variables of the environment that are not as ours.
        options: of Popen.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment(changes),
        cwd="/",  # no module of the user's folder is taken for one of Python's
        **options,
    )


def end_with(descriptor: int, exit_status: int) -> None:
    """Have this process end, at once, when a pipe or socket does: its other end is our parent's.

    It ends then however the parent does. Kernels and compilers run without the GIL, so the thread
    that waits gets its turn.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):  # a socket that was reset has ended, too
            while os.read(descriptor, 1):
                pass
        os._exit(exit_status)

    threading.Thread(target=wait, daemon=True).start()
