"""Whole runs through a real local Ray: killed, interrupted, robbed of workers, and finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import onnx
import psutil
import pytest

from tests.lib.models import conv_net
from tests.lib.tune_process import Run, still_there
from tunerd.artifacts.manifest import read_manifest
from tunerd.cli.app import app
from tunerd.cli.errors import run as run_command
from tunerd.cluster.membership import MAX_FAULTS, MAX_RESTARTS
from tunerd.errors import ExitCode, InfrastructureError
from tunerd.frontend import process
from tunerd.records import Store
from tunerd.report.page import report_page
from tunerd.report.run_view import run_view_of
from tunerd.slices.simulated import FAULTS_VARIABLE, SimulatedSlice
from tunerd.system import host
from tunerd.vocabulary import (
    Activity,
    Failure,
    Kind,
    Measurement,
    Phase,
    Record,
    SliceRequest,
    TrialState,
)

Captured = pytest.CaptureFixture[str]
TRIALS = 20
FINISHED = {ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL}

pytestmark = pytest.mark.skipif(
    host.facts().usable_cores < 2, reason="these runs use two slices of a core each"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    onnx.save(conv_net(), path)
    return path


MakeRun = Callable[..., Run]


@pytest.fixture(scope="module")
def make_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    made: list[Run] = []

    def make(*options: str, trials: int = TRIALS) -> Run:
        folder = tmp_path_factory.mktemp("runs") / "run"
        made.append(Run(folder, model, ("--tuners", "1", *options, "--trials", str(trials))))
        return made[-1]

    yield make
    for run in made:
        if run.process is not None and run.process.poll() is None:
            run.kill()


def check_finished(run: Run, code: int, out: str, err: str) -> None:
    assert code in FINISHED, err
    assert json.loads(out)["exit_code"] == code
    assert read_manifest(run.folder / "artifact")["files"]
    with Store.read(run.folder) as store:
        assert (run.folder / "report.html").read_text() == report_page(run_view_of(store))


# --- kill -9 -----------------------------------------------------------------------------------


@dataclass
class Killed:
    """A run that was killed while it searched, again among its finalists, and then went on."""

    run: Run
    left: list[list[psutil.Process]] = field(default_factory=list)
    ended: list[dict[int, Record]] = field(default_factory=list)
    outcomes: int = 0
    last: tuple[int, str, str] = (-1, "", "")


@pytest.fixture(scope="module")
def killed(make_run: MakeRun) -> Killed:
    run = make_run()
    found = Killed(run)
    for moment in (lambda: run.measured() >= 8, lambda: run.measured() and run.outcomes() >= 1):
        run.start()
        run.wait_for(moment)  # type: ignore[arg-type]
        found.left.append(run.kill())
        ended = {r.trial_id: r for r in run.records() if r.result is not None}
        found.ended.append(ended)
    found.outcomes = run.outcomes()
    run.start()
    found.last = run.end()
    return found


def test_a_killed_run_leaves_no_process(killed: Killed) -> None:
    assert killed.left == [[], []]


def test_the_same_command_finishes_a_killed_run(killed: Killed) -> None:
    check_finished(killed.run, *killed.last)


def test_a_run_of_several_sessions_says_where_the_time_of_each_went(killed: Killed) -> None:
    code, out, err = killed.last
    use = json.loads(out)["time_use"]
    assert code in FINISHED, err
    with Store.read(killed.run.folder) as store:
        spans, phases = store.spans(), store.phases()
    measured = {s.session for s in spans if s.activity is Activity.MEASURE}
    assert measured >= {2}
    assert [p.phase for p in phases if p.session == 3] == list(Phase)
    assert use["sessions"] == 3
    assert use["first_trial_secs"] is None  # the last session had nothing left to measure
    assert {w["role"] for w in use["workers"]} == {"tuner", "slice"}
    for worker in use["workers"]:
        assert sum(worker["secs"].values()) == pytest.approx(worker["of_secs"])
    assert set(use["core_busy"]) == {str(core) for core in host.facts().cores}


def test_a_killed_run_ends_with_the_trials_that_were_asked_for(killed: Killed) -> None:
    records = killed.run.records()
    assert 8 <= len(killed.ended[0]) < TRIALS
    assert len(killed.ended[1]) == TRIALS
    assert len(records) == TRIALS
    assert all(r.result is not None for r in records)


def test_a_session_that_finds_nothing_left_to_search_says_so_in_a_line(killed: Killed) -> None:
    told = [json.loads(x) for x in (killed.run.folder / "logs" / "tunerd.jsonl").open()]
    begins = [n for n, x in enumerate(told) if x["message"] == "the run begins"]
    (said,) = (n for n, x in enumerate(told) if "nothing was left to search" in x["message"])
    assert said > begins[2]
    assert told[said]["level"] == "warning"


def test_no_trial_of_a_killed_run_is_paid_twice(killed: Killed) -> None:
    last = {r.trial_id: r for r in killed.run.records()}
    for ended in killed.ended:
        assert {number: last[number] for number in ended} == ended
    assert len({r.candidate.candidate_id for r in last.values()}) == len(last)


def test_finalists_are_kept_over_a_kill(killed: Killed) -> None:
    assert 1 <= killed.outcomes <= killed.run.outcomes()


# --- Ctrl-C ------------------------------------------------------------------------------------


@dataclass
class Interrupted:
    run: Run
    refused: tuple[int, str, str]
    first: tuple[int, str, str]
    left: list[psutil.Process]
    states: set[TrialState]
    ended: dict[int, Record]
    last: tuple[int, str, str]


@pytest.fixture(scope="module")
def interrupted(make_run: MakeRun) -> Interrupted:
    run = make_run("--slice", "simulated", "--slices", "1", trials=32)
    run.start()
    run.wait_for(lambda: run.measured() >= 4)
    second = Run(run.folder, run.model, run.options)
    second.start()
    refused = second.end()
    assert run.process is not None
    started = run.processes()
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to everything in the group
    first = run.end()
    left = still_there(started)
    states = {r.state for r in run.records()}
    ended = {r.trial_id: r for r in run.records() if r.result is not None}
    run.start()
    return Interrupted(run, refused, first, left, states, ended, run.end())


def test_a_second_tunerd_in_a_folder_is_refused(interrupted: Interrupted) -> None:
    code, out, err = interrupted.refused
    assert code == ExitCode.BAD_FOLDER
    assert out == "" or json.loads(out)
    assert "is in use by the tunerd with pid" in err + out


def test_ctrl_c_once_drains_and_says_that_the_command_goes_on(interrupted: Interrupted) -> None:
    code, out, err = interrupted.first
    assert code == ExitCode.INTERRUPTED
    assert "the same command goes on" in err + out
    assert "Traceback" not in err
    assert "lost" not in err
    assert interrupted.left == []


def test_nothing_that_ran_is_lost_by_ctrl_c(interrupted: Interrupted) -> None:
    assert len(interrupted.ended) >= 4
    assert TrialState.RUNNING not in interrupted.states
    last = {r.trial_id: r for r in interrupted.run.records()}
    assert {number: last[number] for number in interrupted.ended} == interrupted.ended
    assert max(r.attempts for r in last.values()) == 1


def test_the_same_command_goes_on_after_ctrl_c(interrupted: Interrupted) -> None:
    check_finished(interrupted.run, *interrupted.last)
    assert len(interrupted.run.records()) == 32
    assert all(r.result is not None for r in interrupted.run.records())


# --- lost workers: more of them in test_kills.py and test_chaos.py -------------------------------


@pytest.mark.slow
def test_a_run_whose_only_tuner_always_ends_stops_and_says_why(make_run: MakeRun) -> None:
    run = make_run("--slice", "simulated", "--slices", "1")
    run.start()
    assert run.process is not None
    ended: list[psutil.Process] = []
    while run.process.poll() is None and len(ended) <= MAX_RESTARTS:
        try:
            living = [p for p in run.actors("TunerActor") if p not in ended]
        except psutil.NoSuchProcess:
            break
        if living and (run.folder / "store.sqlite").exists():
            living[0].kill()
            ended.append(living[0])
        time.sleep(0.02)
    code, out, err = run.end()
    assert code == ExitCode.INFRASTRUCTURE
    assert f"the last tuner ended {MAX_RESTARTS + 1} times" in err + out
    assert len(ended) == MAX_RESTARTS + 1


# --- seeds -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_a_seed_repeats_a_run_on_simulated_slices_with_one_tuner(make_run: MakeRun) -> None:
    proposals = []
    for _ in range(2):
        run = make_run("--slice", "simulated", "--tuners", "1", "--seed", "7", trials=16)
        run.start()
        check_finished(run, *run.end())
        proposals.append([(r.candidate, r.run_secs) for r in run.records()])
    assert proposals[0] == proposals[1]


# --- the environment ---------------------------------------------------------------------------

# setenv(3) is not thread-safe, and TVM reads variables while it is loaded.
_WATCHED = """
import functools, json, sys
from tunerd.cli import main
from tunerd.frontend.relax.lowering import Lowered
loading, changed = [], {"before": 0, "meanwhile": []}
load = Lowered.mod.func
def mod(self):
    loading.append(True)
    try:
        return load(self)
    finally:
        loading.append(False)
