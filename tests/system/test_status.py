"""`tunerd status`: a run seen from another terminal, alive, ended, killed, or half made."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from rich.console import Console

from tests.lib.models import conv_net
from tests.lib.record_samples import FACTS, TASK, candidate, measurement
from tests.lib.store_places import proposed
from tests.lib.tune_process import Run
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.coordinator.budget import Limits
from tunerd.coordinator.coordinator import Coordinator
from tunerd.errors import ExitCode, FolderError, Interrupted
from tunerd.records import Store
from tunerd.records.paths import Paths, holder
from tunerd.report.status import status_page
from tunerd.runs.folder import RunFolder
from tunerd.runs.progress import RunProgress
from tunerd.telemetry.progress import ProgressState
from tunerd.telemetry.run_status import Life, status_of
from tunerd.telemetry.status_file import Place, StatusFile, read_status
from tunerd.vocabulary import Failure, Kind, Stage, default_candidate

Captured = pytest.CaptureFixture[str]
STATE = ProgressState(5.0, 600.0, 1, 0, 100, 1, 2, 2, 3, (), "tuning", "a message", 4.0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that is alive: a default, two trials that ended, one that runs and one that waits."""
    facts = dataclasses.replace(FACTS, settings={"trials": 100, "budget_secs": 600.0})
    with RunFolder.open(tmp_path / "run", facts=facts) as opened:
        store = opened.store
        store.register_tasks([TASK])
        ids = proposed(store, [candidate(n) for n in range(4)])
        store.start(ids[:3], "cpu-0-0")
        store.finish_all({ids[0]: measurement(2e-3)})
        store.finish_all({ids[1]: Failure(Stage.RUN, Kind.CRASH, "[red]it\x1b[2J fell")})
        yield opened


