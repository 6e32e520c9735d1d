"""Which processes belong to a private cluster, when Ray itself can no longer say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunerd.cluster.ray_leash import _workers

SLEEP = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("program", "token", "is_worker"),
    [
        ("default_worker.py", "ours", True),  # as Ray starts it, before it has a title
        ("default_worker.py", "another cluster's", False),
        ("guard.py", "ours", False),  # a driver's children have the token, too
    ],
)
def test_workers_are_found_from_their_first_moment(
    tmp_path: Path, program: str, token: str, is_worker: bool
) -> None:
    path = tmp_path / program
    path.write_text(SLEEP)
    with subprocess.Popen(
        [sys.executable, str(path), "--node-ip-address=127.0.0.1"],
        env=os.environ | {"RAY_AUTH_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (process.pid in [w.pid for w in _workers("ours")]) == is_worker
        process.communicate()
