"""Worker processes of the lab, and the MPS daemon that they may be clients of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.colocation import workers
from lab.colocation.workers import Group, Worker, WorkerError, WorkerGone, close_all, wait_until
from tests.lib import ROOT
from tests.lib.fake_mps import FakeMps, left
from tunerd.slices.mps.control import MpsControl

SEES_THE_LAB = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
BODY = """
import os, sys, time
from lab.colocation.workers import serve, wait_until

def prepare(asked):
    print("a library says hello")
    return {"labels": ["x"]}

def sample(asked):
    if asked["label"] == sys.argv[1]:
        raise ValueError("not this one")
    if asked["label"] == "end":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    wait_until(asked["at"])
    return {"began": time.monotonic() - asked["at"]}

serve({"prepare": prepare, "sample": sample})
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(
        [
            Worker([sys.executable, "-c", BODY, bad], SEES_THE_LAB, tmp_path / f"{bad}.txt")
            for bad in ("one", "two")
        ]
    )
    yield made
    close_all([made])


def test_a_group_begins_at_one_moment(group: Group) -> None:
    assert group.prepare(60) == [{"labels": ["x"]}] * 2
    assert all(0 <= said["began"] < 1 for said in group.sample("x", "closed", 0.1))


def test_what_one_worker_cannot_do_leaves_the_group_in_step(group: Group) -> None:
    group.prepare(60)
    with pytest.raises(WorkerError, match="ValueError: not this one") as raised:
        group.sample("two", "closed", 0.1)
    assert not isinstance(raised.value, WorkerGone)
    assert len(group.sample("x", "closed", 0.1)) == 2


def test_a_worker_that_ended_is_named_with_its_last_words(group: Group) -> None:
    group.prepare(60)
    with pytest.raises(WorkerGone, match="exit code 3, out of luck"):
        group.sample("end", "closed", 0.1)


def test_a_process_that_is_late_is_ended_and_its_last_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "import time; print('loading m3', flush=True); time.sleep(60)"
    monkeypatch.setattr(workers, "here", lambda *_: [sys.executable, "-c", body])
    with pytest.raises(WorkerError, match=r"(?s)did not end within 1 s: loading m3"):
        workers.found_by("any", log=tmp_path / "logs" / "any.txt", secs=1.0)


def test_a_worker_waits_for_its_moment() -> None:
    at = time.monotonic() + 0.01
    wait_until(at)
    assert time.monotonic() >= at


HOLDER = """
import time
from types import SimpleNamespace
from lab.colocation.workers import mps_daemon
from tunerd.system import host

gpu = SimpleNamespace(uuid="GPU-11111111-2222-3333-4444-555555555555")
host.facts = lambda: SimpleNamespace(gpus=[gpu])
with mps_daemon() as environment:
    print(environment(None)["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(600)
"""


def test_an_mps_daemon_ends_with_the_script_that_is_told_to_end() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, for paths of sockets
        mps = FakeMps(Path(folder))
        environment = {**os.environ, **SEES_THE_LAB, "PATH": mps.path, "TMPDIR": folder}
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        pipe = Path(holder.stdout.readline().strip())
        daemon = MpsControl(pipe, pipe.parent / "log", "").processes()
        assert daemon
        holder.send_signal(signal.SIGTERM)
        assert holder.wait(60) == 128 + signal.SIGTERM
        assert left(daemon) == []
