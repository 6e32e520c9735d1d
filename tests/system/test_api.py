"""tunerd from Python: what its functions take, return and raise."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pandas as pd
import pytest

import tunerd
from tests.lib import ROOT
from tests.lib.models import two_products
from tests.lib.readme_commands import README
from tests.lib.report_runs import finished_run, gpu_outcome
from tunerd.api import MatrixOptions, TuneOptions
from tunerd.errors import FolderError, InputError, ModelError, WrongResultError
from tunerd.records import Store
from tunerd.records.export import COLUMNS
from tunerd.settings import TuneSettings
from tunerd.settings.option import keys_of
from tunerd.settings.studies import MatrixSettings
from tunerd.telemetry.progress import ProgressState
from tunerd.vocabulary.outcome import TaskOutcome, Verification
from tunerd.vocabulary.verdict import Correctness, Interval, Verdict


@dataclasses.dataclass(frozen=True)
class Tuned:
    run: tunerd.Run
    states: list[ProgressState]
    printed: str
    folder: Path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """A run of a model that was no file, in a folder that nobody named."""
    folder = tmp_path_factory.mktemp("api")
    states: list[ProgressState] = []
    printed = io.StringIO()
    handlers = list(logging.getLogger().handlers)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        run = tunerd.tune(
            two_products(),
            gpu_pct=40,
            slice_kind="simulated",
            trials=8,
            tuners=1,
            slices=1,
            on_progress=states.append,
        )
        assert logging.getLogger().handlers == handlers
        yield Tuned(run, states, printed.getvalue(), folder)


# --- a run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_values(tuned: Tuned) -> None:
    run = tuned.run
    assert run.is_finished
    assert run.verdict in Verdict
    assert isinstance(run.speedup, Interval)
    assert {latency.name for latency in run.latencies} >= {"tuned", "default"}
    assert all(isinstance(task, TaskOutcome) for task in run.tasks)
    assert sum(task.trials for task in run.tasks) == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.folder = Path("elsewhere")  # type: ignore[misc]


@pytest.mark.slow
def test_its_trials_are_a_table(tuned: Tuned) -> None:
    table = tuned.run.trials()
    assert isinstance(table, pd.DataFrame)
    assert list(table.columns) == list(COLUMNS)
    assert (table["origin"] == "search").sum() == 8
    assert table.groupby("task")["median_secs"].min().notna().all()


@pytest.mark.slow
def test_its_artifact_runs(tuned: Tuned) -> None:
    outputs = tuned.run.artifact.load()(np.ones((64, 256), np.float32))
    assert {name: each.shape for name, each in outputs.items()} == {"y": (64, 256)}


@pytest.mark.slow
def test_its_page_is_written_where_it_is_wanted(tuned: Tuned, tmp_path: Path) -> None:
    page = tuned.run.report(tmp_path / "page.html")
    assert page.read_text().startswith("<!doctype html>")
    with pytest.raises(FolderError, match="name another file"):
        tuned.run.report(tmp_path / "no" / "page.html")


@pytest.mark.slow
def test_progress_is_told_and_nothing_is_printed(tuned: Tuned) -> None:
    assert {state.phase for state in tuned.states} >= {"starting", "tuning", "finishing"}
    assert tuned.states[-1].trials_done >= 8
    assert tuned.printed == ""


@pytest.mark.slow
def test_a_model_that_was_no_file_is_kept_privately_and_named_by_its_content(tuned: Tuned) -> None:
    (path,) = (tuned.run.folder / "model").iterdir()
    assert re.fullmatch(r"tiny-[0-9a-f]{8}\.onnx", path.name)
    assert tuned.run.folder.name == f"{path.stem}-gpu40"
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_the_same_call_goes_on_in_the_same_folder(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tuned.folder)
    again = tunerd.plan(
        two_products(), gpu_pct=40, slice_kind="simulated", trials=8, tuners=1, slices=1
    ).execute()
    assert again.folder == tuned.run.folder
    assert again.view.sessions == 2
    assert sum(task.trials for task in again.tasks) == 8  # none was repeated
    assert tunerd.open_run(again.folder).speedup == again.speedup


@pytest.mark.slow
def test_a_run_compares_with_itself(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tuned.folder)
    result = tunerd.compare(tuned.run, tuned.run.folder)
    assert result.new.model_name == tuned.run.name


# --- a matrix ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_matrix_is_values_and_the_same_call_goes_on(tmp_path: Path) -> None:
    steps: list[str] = []
    states: list[ProgressState] = []

    def made() -> tunerd.Matrix:
        return tunerd.matrix(
            two_products(),
            shares=(100, 50),
            slice_kind="simulated",
            trials=8,
            tuners=1,
            rounds=1,
            out=tmp_path / "matrix",
            on_step=steps.append,
            on_progress=states.append,
        )

    first = made()
    assert first.folder == tmp_path / "matrix"
    assert (first.result.rounds, set(first.result.trials)) == (1, {50, 100})
    assert first.report.read_text().startswith("<!doctype html>")
    assert any(state.trials_done for state in states)
    assert len(steps) > 1
    steps.clear()
    assert made().result == first.result
    assert steps == ["resampling"]


def test_a_matrix_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two at least"):
        tunerd.matrix(tmp_path / "net.onnx", shares=[40])
    with pytest.raises(InputError, match="from 1 to 100"):
        tunerd.matrix(tmp_path / "net.onnx", shares=[40, 400])
    with pytest.raises(TypeError, match=r"no option trails .*; did you mean trials\?"):
        tunerd.matrix(tmp_path / "net.onnx", shares=[40, 50], trails=1)  # type: ignore[call-arg]


# --- a plan ------------------------------------------------------------------------------------


def test_a_plan_is_readable_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(two_products(), "net.onnx")
    plan = tunerd.plan("net.onnx", gpu_pct=40, slice_kind="simulated", trials=100)
    assert "40% of simulated device" in str(plan)
    assert "2 tasks, tuned until 100 trials" in str(plan)
    assert [task["weight"] for task in plan.tasks] == [1, 1]
    assert plan.estimate_secs is not None
    assert plan.settings.out == Path("runs/net-gpu40")
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.parametrize(("precision", "warns"), [("fp16", True), ("fp32", False)])
def test_a_plan_says_what_16_bits_cost_on_cpus(tmp_path: Path, precision: str, warns: bool) -> None:
    onnx.save(two_products(), tmp_path / "net.onnx")
    said: list[str] = []
    tunerd.plan(
        tmp_path / "net.onnx",
        cpu_pct=100,
        trials=4,
        precision=precision,
        out=tmp_path / "run",
        on_warning=said.append,
    )
    assert any("On CPUs kernels compute in fp32" in sentence for sentence in said) is warns


@pytest.mark.slow
def test_a_plan_of_a_model_that_was_no_file_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    plan = tunerd.plan(
        two_products(),
        gpu_pct=40,
        slice_kind="simulated",
        trials=4,
        tuners=1,
        slices=1,
        out=out,
    )

    def plan_again(*_: object, **__: object) -> None:
        raise AssertionError("it was planned again")

    monkeypatch.setattr("tunerd.runs.run.plan_run", plan_again)
    run = plan.execute()
    assert run.is_finished
    with Store.read(out) as store:
        kept = Path(store.facts().settings["model"])
    assert kept.parent == out / "model"
    assert kept.is_file()


# --- errors ------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_an_error_of_tunerd(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.onnx"
    with pytest.raises(InputError, match="give one share"):
        tunerd.tune(nowhere)
    with pytest.raises(InputError, match="--trials 0"):
        tunerd.tune(nowhere, cpu_pct=100, trials=0)
    with pytest.raises(ModelError):
        tunerd.plan(nowhere, cpu_pct=100)
    with pytest.raises(InputError, match="an automatic share is measured"):
        tunerd.plan(nowhere, cpu_pct="auto")
    with pytest.raises(FolderError):
        tunerd.open_run(tmp_path)
    with pytest.raises(tunerd.LoadError):
        tunerd.bench(tmp_path)
    with pytest.raises(InputError, match="is no run folder and no artifact"):
        tunerd.compare(tmp_path, tmp_path)
    with pytest.raises(InputError, match="rounds=0"):
        tunerd.profile(nowhere, rounds=0)
    assert all(issubclass(e, tunerd.TunerdError) for e in (InputError, FolderError, ModelError))


def test_an_unknown_option_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no option trails .*; did you mean trials\?"):
        tunerd.tune(tmp_path / "net.onnx", cpu_pct=100, trails=10)  # type: ignore[call-arg]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(FolderError, match="thesis"):
        tunerd.tune(two_products(), gpu_pct=40, slice_kind="simulated", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_program_that_uses_ray_is_told_to_end_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(InputError, match="this process uses Ray"):
        tunerd.tune(two_products(), gpu_pct=40, slice_kind="simulated", out=tmp_path / "run")


def ended(folder: Path, correctness: Correctness) -> tunerd.Run:
    """Return a run that ended so."""
    finished_run(folder)
    run = tunerd.open_run(folder)
    verification = Verification(correctness, 3, 1e-3, 1e-3, 2.0, "output 'y' differs")
    outcome = dataclasses.replace(gpu_outcome(), verification=verification)
    return dataclasses.replace(run, view=dataclasses.replace(run.view, outcome=outcome))


def test_a_wrong_model_has_no_verdict_and_no_artifact(tmp_path: Path) -> None:
    run = ended(tmp_path / "run", Verdict.WRONG)
    for ask in (lambda: run.verdict, lambda: run.artifact):
        with pytest.raises(WrongResultError, match="output 'y' differs"):
            ask()


def test_of_a_model_that_could_not_be_verified_nothing_can_be_told(tmp_path: Path) -> None:
    assert ended(tmp_path / "run", Verdict.CANNOT_TELL).verdict is Verdict.CANNOT_TELL


def test_a_run_without_a_result_says_so(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    run = tunerd.open_run(tmp_path / "run")
    run = dataclasses.replace(run, view=dataclasses.replace(run.view, outcome=None))
    assert not run.is_finished
    with pytest.raises(FolderError, match="has not come to its end"):
        _ = run.verdict


# --- the surface -------------------------------------------------------------------------------


def test_every_setting_of_a_matrix_is_an_option() -> None:
    said = {key.field for key in keys_of(MatrixSettings)} - {"model", "shares"}
    assert said == set(MatrixOptions.__annotations__)


def test_every_setting_of_a_tuning_is_an_option() -> None:
    said = {key.field for key in keys_of(TuneSettings)} - {"model"}
    assert said == set(TuneOptions.__annotations__)


def test_the_package_is_typed() -> None:
    assert (ROOT / "tunerd" / "py.typed").is_file()


def test_importing_tunerd_imports_no_library() -> None:
    program = (
        "import sys, tunerd; heavy = {'numpy', 'onnx', 'pydantic', 'ray', 'sqlalchemy', 'tvm'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the README --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_readme_s_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"^## Python\n.*?^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert found is not None
    # Shares of a GPU are those of simulated slices, and a search has a few trials.
    program = found[1].replace("gpu_pct=40", 'gpu_pct=40, slice_kind="simulated", slices=1')
    program = program.replace("trials=1000", "trials=4")
    monkeypatch.chdir(tmp_path)
    onnx.save(two_products(), "model.onnx")
    names = {"x": np.ones((64, 256), np.float32)}
    exec(program, names)
    shown = capsys.readouterr().out
    assert "2 tasks, tuned until 4 trials" in shown
    assert (tmp_path / "page.html").is_file()
