"""A disk that is full ends a run and blames no candidate for it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import onnx
import psutil
import pytest

from tests.lib import PYTHON_PATH
from tests.lib.build_fixtures import default_of, matmul_task
from tests.lib.models import conv_net
from tests.lib.tune_process import Run
from tunerd.artifacts import compile as artifact
from tunerd.builder.build import build_candidate
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import DiskError, ExitCode
from tunerd.records import Store
from tunerd.studies.matrix.folder import read
from tunerd.studies.matrix.records import CellDone
from tunerd.system import files
from tunerd.vocabulary import Failure


def test_a_build_without_room_is_no_failure_of_its_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = matmul_task()
    monkeypatch.setattr(files, "_ROOM_BYTES", 1 << 80)
    with pytest.raises(DiskError, match="No space left on device; make room"):
        build_candidate(task, default_of(task))


def test_a_linker_without_room_is_no_failure_of_its_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ld").write_text(
        "#!/bin/sh\necho 'ld: final link failed: No space left on device' >&2\nexit 1\n"
    )
    (tmp_path / "ld").chmod(0o755)
    from tunerd.builder import library

    monkeypatch.setattr(library, "linker", lambda: library._Linker(str(tmp_path / "ld"), ()))
    task = matmul_task()
    with pytest.raises(DiskError, match="No space left on device"):
        build_candidate(task, default_of(task))


def test_what_is_said_of_a_disk_keeps_the_notes_of_its_error(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
    full.add_note("the logs are in runs/a")
    with pytest.raises(DiskError) as said, files.disk_errors_said(tmp_path):
        raise full
    assert said.value.__notes__ == ["the logs are in runs/a"]


def runners(run: Run) -> list[psutil.Process]:
    return [p for p in run.processes() if "tunerd.runner.process" in p.cmdline()]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of others are Linux's")
@pytest.mark.nightly
def test_a_run_whose_runners_cannot_write_ends_and_goes_on_with_room(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    tuned = Run(tmp_path / "run", tmp_path / "net.onnx", ("--trials", "24", "--tuners", "1"))
    tuned.start()
    tuned.wait_for(lambda: tuned.measured() >= 8)
    for runner in runners(tuned):
        resource.prlimit(runner.pid, resource.RLIMIT_FSIZE, (1024, 1024))
    code, _, said = tuned.end()
    assert code == ExitCode.DISK_FULL, said
    assert "cannot be written: File too large; make room" in said
    assert not any(isinstance(r.result, Failure) for r in tuned.records())
    tuned.start()
    code, _, said = tuned.end()
    assert code < 10, said
    assert not any(isinstance(r.result, Failure) for r in tuned.records())


@pytest.mark.slow
@pytest.mark.usefixtures("kept_cluster")
def test_a_run_without_room_for_its_model_ends_without_one_and_goes_on_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, value: object) -> NoReturn:  # as the manifest of the model is written
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    onnx.save(conv_net(), tmp_path / "net.onnx")
    out = tmp_path / "run"
    options = ["tune", str(tmp_path / "net.onnx"), "--cpu-pct", "100", "--trials", "4"]
    options += ["--slice", "simulated", "--tuners", "1", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(artifact, "write_json", full)
        code, said = run(app, options), capsys.readouterr().err
    assert code == ExitCode.DISK_FULL, said
    assert "manifest.json cannot be written: No space left on device; make room" in said
    assert not (out / "artifact").exists()
    assert not (out / "trials").exists()
    with Store.read(out) as store:
        before = {r.trial_id: r.result for r in store.records()}
    assert run(app, options) < ExitCode.BAD_INPUT, capsys.readouterr().err
    assert (out / "artifact" / "manifest.json").is_file()
    with Store.read(out) as store:
        assert {r.trial_id: r.result for r in store.records()} == before


# The program, whose files cannot grow from the second cell of a matrix on.
_FULL_AT_A_CELL = """
import resource
from tunerd.cli import main
from tunerd.studies.matrix.records import CellDone
from tunerd.studies.matrix.folder import MatrixFolder
add = MatrixFolder.add
def add_to_a_full_disk(kept, done):
    if isinstance(done, CellDone) and any(kept.of(CellDone)):
        size_bytes = (kept.root / "done.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 60, resource.RLIM_INFINITY))
    add(kept, done)
MatrixFolder.add = add_to_a_full_disk
main()
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_matrix_without_room_for_a_cell_ends_and_goes_on_with_room(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    out = tmp_path / "m"
    options = ["matrix", str(tmp_path / "net.onnx"), "--shares", "50,100", "--trials", "4"]
    options += [
        "--rounds",
        "1",
        "--slice",
        "simulated",
        "--tuners",
        "1",
        "--out",
        str(out),
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    full = subprocess.run(
        [sys.executable, "-c", _FULL_AT_A_CELL, *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert full.returncode == ExitCode.DISK_FULL, full.stderr
    assert "cannot be written: File too large; make room" in full.stderr
    before = read(out).lines
    assert sum(isinstance(line, CellDone) for line in before) == 1
    again = subprocess.run(
        [sys.executable, "-m", "tunerd", *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert again.returncode == 0, again.stderr
    after = read(out).lines
    assert after[: len(before)] == before
    assert sum(isinstance(line, CellDone) for line in after) == 2
