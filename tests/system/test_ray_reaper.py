"""Which processes belong to a private cluster, when Ray itself can no longer say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.tune_process import GONE_SECS
from tunerd.cluster import reaper
from tunerd.cluster.reaper import _of_cluster, reaping
from tunerd.errors import InfrastructureError
from tunerd.system.processes import ProcessId, children, command

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


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessId]:
    """Stand in for the raylet of this process's cluster."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    with subprocess.Popen([sys.executable, "-c", SLEEP], stdin=subprocess.PIPE) as process:
        found = ProcessId.of(process.pid)
        assert found is not None
        monkeypatch.setattr(reaper, "_raylet_and_agents", lambda driver: [found])
        yield found
        process.kill()


def test_it_works_in_a_folder_whose_modules_have_names_of_pythons(
    raylet: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "types.py").write_text("raise RuntimeError('not the one of Python')\n")
    (tmp_path / "default_worker.py").write_text(SLEEP)
    worker_command = [sys.executable, "-P", str(tmp_path / "default_worker.py"), "--worker"]
    with subprocess.Popen(worker_command, stdin=subprocess.PIPE) as worker:
        monkeypatch.chdir(tmp_path)
        with reaping() as hold:
            hold()
            raylet.signal(signal.SIGKILL)
            assert worker.wait(GONE_SECS) == -signal.SIGKILL


def the_leash() -> ProcessId:
    """Return the process that reaps; as a program begins, it has no command for a moment."""
    until = time.monotonic() + GONE_SECS
    while True:
        found = [p for p in children(os.getpid()) if b"tunerd.cluster.reaper" in command(p)]
        if found or time.monotonic() > until:
            (leash,) = found
            return leash
        time.sleep(0.01)


def test_its_early_end_is_said(raylet: ProcessId) -> None:
    with reaping() as hold:
        leash = the_leash()
        leash.signal(signal.SIGKILL)
        leash.wait(GONE_SECS)
        with pytest.raises(InfrastructureError, match="has itself ended, with -9"):
            hold()
