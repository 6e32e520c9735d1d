"""`tunerd tune` at its end: what it prints, and its exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.report_runs import cpu_outcome, finished_run, gpu_outcome
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode
from tunerd.runs import run as session
from tunerd.settings import TuneSettings
from tunerd.studies import sizes
from tunerd.vocabulary import DEFAULT_SOURCE
from tunerd.vocabulary.outcome import (
    BY_ONNX_RUNTIME,
    TUNED_BESIDE_ONNX_RUNTIME,
    Latency,
    Outcome,
    Verification,
)
from tunerd.vocabulary.verdict import Verdict

Captured = pytest.CaptureFixture[str]
WHY = "ONNX Runtime's output '[red]y' holds NaN"


def untuned(outcome: Outcome) -> Outcome:
    tasks = [
        dataclasses.replace(t, winner=dataclasses.replace(t.winner, source=DEFAULT_SOURCE))
        for t in outcome.tasks
    ]
    return dataclasses.replace(outcome, tasks=tuple(tasks))


def timed(outcome: Outcome, verdict: Verdict) -> Outcome:
    compared = dataclasses.replace(outcome.end_to_end, verdict=verdict)
    return dataclasses.replace(outcome, end_to_end=compared)


def unproved(outcome: Outcome) -> Outcome:
    verification = Verification(Verdict.CANNOT_TELL, 3, 1e-3, 1e-3, 0.2, WHY)
    return dataclasses.replace(outcome, verification=verification)


def tune(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ended: Outcome, *flags: str
) -> ExitCode | int:
    """Return the exit code of a run that ends so."""
    finished_run(folder)

    def ends(*_: Any, **__: Any) -> Outcome:
        return ended

    monkeypatch.setattr(session, "tune", ends)
    return run(app, ["tune", "net.onnx", "--cpu-pct", "50", "--out", str(folder), *flags])


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.FASTER, ExitCode.BETTER),
        (Verdict.SAME, ExitCode.NO_GAIN),
        (Verdict.CANNOT_TELL, ExitCode.CANNOT_TELL),
    ],
)
def test_the_exit_code_is_what_the_whole_model_showed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: Verdict, code: ExitCode
) -> None:
    assert tune(monkeypatch, tmp_path / "r", timed(gpu_outcome(), verdict)) == code


@pytest.mark.parametrize("verdict", Verdict)
def test_where_nothing_is_tuned_there_is_no_gain_whatever_was_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: Verdict
) -> None:
    ended = timed(untuned(gpu_outcome()), verdict)
    assert tune(monkeypatch, tmp_path / "r", ended) == ExitCode.NO_GAIN
    assert tune(monkeypatch, tmp_path / "s", unproved(ended)) == ExitCode.CANNOT_TELL


@pytest.mark.parametrize(
    ("onnxruntime_secs", "code"), [(3e-3, ExitCode.BETTER), (1e-3, ExitCode.NO_GAIN)]
)
def test_what_would_run_instead_decides_where_it_was_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, onnxruntime_secs: float, code: ExitCode
) -> None:
    faster = timed(gpu_outcome(), Verdict.FASTER)
    beside = (
        Latency(BY_ONNX_RUNTIME, (onnxruntime_secs,) * 30),
        Latency(TUNED_BESIDE_ONNX_RUNTIME, (2e-3,) * 30),
    )
    for ended in (faster, untuned(faster)):
        ended = dataclasses.replace(ended, latencies=(*ended.latencies, *beside))
        assert tune(monkeypatch, tmp_path / str(ended.tasks[0].is_tuned), ended) == code


def test_why_the_results_may_be_wrong_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    ended = unproved(gpu_outcome())
    assert tune(monkeypatch, tmp_path / "r", ended) == ExitCode.CANNOT_TELL
    shown = " ".join(capsys.readouterr().out.split())
    assert f"it cannot be told whether the tuned model's results are right: {WHY}" in shown
    assert tune(monkeypatch, tmp_path / "s", ended, "--json") == ExitCode.CANNOT_TELL
    assert json.loads(capsys.readouterr().out)["verification"]["message"] == WHY


# --- what to try next --------------------------------------------------------------------------


def tune_sizes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ended: Outcome, *flags: str
) -> ExitCode | int:
    """Return the exit code of runs of two sizes that end so."""

    def ends(settings: TuneSettings, *_: Any, **__: Any) -> Outcome:
        settings.out.mkdir(parents=True)
        finished_run(settings.out)
        return ended

    monkeypatch.setattr(session, "tune", ends)
    monkeypatch.setattr(sizes, "pack", lambda _: ("batch",))
    argv = ["tune", "net.onnx", "--cpu-pct", "50", "--batch", "1,4", "--out", str(folder)]
    return run(app, [*argv, *flags])


@pytest.mark.parametrize("tuned", [tune, tune_sizes])
def test_the_last_line_says_what_to_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured, tuned: Callable[..., int]
) -> None:
    assert tuned(monkeypatch, tmp_path / "r", gpu_outcome()) == ExitCode.BETTER
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("next      its kernels compute in fp32, as the model was exported: ")
    assert "--precision fp16" in last
    tuned(monkeypatch, tmp_path / "s", gpu_outcome(), "--json")
    document = json.loads(capsys.readouterr().out)
    assert f"next      {document['next_try']}" == last
    for each in document.get("sizes", ()):
        assert each["next_try"] == document["next_try"]


@pytest.mark.parametrize("tuned", [tune, tune_sizes])
def test_where_nothing_is_left_to_try_the_last_line_names_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured, tuned: Callable[..., int]
) -> None:
    tuned(monkeypatch, tmp_path / "r", cpu_outcome())
    assert capsys.readouterr().out.splitlines()[-1].startswith("report    ")
    tuned(monkeypatch, tmp_path / "s", cpu_outcome(), "--json")
    assert json.loads(capsys.readouterr().out)["next_try"] is None
