"""How libraries are asked for, and what reports say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib import report_runs
from tunerd.errors import HostError, InputError
from tunerd.libraries import packages
from tunerd.report import html
from tunerd.report.library_text import library_bars, library_text
from tunerd.report.markdown import run_markdown
from tunerd.report.table import outcome_json
from tunerd.report.task_section import task_section
from tunerd.report.view import View
from tunerd.runs.plan import plan_run
from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.vocabulary import (
    CUBLASLT,
    METASCHEDULE,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Stage,
)
from tunerd.vocabulary.outcome import Finalist, TaskOutcome


def settings(**given: Any) -> TuneSettings:
    return checked(TuneSettings, {"model": Path("m.onnx"), **given})


def test_libraries_are_given_as_a_list_of_names() -> None:
    assert settings(gpu_pct=40).libraries == ()
    assert settings(gpu_pct=40, libraries="cublaslt").libraries == (CUBLASLT,)
    with pytest.raises(InputError, match="--libraries 'mkl' is no library; give some of cublaslt"):
        settings(gpu_pct=40, libraries="cublaslt,mkl")
    with pytest.raises(InputError, match="--libraries are for GPUs"):
        settings(cpu_pct=40, libraries="cublaslt")


def test_a_run_whose_library_is_missing_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "missing", lambda name: "pip install nvidia-cublas")
    with pytest.raises(HostError, match="--libraries cublaslt: pip install nvidia-cublas"):
        plan_run(settings(gpu_pct=40, libraries="cublaslt"))


def plain(text: str) -> str:
    return text.replace("\xa0", " ")


def finished(number: int, library_secs: float | None, best_secs: float, won: bool) -> TaskOutcome:
    source = CUBLASLT if won else METASCHEDULE
    measured = Measurement((library_secs or 0.0,) * 3, 1, "final-v1", "quiet", 1)
    return TaskOutcome(
        task_id=f"{number:012x}",
        name=f"matmul{number}",
        weight=2,
        trials=16,
        failed=0,
        default_secs=1e-3,
        best_secs=best_secs,
        winner=Candidate(f"{number:012x}", "1" * 16, source),
        comparison=None,
        note="",
        finalists=(Finalist("2" * 16, CUBLASLT, 1e-4, measured),) if library_secs else (),
    )


def test_what_a_library_would_take_is_said_of_each_task_and_of_all() -> None:
    tasks = [
        finished(0, 171e-6, 100e-6, won=False),
        finished(1, None, 50e-6, won=False),
        finished(2, 10e-6, 10e-6, won=True),
    ]
    texts = [library_text(t) for t in tasks]
    assert [plain(t) for t in texts] == ["cuBLASLt would take 171 µs", "", "by cuBLASLt"]
    (bar,) = library_bars(tasks)
    assert plain(bar.text) == (
        "cuBLASLt would take 362 µs for the 2 tasks that it computes (in finals), which take "
        "220 µs as shipped; it ships in 1 of them"
    )
    (bar,) = library_bars(tasks[2:])
    assert plain(bar.text) == "cuBLASLt computes 1 task, in 20.0 µs, and ships in each"
    assert library_bars(tasks[1:2]) == ()


def without_time(task: TaskOutcome, kind: Kind = Kind.INTERRUPTED) -> TaskOutcome:
    """Return a task whose library the search alone has measured, at 100 us."""
    missed = Failure(Stage.RUN, kind, "the time for finalists was spent")
    finalists = tuple(replace(f, measurement=missed, may_win=False) for f in task.finalists)
    return replace(task, finalists=finalists)


def test_what_a_library_took_in_the_search_counts_where_finals_had_no_time() -> None:
    tasks = [
        finished(0, 171e-6, 100e-6, won=False),
        without_time(finished(1, 50e-6, 50e-6, won=False)),
        without_time(finished(2, 50e-6, 25e-6, won=False)),
    ]
    assert [plain(library_text(t)) for t in tasks] == [
        "cuBLASLt would take 171 µs",
        *2 * ["cuBLASLt would take 100 µs, as the search measured it"],
    ]
    (bar,) = library_bars(tasks)
    assert bar.searched == 2
    assert plain(bar.text) == (
        "cuBLASLt would take 742 µs for the 3 tasks that it computes (1 in finals, 2 as the search "
        "measured them), which take 350 µs as shipped"
    )
    (bar,) = library_bars(tasks[2:])
    assert "for the 1 task that it computes (as the search measured it)" in plain(bar.text)


def test_what_a_library_did_wrong_in_finals_does_not_count() -> None:
    assert library_bars([without_time(finished(0, 1e-6, 1e-6, won=False), Kind.WRONG_ANSWER)]) == ()


def test_reports_show_what_a_library_would_take() -> None:
    outcome = report_runs.gpu_outcome(tasks=2)
    own = replace(finished(0, 341e-6, 290e-6, won=False), weight=1)
    outcome = replace(outcome, tasks=(own, *outcome.tasks))
    said = "cuBLASLt would take 341 µs for the 1 task"
    view = report_runs.view(outcome)
    assert said in plain(html.page(View("tasks", [task_section(view)])))
    assert said in plain(run_markdown(view))
    document = outcome_json(outcome)
    assert document["libraries"][0]["secs"] == pytest.approx(341e-6)
    assert document["libraries"][0]["searched"] == 0
    assert document["tasks"][0]["libraries_secs"] == {CUBLASLT: pytest.approx(341e-6)}
    assert document["tasks"][0]["libraries_searched"] == []
