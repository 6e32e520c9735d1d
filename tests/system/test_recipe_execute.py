"""The runs of a recipe as processes: order, failures, gates, the base that follows, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.lib import PYTHON_PATH
from tests.lib.gate_runs import outcome, run_of
from tests.lib.models import conv_net
from tests.lib.tune_process import Run
from tests.lib.waiting import until
from tunerd.errors import ExitCode, FolderError
from tunerd.studies.recipes import read_recipe
from tunerd.studies.recipes.execute import Result, carry_out

# Stands in for tunerd: writes down what it was asked, and ends as plan.json says of that command.
PROGRAM = """
import json, os, shutil, signal, sqlite3, sys, time
request = json.loads(sys.stdin.readline())
command, said = request["command"], request["settings"]
key = " ".join([command, said.get("base") or said.get("model") or ""]).strip()
with open("asked", "a") as asked:
    asked.write(key + "\\n")
plan = json.load(open("plan.json"))
step = plan.get(key, 0)
if step == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(16))
    open("waiting", "w").close()
    while True:
        time.sleep(0.01)
if step == "hold":
    open("holding", "w").close()
    sys.stdin.read()
    open("let go", "w").close()
if step == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if step == "not begun":  # as Python ends where a module is missing
    sys.exit(1)
if command == "tune" and step in (0, 1, 2):
    out = said["out"]
    shutil.copytree("ended", out, dirs_exist_ok=True)
    with sqlite3.connect(out + "/store.sqlite") as store:
        store.execute("update outcomes set saved_at = ?", [time.time()])
if isinstance(step, str):
    print(json.dumps({"verdict": step, "headline": step + ": so it is"}))
    sys.exit({"worse": 3, "not comparable": 4}.get(step, 0))
sys.exit(step)
"""
Carry = Callable[..., Result]
THREE = "cpu-pct: 50\nruns: {x: {model: x}, y: {model: y}, z: {model: z}}\n"


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Carry:
    """Return what carries out a recipe with a program that ends as it is told."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    program = (sys.executable, "program.py")
    run_of(Path("ended"), outcome(0, tasks=1))

    def carry(text: str, plan: dict[str, object], *, fail_fast: bool = False) -> Result:
        Path("r.yaml").write_text(text)
        Path("plan.json").write_text(json.dumps(plan))
        Path("asked").write_text("")
        recipe = read_recipe(Path("r.yaml"))
        return carry_out(recipe, recipe.runs, fail_fast=fail_fast, program=program)

    return carry


def asked() -> list[str]:
    """Return the first two words of each command."""
    return [" ".join(line.split()[:2]) for line in Path("asked").read_text().splitlines()]


def test_a_run_that_fails_does_not_stop_the_others_and_the_worst_code_is_the_end(
    carried: Carry,
) -> None:
    result = carried(THREE, {"tune x": 1, "tune y": 13, "tune z": 2})
    assert asked() == ["tune x", "tune y", "tune z"]
    assert [ended.exit_code for ended in result.runs] == [1, 13, 2]
    assert result.exit_code == 13


@pytest.mark.parametrize("has_run_before", [False, True])
def test_a_run_that_keeps_no_outcome_is_no_base_whatever_its_exit_code(
    carried: Carry, has_run_before: bool
) -> None:
    text = "model: x\ncpu-pct: 50\nout: a/x\ngate: {base: base/x, base-follows: true}\n"
    if has_run_before:
        carried(text, {})
        Path("base/x").unlink()
    result = carried(text, {"tune x": "not begun"})
    assert [ended.exit_code for ended in result.runs] == [ExitCode.BUG]
    assert not os.path.lexists("base/x")
    assert result.exit_code == ExitCode.BUG


