"""The time of a run, in which its report draws: what its sessions took, and no pause between."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.lib.report_runs import run_facts, searched_run
from tests.lib.store_places import proposed
from tunerd.records import Store
from tunerd.report.page import report_page
from tunerd.report.run_view import RunView, run_view_of
from tunerd.telemetry.history import RunTime
from tunerd.vocabulary import METASCHEDULE, Candidate, Measurement


def test_a_pause_between_sessions_is_no_time_however_short_it_is() -> None:
    time = RunTime.of([100.0, 140.0], [103.0, 110.0, 141.0, 150.0])
    assert [time.secs_at(at) for at in (100.0, 110.0, 125.0, 140.0, 150.0)] == [0, 10, 10, 10, 20]


def test_a_wait_within_a_session_is_time_however_long_it_is() -> None:
    assert RunTime.of([100.0], [103.0, 4103.0]).secs_at(4103.0) == 4003.0


def test_a_session_in_which_nothing_was_noted_takes_no_time() -> None:
    assert RunTime.of([100.0, 200.0, 300.0], [110.0, 310.0]).secs_at(310.0) == 20.0


def test_of_merged_runs_whose_sessions_are_not_known_a_long_pause_divides() -> None:
    time = RunTime.of([9000.0], [100.0, 130.0, 5000.0, 5010.0])
    assert [time.secs_at(at) for at in (100.0, 130.0, 5000.0, 5010.0)] == [0, 30, 30, 40]


@pytest.mark.parametrize("odd", [math.inf, -math.inf])
def test_a_moment_that_is_no_number_spoils_no_other(odd: float) -> None:
    time = RunTime.of([100.0, odd], [110.0, odd])
    assert time.secs_at(110.0) == 10.0
    assert time.secs_at(odd) in (0.0, 10.0)
    assert RunTime.of([], []).secs_at(odd) == 0.0


def resumed_run(folder: Path) -> RunView:
    """Go on for ten seconds in a run whose first session was heard of last after seven."""
    searched_run(folder, at=1000.0)
    with Store.create_or_open(folder, facts=run_facts(), now=1060.0) as store:
        task = store.tasks()[0]
        candidate = Candidate(task.task_id, "f" * 16, METASCHEDULE, "[]")
        (trial,) = proposed(store, [candidate], now=1061.0)
        store.start([trial], "cpu-0-0", now=1069.0)
        measured = Measurement((1e-5,) * 5, 3, "search-v1", "cpu-0-0", 1)
        store.finish(trial, measured, now=1070.0)
    with Store.read(folder) as store:
        return run_view_of(store)


def test_a_report_draws_a_resumed_run_without_its_pause(tmp_path: Path) -> None:
    assert resumed_run(tmp_path).history[-1].elapsed_secs == 17.0


def test_a_report_says_whose_limits_it_names(tmp_path: Path) -> None:
    assert "6 trials, by the last of 2 sessions" in report_page(resumed_run(tmp_path / "resumed"))
    searched_run(tmp_path / "once")
    with Store.read(tmp_path / "once") as store:
        assert "by the last of" not in report_page(run_view_of(store))
