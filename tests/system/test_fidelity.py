"""How well the search's ranking agrees with the finals, and where that cannot be told."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lab.search import fidelity as fidelity_script
from tests.lib import ROOT
from tunerd.report import html
from tunerd.report.fidelity_section import fidelity_json, fidelity_section, fidelity_text
from tunerd.report.view import View
from tunerd.stats.ranking import fidelity
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Stage,
    to_json,
)
from tunerd.vocabulary.outcome import Finalist, TaskOutcome

CRASHED = Failure(Stage.RUN, Kind.CRASH, "it fell")
Final = float | tuple[float, float] | None  # seconds, also of even and odd samples, or failed


def final(secs: Final) -> Measurement | Failure:
    if secs is None:
        return CRASHED
    samples = 10 * (secs if isinstance(secs, tuple) else (secs, secs))
    return Measurement(samples, 1, "final-v6-cold", "s", 1)


def outcome(pairs: Sequence[tuple[float, Final]], *, default: Final = 9.0) -> TaskOutcome:
    """Return a task whose candidates took these seconds in the search and in the finals."""
    candidates = [
        Finalist(f"{i}", METASCHEDULE, s, final(f), may_win=i < 3) for i, (s, f) in enumerate(pairs)
    ]
    return TaskOutcome(
        task_id="t",
        name="conv",
        weight=1,
        trials=len(pairs),
        failed=0,
        default_secs=9.0,
        best_secs=1.0,
        winner=Candidate("t", "0", METASCHEDULE),
        comparison=None,
        note="",
        finalists=(Finalist("d", DEFAULT_SOURCE, None, final(default)), *candidates),
    )


def test_the_same_order_is_one_and_the_opposite_minus_one() -> None:
    same = fidelity([outcome([(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)])])
    assert (same.median_tau, same.median_recall) == (pytest.approx(1.0), 1.0)
    opposite = fidelity([outcome([(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)])])
    assert opposite.median_tau == pytest.approx(-1.0)
    assert opposite.median_recall == pytest.approx(1 / 3)


def test_equal_times_are_ties_and_no_agreement() -> None:
    (task,) = fidelity([outcome([(1, 1), (1, 2), (2, 3), (3, 3)])]).tasks
    assert task.tau == pytest.approx(0.8)  # 4 of 6 pairs agree, each side has a tie: 4 / 5
    assert fidelity([outcome([(1, 1), (1, 2), (1, 3)])]).median_tau is None


def test_the_default_and_what_failed_have_no_rank() -> None:
    (task,) = fidelity([outcome([(1, 1), (2, None), (3, 3), (4, 4)])]).tasks
    assert (task.candidates, task.tau) == (3, pytest.approx(1.0))


def test_few_candidates_tell_nothing_and_the_best_three_have_no_recall() -> None:
    (few,) = fidelity([outcome([(1, 1), (2, 2)])]).tasks
    assert (few.tau, few.recall) == (None, None)
    (three,) = fidelity([outcome([(1, 1), (2, 2), (3, 3)])]).tasks
    assert (three.tau, three.recall) == (pytest.approx(1.0), None)


def test_the_recall_has_a_mean_beside_the_median() -> None:
    good, bad = [(i, i) for i in range(1, 6)], [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)]
    found = fidelity([outcome(good), outcome(good), outcome(bad)])
    assert (found.median_recall, found.full_recall) == (1.0, 2)
    assert found.mean_recall == pytest.approx((1 + 1 + 1 / 3) / 3)


def test_candidates_close_to_the_fastest_have_a_tau_of_their_own_where_they_are_enough() -> None:
    close = [(1, 1.25), (2, 1.2), (3, 1.1), (4, 1.05), (5, 1.0)]
    far = [(6 + i, 2.0 + i) for i in range(5)]
    (task,) = fidelity([outcome([*close, *far])]).tasks
    assert (task.near, task.tau_near) == (5, pytest.approx(-1.0))
    assert task.tau is not None
    assert task.tau > 0.5
    assert task.span == pytest.approx(6.0)
    found = fidelity([outcome([*close[1:], *far])])
    assert (found.tasks[0].near, found.told_near, found.median_tau_near) == (4, 0, None)


def test_what_is_chosen_is_compared_with_the_fastest_also_of_those_that_cannot_win() -> None:
    found = fidelity([outcome([(1, 1.0), (2, 2), (3, 3), (4, 0.8)])])
    assert found.worst_excess == pytest.approx(0.25)


def test_what_is_chosen_is_judged_by_samples_that_did_not_choose_it() -> None:
    lucky = [(1, (1.0, 1.5)), (2, (1.2, 1.2)), (3, (3, 3))]
    found = fidelity([outcome(lucky)])
    # The even samples choose the first, of which the odd ones say 1.5, and of the second 1.2. The
    # odd ones choose the second: 1.2 in the even ones, where the first has 1.0.
    assert found.worst_excess == pytest.approx(1.5 / 1.2 - 1)


def test_what_cannot_be_told_from_the_default_is_not_chosen() -> None:
    found = fidelity([outcome([(1, 1.0), (2, 1.1)], default=1.0)])
    assert found.worst_excess == pytest.approx(0.0)
    slower = fidelity([outcome([(1, 2.0), (2, 2), (3, 2), (4, 0.5)], default=1.0)])
    assert slower.worst_excess == pytest.approx(1.0)  # the default is, and one that cannot win is


def test_without_a_default_that_runs_the_fastest_is_chosen() -> None:
    assert fidelity([outcome([(1, 1.0), (2, 2)], default=None)]).worst_excess == pytest.approx(0.0)


def test_medians_are_over_the_tasks_that_can_tell() -> None:
    tasks = [
        outcome([(1, 1), (2, 2), (3, 3), (4, 4)]),
        outcome([(1, 4), (2, 3), (3, 2), (4, 1)]),
        outcome([]),
    ]
    found = fidelity(tasks)
    assert (found.told, found.median_tau, found.median_candidates) == (2, pytest.approx(0.0), 4)
    assert found.tasks[2].excess is None


def test_people_are_told_of_how_many_candidates_it_is() -> None:
    few = [outcome([(1, 1), (2, 2), (3, 3)])]
    assert "give --fidelity" in fidelity_text(fidelity(few))
    many = [outcome([(i, i) for i in range(1, 9)])]
    assert "8 candidates each" in fidelity_text(fidelity(many))
    page = html.page(View("fidelity", [fidelity_section(many)]))
    assert page.count("<td") == 6  # a task's, one below each heading
    assert page.count("<th ") == 7 + 1
    assert fidelity_section([outcome([])]) is None
    assert fidelity_json(many)["tasks"][0]["tau"] == pytest.approx(1.0)


def test_the_benchmark_weighs_what_was_chosen_by_the_calls_of_the_model() -> None:
    tasks = [
        outcome([(1, 1.0), (2, 2), (3, 3), (4, 4)]),
        replace(outcome([(1, 1.0), (2, 2), (3, 3), (4, 0.5)]), task_id="u", weight=3),
    ]
    found = {
        "name": "gpu40",
        "proofs": [{"sm_count": 52}, {"sm_count": 52}],
        "fidelity": fidelity_json(tasks),
        "drift": {"slices": [{"warns": True}, {"warns": False}]},
        "phase_secs": {"finalists": 9.0},
        "tasks": [to_json(t) for t in tasks],
    }
    row = fidelity_script.summary(found)
    assert row["excess_of_model_pct"] == pytest.approx(100 * (4 / 2.5 - 1))
    assert row["tasks_within_pct"] == 50
    assert (row["reaches_excess"], row["slices"], row["slices_that_drifted"]) == (False, 2, 1)
    assert "2 slices of gpu40" in fidelity_script.shown([row])
    assert row["slices_busy_pct"] is None
    busy = fidelity_script.summary(found | {"slices_busy": 0.25})
    assert busy["slices_busy_pct"] == 25


def test_the_figures_kept_are_what_the_script_makes_of_the_samples(tmp_path: Path) -> None:
    kept, names = (
        ROOT / "results" / "h200-fidelity",
        ("light_resnet50-gpu40", "light_resnet50-gpu25"),
    )
    with tarfile.open(kept / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    command = [sys.executable, ROOT / "scripts" / "lab" / "search" / "fidelity.py"]
    command += [*(tmp_path / f"{name}.json" for name in names), "--out", tmp_path / "out"]
    subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "benchmark.json",
        "fidelity.txt",
    }
    text = (tmp_path / "out" / "fidelity.txt").read_text()
    assert text == (kept / "fidelity.txt").read_text()
    found, known = (
        json.loads((p / "benchmark.json").read_text()) for p in (tmp_path / "out", kept)
    )
    for row, expected in zip(found["summary"], known["summary"], strict=True):
        assert row == pytest.approx(expected)