def status(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tunerd", "status", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


# --- whether it lives --------------------------------------------------------------------------


def test_a_run_that_has_its_lock_is_alive_with_what_it_told(folder: RunFolder) -> None:
    StatusFile(folder.paths).tell(STATE)
    seen = status_of(folder.paths.root)
    assert (seen.life, seen.pid) == (Life.ALIVE, os.getpid())
    shown = seen.progress
    assert (shown.phase, shown.message, shown.trials_budget) == ("tuning", "a message", 100)
    assert (shown.trials_done, shown.trials_failed, seen.waiting) == (2, 1, 2)
    assert (shown.budget_secs, shown.budget_end_secs) == (600.0, 604.0)
    assert (shown.slices_busy, shown.slices, shown.tuners_busy, shown.tuners) == (1, 2, 2, 3)
    assert seen.trials_per_sec


def test_the_rate_is_of_this_session_s_search(folder: RunFolder) -> None:
    folder.close()
    with RunFolder.open(folder.paths.root, facts=FACTS) as resumed:
        file = StatusFile(resumed.paths)
        file.tell(dataclasses.replace(STATE, elapsed_secs=8.0, search_began_secs=6.0))
        assert status_of(resumed.paths.root).trials_per_sec is None
        waiting = [r.candidate.candidate_id for r in resumed.store.requeue_unfinished()]
        resumed.store.start(waiting, "cpu-0-0")
        resumed.store.finish_all(dict.fromkeys(waiting, measurement(2e-3)))
        seen = status_of(resumed.paths.root)
        assert seen.trials_per_sec == pytest.approx(len(waiting) / (seen.elapsed_secs - 6.0))
        file.tell(dataclasses.replace(STATE, phase="finishing"))
        assert status_of(resumed.paths.root).trials_per_sec is None


def test_a_run_that_has_told_nothing_yet_is_starting(folder: RunFolder) -> None:
    assert status_of(folder.paths.root).life is Life.STARTING


@pytest.mark.parametrize(
    ("error", "life", "said"),
    [
        (None, Life.FINISHED, ""),
        (Interrupted("stopped on request"), Life.STOPPED, "stopped on request"),
        (KeyboardInterrupt(), Life.STOPPED, ""),
        (FolderError("the reason"), Life.FAILED, "the reason"),
        (ZeroDivisionError("x"), Life.FAILED, "ZeroDivisionError: x"),
    ],
)
def test_a_run_that_ended_says_how(
    error: BaseException | None, life: Life, said: str, folder: RunFolder
) -> None:
    file = StatusFile(folder.paths)
    file.tell(STATE)
    file.end(error)
    folder.close()
    seen = status_of(folder.paths.root)
    assert (seen.life, seen.told.end_message if seen.told else None) == (life, said)
    assert seen.progress.tuners_busy == 0


def test_a_run_whose_process_is_gone_without_an_end_was_killed(folder: RunFolder) -> None:
    StatusFile(folder.paths).tell(STATE)
    folder.close()
    assert status_of(folder.paths.root).life is Life.KILLED


def test_another_process_with_the_pid_of_a_killed_run_is_not_taken_for_it(
    folder: RunFolder,
) -> None:
    StatusFile(folder.paths).tell(STATE)
    folder.close()
    folder.paths.lock.write_text(f"{os.getppid()}\n")
    assert holder(folder.paths) is None
    assert status_of(folder.paths.root).life is Life.KILLED


def test_a_run_on_another_machine_is_not_called_dead(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    StatusFile(folder.paths).tell(STATE)
    folder.close()
    monkeypatch.setattr(Place, "here", lambda: Place("another", "boot", "pid:[1]"))
    assert status_of(folder.paths.root).life is Life.ELSEWHERE


def test_a_machine_that_was_started_again_has_killed_its_runs(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Place.here()
    StatusFile(folder.paths).tell(STATE)
    folder.close()
    monkeypatch.setattr(Place, "here", lambda: dataclasses.replace(here, boot_id="another boot"))
    assert status_of(folder.paths.root).life is Life.KILLED


def test_what_the_session_before_told_is_not_taken_for_this_one_s(folder: RunFolder) -> None:
    file = StatusFile(folder.paths)
    file.tell(STATE)
    file.end(None)
    folder.close()
    with RunFolder.open(folder.paths.root, facts=FACTS):
        assert status_of(folder.paths.root).life is Life.STARTING


def test_a_run_that_was_copied_and_is_nobody_s_is_idle(folder: RunFolder, tmp_path: Path) -> None:
    folder.close()
    (tmp_path / "copy").mkdir()
    folder.paths.store.rename(tmp_path / "copy" / folder.paths.store.name)
    assert status_of(tmp_path / "copy").life is Life.IDLE


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1}', "\x00"])
def test_a_status_file_that_says_nothing_costs_the_phase_alone(
    content: str, folder: RunFolder
) -> None:
    folder.paths.status.write_text(content)
    assert read_status(folder.paths) is None
    assert status_of(folder.paths.root).progress.trials_done == 2


# --- the writer is not disturbed ---------------------------------------------------------------


def test_a_run_may_start_and_write_while_it_is_looked_at(folder: RunFolder) -> None:
    root = folder.paths.root
    with Store.read(root):  # a look that lasts
        (new,) = proposed(folder.store, [candidate(9)])
        folder.store.start([new], "cpu-0-0")
        folder.store.finish_all({new: measurement(1e-3)})
    assert status_of(root).progress.trials_done == 3


def test_looking_takes_no_lock_and_writes_nothing(folder: RunFolder) -> None:
    StatusFile(folder.paths).tell(STATE)
    root = folder.paths.root
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*") if "-shm" not in p.name}
    status(root)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*") if "-shm" not in p.name} == before
    folder.close()
    status_of(root)
    with open(folder.paths.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_disk_that_refuses_the_status_ends_no_run(folder: RunFolder) -> None:
    folder.paths.status.mkdir()
    StatusFile(folder.paths).tell(STATE)
    assert status_of(folder.paths.root).life is Life.STARTING


def test_the_status_is_written_once_a_second_and_at_news(folder: RunFolder) -> None:
    file, path = StatusFile(folder.paths), folder.paths.status
    file.tell(STATE)
    first = path.read_text()
    file.tell(dataclasses.replace(STATE, tuners_busy=0))
    assert path.read_text() == first
    file.tell(dataclasses.replace(STATE, message="another"))
    assert path.read_text() != first


# --- what is no run, or not yet ----------------------------------------------------------------


def test_a_store_that_is_only_just_being_made_is_a_start(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        assert status_of(tmp_path).life is Life.STARTING
        paths.store.touch()
        assert status_of(tmp_path).life is Life.STARTING
    with pytest.raises(FolderError, match="is no store of tunerd"):
        status_of(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE trials SET median_secs = 'fast' WHERE state = 'measured'",
        "UPDATE trials SET median_secs = -1 WHERE state = 'measured'",
        "UPDATE trials SET median_secs = 9e999 WHERE state = 'measured'",
        "UPDATE trials SET message = x'ff' WHERE state = 'failed'",
        "UPDATE tasks SET weight = 'heavy'",
        "UPDATE sessions SET opened_at = 'yesterday'",
    ],
)
def test_a_store_that_no_run_has_written_so_is_refused(
    damage: str, folder: RunFolder, tmp_path: Path
) -> None:
    folder.store.close()
    copy = shutil.copytree(folder.paths.root, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(Paths(copy).store)) as other, other:
        assert other.execute(damage).rowcount == 1
    with pytest.raises(FolderError, match="holds what is no record of a run"):
        status_of(copy)


def make(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).touch()
    return path


def test_what_is_no_run_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").touch()
    (tmp_path / "a.onnx").touch()
    cases = {
        tmp_path / "nowhere": "there is no folder",
        tmp_path / "a.tar.gz": "unpack it with `tunerd records unpack`",
        tmp_path / "a.onnx": "is a file and no run folder",
        make(tmp_path / "empty"): "is empty and is no run",
        make(tmp_path / "others", "x", "y"): "holds 2 other files",
        make(tmp_path / "artifact", "manifest.json", "model.so"): "is an artifact",
        make(tmp_path / "runs", "one/store.sqlite"): f"such as {tmp_path / 'runs' / 'one'}",
        make(tmp_path / "killed", "tunerd.lock"): "killed before it began",
    }
    for path, said in cases.items():
        with pytest.raises(FolderError) as found:
            status_of(path)
        assert said in str(found.value), path


def test_no_run_is_an_exit_code_and_a_sentence(tmp_path: Path, capsys: Captured) -> None:
    assert run(app, ["status", str(tmp_path)]) == ExitCode.BAD_FOLDER
    assert "is empty and is no run" in capsys.readouterr().err
    assert run(app, ["status", str(tmp_path), "--json", "--watch"]) == ExitCode.BAD_INPUT


# --- what people see ---------------------------------------------------------------------------


def page(folder: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(status_page(status_of(folder), whole=True))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")


def test_the_page_looks_as_the_run_s_own_display(folder: RunFolder) -> None:
    StatusFile(folder.paths).tell(STATE)
    text = page(folder.paths.root)
    assert f"alive, pid {os.getpid()}" in text
    assert "tuning  5" in text
    assert "2 of 100 trials, 1 failed" in text
    assert "slices 1/2 busy, tuners 2/3" in text
    assert TASK.name in text
    assert "2.00 ms" in text
    assert "2 trials waiting or running" in text


@pytest.mark.parametrize(("search_secs", "best_secs"), [(2e-3, 1e-3), (5e-4, 5e-4)])
def test_a_run_shows_the_best_times_that_its_status_and_its_store_have(
    search_secs: float, best_secs: float, tmp_path: Path
) -> None:
    told: list[ProgressState] = []
    telemetry: Any = SimpleNamespace(update=told.append)
    plan: Any = SimpleNamespace(settings=SimpleNamespace(budget_secs=None, trials=1), layout=None)
    membership: Any = SimpleNamespace(slice_ids=(), tuner_ids=())
    with RunFolder.open(tmp_path / "run", facts=FACTS) as opened:
        store = opened.store
        store.register_tasks([TASK])
        ids = proposed(store, [default_candidate(TASK), candidate(1)])
        store.start(ids, "cpu-0-0")
        store.finish_all(dict(zip(ids, map(measurement, (1e-3, search_secs)), strict=True)))
        coordinator = Coordinator([TASK], Limits(trials=1))
        ended = [(r.candidate, r.result) for r in store.records() if r.result is not None]
        coordinator.restore(ended, [])
        RunProgress(plan, telemetry, started=0.0).show("", coordinator, membership)
        of_store = store.best(TASK.task_id)
        assert of_store is not None
        (of_run,), (of_status,) = (
            state.tasks for state in (*told, status_of(opened.paths.root).progress)
        )
        found = (of_run.best_secs, of_status.best_secs, of_store.run_secs)
        assert found == (best_secs, best_secs, best_secs)


@pytest.mark.parametrize("end", [None, Interrupted("stopped on request; go on"), "killed"])
def test_a_run_that_nobody_works_at_has_no_workers_and_no_trials_under_way(
    end: Interrupted | str | None, folder: RunFolder
) -> None:
    file = StatusFile(folder.paths)
    file.tell(STATE)
    if end != "killed":
        file.end(end)
    folder.close()
    text = page(folder.paths.root)
    assert "2 of 100 trials, 1 failed" in text
    assert not any(word in text for word in ("waiting", "busy", "tuners", "left"))
    if isinstance(end, Interrupted):
        assert re.search(r"stopped [\d.]+ s ago: on request; go on", " ".join(text.split()))


def test_nothing_is_cut_off_where_there_is_no_terminal(
    folder: RunFolder, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    message = "what goes on " * 20
    StatusFile(folder.paths).tell(dataclasses.replace(STATE, message=f"{message}at last"))
    assert run(app, ["status", str(folder.paths.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f"{message}at last") for line in lines)
    assert max(map(len, lines)) < 400


def test_failures_are_shown_and_reach_no_terminal_as_they_are(folder: RunFolder) -> None:
    text = page(folder.paths.root)
    assert "crash in run: [red]it" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [1, 10, 40, 200])
def test_the_page_fits_any_terminal(width: int, folder: RunFolder) -> None:
    StatusFile(folder.paths).tell(STATE)
    assert max(map(len, page(folder.paths.root, width).splitlines())) <= width


def test_watching_ends_with_the_run(folder: RunFolder, capsys: Captured) -> None:
    file = StatusFile(folder.paths)
    file.tell(STATE)
    file.end(None)
    folder.close()
    assert run(app, ["status", str(folder.paths.root), "--watch"]) == 0
    assert capsys.readouterr().out.startswith("finished: finished 5")


# --- a real run --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_a_real_run_is_seen_alive_then_killed_then_finished(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    options = ("--slice", "simulated", "--budget", "1h")  # it goes on while its status is asked for
    tuned = Run(tmp_path / "run", tmp_path / "net.onnx", options)
    tuned.start()
    tuned.wait_for(lambda: tuned.measured() >= 4)
    seen = status(tuned.folder)
    assert tuned.process is not None
    assert (seen["life"], seen["pid"], seen["phase"]) == ("alive", tuned.process.pid, "tuning")
    assert seen["trials"]["done"] >= 4
    assert seen["slices"]["of"] == 2
    assert seen["cap_proofs"] == 2
    assert tuned.kill() == []
    assert status(tuned.folder)["life"] == "killed"
    trials = len(tuned.records()) + 4
    tuned.options = ("--slice", "simulated", "--tuners", "1", "--trials", str(trials))
    tuned.start()
    code, out, err = tuned.end()
    assert code < 10, err
    seen, outcome = status(tuned.folder), json.loads(out)
    assert (seen["life"], seen["sessions"], seen["trials"]["done"]) == ("finished", 2, trials)
    assert seen["model"]["verdict"] == outcome["end_to_end"]["verdict"]
    told = [json.loads(x) for x in (tuned.folder / "logs" / "tunerd.jsonl").open()]
    assert {x["run"] for x in told} == {str(tuned.folder)}
    bests = [x for x in told if x["message"].startswith("best of its task")]
    assert all(x["trial"] and x["task"] and x["slice"] for x in bests)
    assert bests
    assert sum(x["message"] == "the run begins" for x in told) == 2
    assert told[-1]["message"] == "the run ends"