Lowered.mod = functools.cached_property(mod)
Lowered.mod.__set_name__(Lowered, "mod")
def hook(event, arguments):
    if event in ("os.putenv", "os.unsetenv"):
        changed["before"] += not loading
        if loading and loading[-1]:
            changed["meanwhile"].append(str(arguments))
sys.addaudithook(hook)
sys.argv[0] = "tunerd"
try:
    code = main()
except SystemExit as end:
    code = end.code
print(json.dumps(changed | {"loading": loading, "code": code}), file=sys.stderr)
"""


@pytest.mark.nightly
def test_no_variable_is_set_while_tvm_is_loaded(make_run: MakeRun) -> None:
    run = make_run("--slice", "simulated", trials=4)
    words = [sys.executable, "-c", _WATCHED, *run.command[3:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    seen = json.loads(done.stderr.splitlines()[-1])
    assert seen["code"] in FINISHED, done.stderr
    assert seen["loading"] == [True, False]
    assert seen["before"] > 0  # Ray's: the hook works
    assert seen["meanwhile"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("kept_cluster")
def test_a_search_ends_at_once_where_its_model_is_lost(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def lost(*_: Any) -> NoReturn:  # once its tasks are known
        raise InfrastructureError("no memory for the model")

    monkeypatch.setattr(process, "kernels_from", lost)
    options = ["--cpu-pct", "100", "--slice", "simulated", "--trials", "100000", "--json"]
    code = run_command(app, ["tune", str(model), *options, "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert code == ExitCode.INFRASTRUCTURE, said.err
    assert "no memory for the model" in said.out


@pytest.fixture
def faulty_slice(monkeypatch: pytest.MonkeyPatch, kept_cluster: None) -> None:
    """Have the first of simulated slices fault at each candidate."""
    plan = SimulatedSlice.plan

    def faulty(request: SliceRequest) -> Any:
        found = plan(request)
        first, *others = found.slices
        first = replace(first, environment=((FAULTS_VARIABLE, "crash:1"),))
        return replace(found, slices=(first, *others))

    monkeypatch.setattr(SimulatedSlice, "plan", faulty)


def tuned(model: Path, out: Path, *flags: str) -> ExitCode | int:
    options = ["--slice", "simulated", "--trials", "80", "--out", str(out), *flags]
    return run_command(app, ["tune", str(model), *options])


@pytest.mark.usefixtures("faulty_slice")
def test_a_device_on_which_everything_faults_ends_the_run(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "run"
    code, said = tuned(model, out, "--cpu-pct", "100"), capsys.readouterr().err
    assert code == ExitCode.FAULTY_DEVICE, said
    assert "16 trials more have faulted there than one for every 2" in said
    with Store.read(out) as store:
        results = [r.result for r in store.records() if not r.candidate.is_default]
    ended = [r for r in results if r is not None]
    assert len(ended) >= MAX_FAULTS
    assert all(isinstance(r, Failure) and r.kind is Kind.CRASH for r in ended)


@pytest.mark.usefixtures("faulty_slice")
@pytest.mark.nightly
def test_a_run_goes_on_without_a_device_on_which_everything_faults(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "run"
    code, said = tuned(model, out, "--cpu-pct", "50"), capsys.readouterr().err
    assert code < ExitCode.BAD_INPUT, said
    assert "its device is left alone" in said
    assert (out / "artifact" / "manifest.json").is_file()
    with Store.read(out) as store:
        found = [r for r in store.records() if not r.candidate.is_default]
    faulted = [r for r in found if isinstance(r.result, Failure) and r.result.kind is Kind.CRASH]
    assert {r.slice_id for r in faulted} == {"simulated-0-0"}
    assert MAX_FAULTS <= len(faulted) < len(found) / 2
    sound = [r for r in found if r.slice_id == "simulated-0-1"]
    assert all(isinstance(r.result, Measurement) for r in sound)
    assert len(faulted) + len(sound) == len(found) == 80
