"""Which processes belong to a private cluster, when Ray itself can no longer say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunerd.cluster.ray_leash import _of_cluster

SLEEP = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("program", "token", "is_rays"),
    [
        ("default_worker.py", "ours", True),  # as Ray starts it, before it has a title
        ("dashboard/agent.py", "ours", True),
        ("runtime_env/agent/main.py", "ours", True),
        ("default_worker.py", "another cluster's", False),
        ("guard.py", "ours", False),  # a driver's children have the token, too
    ],
)
def test_workers_and_agents_are_found_from_their_first_moment(
    tmp_path: Path, program: str, token: str, is_rays: bool
) -> None:
    path = tmp_path / program
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SLEEP)
    with subprocess.Popen(
        [sys.executable, str(path), "--node-ip-address=127.0.0.1"],
        env=os.environ | {"RAY_AUTH_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (process.pid in [p.pid for p in _of_cluster("ours")]) == is_rays
        process.communicate()
