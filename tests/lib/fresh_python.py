"""Scripts in a Python process of their own, in which nothing was imported before."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.lib import PYTHON_PATH


def run_python(
    script: str, *, cores: set[int] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": PYTHON_PATH, "PATH": os.environ["PATH"], **environment},
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        capture_output=True,
        text=True,
        check=False,
    )