def test_a_command_finds_itself_and_not_the_modules_of_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("cpu-pct: 100\nmodel: a.onnx\n")
    (tmp_path / "types.py").write_text("raise RuntimeError('not the one of Python')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tunerd", "run", "r.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == ExitCode.BAD_MODEL, done.stderr


def test_with_fail_fast_the_first_that_fails_is_the_last(carried: Carry) -> None:
    result = carried(THREE, {"tune x": 2, "tune y": 11}, fail_fast=True)
    assert asked() == ["tune x", "tune y"]
    assert [ended.exit_code for ended in result.runs] == [2, 11, None]


def test_a_run_that_is_killed_is_worse_than_all(carried: Carry) -> None:
    result = carried(THREE, {"tune x": "killed"})
    assert result.exit_code == 128 + signal.SIGKILL
    assert asked()[-1] == "tune z"


def test_on_a_machine_that_is_not_quiet_nothing_is_begun(carried: Carry) -> None:
    result = carried(THREE + "preflight: {}\n", {"preflight": int(ExitCode.NOT_QUIET)})
    assert asked() == ["preflight"]
    assert result.exit_code == ExitCode.NOT_QUIET


def test_a_gate_follows_a_run_with_an_artifact_and_no_other(carried: Carry) -> None:
    text = THREE + "gate: {base: '{name}'}\n"
    result = carried(text, {"tune y": 14, "compare x": "worse", "compare z": "same"})
    assert asked() == ["tune x", "compare x", "tune y", "tune z", "compare z"]
    assert [ended.gate_code for ended in result.runs] == [3, None, 0]
    assert result.exit_code == 14


def test_a_base_that_follows_is_the_first_and_then_each_that_is_better(carried: Carry) -> None:
    base = Path("base/x")

    def night(name: str, plan: dict[str, object]) -> Result:
        return carried(
            f"model: x\ncpu-pct: 50\nout: {name}/x\ngate: {{base: base/x, base-follows: true}}\n",
            plan,
        )

    assert night("a", {"tune x": 11}).exit_code == 11
    assert not os.path.lexists(base)  # there is no artifact
    assert night("b", {}).runs[0].is_base
    assert asked() == ["tune x"]
    assert os.readlink(base) == "../b/x"
    for name, verdict in (("c", "same"), ("d", "cannot tell"), ("e", "worse")):
        assert not night(name, {"compare base/x": verdict}).runs[0].is_base
        assert os.readlink(base) == "../b/x"
    assert night("f", {"compare base/x": "better"}).runs[0].is_base
    assert os.readlink(base) == "../f/x"


def test_a_base_that_is_a_folder_is_left_alone(carried: Carry) -> None:
    Path("b").mkdir()
    text = "model: x\ncpu-pct: 50\ngate: {base: b, base-follows: true}\n"
    with pytest.raises(FolderError, match="b is no link, and base-follows would replace it"):
        carried(text, {"compare b": "better"})
    assert not Path("b").is_symlink()


def test_a_request_to_stop_ends_the_run_in_order_and_begins_no_other(carried: Carry) -> None:
    def stop() -> None:
        until(Path("waiting").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    before = signal.getsignal(signal.SIGTERM)
    # The recipe's folder is this process's, so the file that the thread waits for is, too.
    stopper.start()
    result = carried(THREE, {"tune x": "wait"})
    stopper.join()
    assert [ended.exit_code for ended in result.runs] == [16, None, None]
    assert result.exit_code == ExitCode.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_learns_of_the_end_of_who_carries_the_recipe_out(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "plan.json").write_text(json.dumps({"tune x": "hold"}))
    (tmp_path / "r.yaml").write_text("cpu-pct: 50\nmodel: x\n")
    with subprocess.Popen(
        [sys.executable, "-c", CARRIER], cwd=tmp_path, env=os.environ | {"PYTHONPATH": PYTHON_PATH}
    ) as carrier:
        until((tmp_path / "holding").exists)
        assert not (tmp_path / "let go").exists()
        carrier.kill()
    until((tmp_path / "let go").exists)


def test_a_command_ends_with_the_standard_input_that_named_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LONG_COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"command": "preflight", "settings": {"wait_secs": "90s"}, "json": False}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"alive 90.0\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait() == ExitCode.INTERRUPTED


LONG_COMMAND = """
import time
from tunerd.cli import child, preflight
def look(settings, json):
    print("alive", settings.wait_secs, flush=True)
    time.sleep(600)
preflight.preflight = look
child.main()
"""


CARRIER = """
import sys
from pathlib import Path
from tunerd.studies.recipes import read_recipe
from tunerd.studies.recipes.execute import carry_out
recipe = read_recipe(Path("r.yaml"))
carry_out(recipe, recipe.runs, program=(sys.executable, "program.py"))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_command_that_was_killed_leaves_no_run_and_goes_on(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    onnx.save(conv_net(), model)
    run = Run(tmp_path / "run", model, ())
    (tmp_path / "r.yaml").write_text(
        f"cpu-pct: 50\nslice: simulated\nslices: 1\ntuners: 1\ntrials: 24\nmodel: {model}\n"
        f"out: {run.folder}\n"
    )
    command = [sys.executable, "-m", "tunerd", "run", str(tmp_path / "r.yaml")]
    run.process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    run.wait_for(lambda: run.measured() >= 4)
    assert run.kill() == []
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode < ExitCode.BAD_INPUT, done.stderr
    assert run.measured() > 12


def test_the_command_ends_with_one_document_and_the_worst_code(tmp_path: Path) -> None:
    """With real runs: of models that are not there."""
    (tmp_path / "r.yaml").write_text("cpu-pct: 100\nmodel: [a.onnx, b.onnx]\n")
    argv = [sys.executable, "-m", "tunerd", "run", "r.yaml"]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(
        [*argv, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == ExitCode.BAD_MODEL
    runs = json.loads(done.stdout)["runs"]
    assert [(run["name"], run["exit_code"]) for run in runs] == [
        ("a-cpu100", ExitCode.BAD_MODEL),
        ("b-cpu100", ExitCode.BAD_MODEL),
    ]
    assert done.stderr.count("tunerd: ") == 2
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.count("11 bad model") == 2
