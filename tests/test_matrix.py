"""What a matrix says of its samples, what it keeps, and whole small ones that are killed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ROOT, conv_net, script
from test_records import FACTS

from tunerd import host
from tunerd.cli.matrix import shares_of
from tunerd.errors import ExitCode, FolderError, InputError
from tunerd.matrix.carry_out import winner_of
from tunerd.matrix.changes import change
from tunerd.matrix.claims import DEFAULT, Answer, Findings, findings, middle_of
from tunerd.matrix.kept import Kept, opened, proof_of, result_of
from tunerd.matrix.levels import UNKNOWN, Cost, cost_of, levels_of, settings_of
from tunerd.matrix.result import Costs, MatrixResult, Times, costs_of, result_json
from tunerd.records import Store
from tunerd.report.matrix_markdown import matrix_markdown
from tunerd.report.matrix_page import matrix_page, matrix_plot
from tunerd.settings import TuneSettings
from tunerd.vocabulary import (
    Activity,
    Build,
    Candidate,
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Origin,
    Phase,
    PhaseTime,
    Span,
    Stage,
    TensorSpec,
    to_json,
)

SHARES = (10, 40, 100)
Cells = dict[tuple[int, int], list[list[float]]]


def samples_of(times: Mapping[tuple[int, int], float], *, noise: float = 1e-4) -> Cells:
    """Return three rounds of eight samples around each time, alike for all cells."""
    spread = [1 + noise * (i % 5 - 2) for i in range(8)]
    return {cell: [[secs * s for s in spread] for _ in range(3)] for cell, secs in times.items()}


def losses(table: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return times of cells: a loss of the table, else none, over 1 ms at 100% and more below."""
    return {(a, b): 0.1 / b * table.get((a, b), 1.0) for a in SHARES for b in SHARES}


def answers(found: Findings) -> dict[str, Answer]:
    return {claim.name: claim.answer for claim in found.claims}


OFF = {(a, b): 1.2 for a in SHARES for b in SHARES if a != b}


# --- the claims --------------------------------------------------------------------------------


def test_where_each_share_has_its_own_best_artifact_the_first_claim_holds() -> None:
    assert answers(findings(samples_of(losses(OFF))))["own"] is Answer.YES


def test_where_one_artifact_is_as_fast_as_the_own_one_the_first_claim_does_not_hold() -> None:
    assert answers(findings(samples_of(losses(OFF | {(40, 10): 1.0}))))["own"] is Answer.NO


def test_what_is_tuned_at_full_and_slow_when_cut_is_poor() -> None:
    found = findings(samples_of(losses({(100, 10): 1.5, (100, 40): 1.2})))
    assert answers(found)["cut"] is Answer.YES
    assert {g.run_at: round(g.ratio.value, 2) for g in found.gains} == {10: 1.5, 40: 1.2}


def test_what_is_tuned_at_full_and_as_fast_when_cut_is_not_poor() -> None:
    assert answers(findings(samples_of(losses({}))))["cut"] is Answer.NO


def test_the_middle_is_robust_where_both_ends_lose_more_at_worst() -> None:
    table = {(10, 100): 2.0, (100, 10): 1.5, (40, 10): 1.1, (40, 100): 1.1}
    found = findings(samples_of(losses(table)))
    assert answers(found)["middle"] is Answer.YES
    assert found.robust == 40
    (first, *_) = found.robustness
    assert (first.tuned_at, round(first.worst.value, 2)) == (40, 1.1)


def test_the_middle_is_not_robust_where_an_end_loses_less() -> None:
    found = findings(samples_of(losses({(40, 10): 1.3, (100, 10): 1.05})))
    assert answers(found)["middle"] is Answer.NO


def test_equal_artifacts_leave_none_the_most_robust() -> None:
    found = findings(samples_of(losses({})))
    assert found.robust is None
    assert {c.answer for c in found.claims} == {Answer.NO}


def test_rounds_that_contradict_each_other_cannot_tell() -> None:
    cells = samples_of(losses({}))
    cells[100, 10] = [
        [x * f for x in of] for of, f in zip(cells[100, 10], (0.7, 1, 1.5), strict=True)
    ]
    assert answers(findings(cells))["cut"] is Answer.CANNOT_TELL


def drawn(times: Mapping[tuple[int, int], float], seed: int, noise: float = 0.02) -> Cells:
    rng = np.random.default_rng(seed)
    return {
        cell: [list(secs * np.exp(rng.normal(0, noise, 10))) for _ in range(3)]
        for cell, secs in times.items()
    }


def test_noise_alone_makes_neither_a_false_yes_nor_a_false_no() -> None:
    own_is_best = losses(dict.fromkeys(OFF, 1.025))
    for seed in range(20):
        nothing = answers(findings(drawn(losses({}), seed), resamples=500))
        assert Answer.YES not in nothing.values()
        assert answers(findings(drawn(own_is_best, seed), resamples=500))["own"] is not Answer.NO


def test_one_share_answers_nothing() -> None:
    found = findings({(100, 100): [[1.0, 1.1]]})
    assert {c.answer for c in found.claims} == {Answer.CANNOT_TELL}
    assert found.robust is None


def test_two_shares_have_no_middle_and_no_full_one_is_no_claim() -> None:
    times = {(a, b): 1.0 for a in (25, 50) for b in (25, 50)}
    claims = {c.name: c for c in findings(samples_of(times)).claims}
    assert claims["middle"].answer is Answer.CANNOT_TELL
    assert "between" in claims["middle"].why
    assert "not the full device" in claims["cut"].why


def test_an_artifact_with_default_schedules_is_shown_and_takes_no_part() -> None:
    plain = samples_of(losses(OFF))
    beside = plain | samples_of({(DEFAULT, b): 1e-9 for b in SHARES})
    found, without = findings(beside), findings(plain)
    assert found.claims == without.claims
    assert len(found.cells) == len(without.cells) + len(SHARES)


def test_a_matrix_with_a_hole_is_refused() -> None:
    cells = samples_of(losses({}))
    del cells[10, 40]
    with pytest.raises(ValueError, match=r"\(10, 40\)"):
        findings(cells)


TIMES = st.fixed_dictionaries({(a, b): st.floats(0.5, 2.0) for a in SHARES for b in SHARES})


@settings(max_examples=25, deadline=None)
@given(TIMES, st.sampled_from([1e-3, 7.0]))
def test_a_device_that_is_faster_at_a_share_changes_no_answer(
    times: dict[tuple[int, int], float], factor: float
) -> None:
    cells = samples_of(times, noise=0.01)
    scaled = {
        (a, b): [[x * factor if b == 40 else x for x in of] for of in rounds]
        for (a, b), rounds in cells.items()
    }
    first, second = findings(cells, resamples=100), findings(scaled, resamples=100)
    assert answers(first) == answers(second)
    assert first.robust == second.robust


@settings(max_examples=25, deadline=None)
@given(TIMES)
def test_the_best_at_each_share_has_no_loss_and_intervals_hold_no_less(
    times: dict[tuple[int, int], float],
) -> None:
    found = findings(samples_of(times, noise=0.01), resamples=100)
    for b in SHARES:
        of = [c.loss for c in found.cells if c.run_at == b]
        assert min(loss.value for loss in of) == pytest.approx(1.0)
        assert all(1 - 1e-9 <= loss.low <= loss.high for loss in of)
    worst = [r.worst.value for r in found.robustness]
    assert worst == sorted(worst)
    assert all(r.mean.value <= r.worst.value + 1e-9 for r in found.robustness)


@settings(max_examples=25, deadline=None)
@given(TIMES, st.integers(0, 3))
def test_an_answer_follows_from_its_interval_and_repeats(
    times: dict[tuple[int, int], float], seed: int
) -> None:
    cells = samples_of(times, noise=0.02)
    first = findings(cells, seed=seed, resamples=100)
    assert first == findings(cells, seed=seed, resamples=100)
    for claim in first.claims:
        assert claim.ratio is not None
        assert (claim.answer is Answer.YES) == (claim.ratio.low > 1.01)
        assert (claim.answer is Answer.NO) == (claim.ratio.high < 1.01)


# --- kernels -----------------------------------------------------------------------------------


def noisy(secs: float, count: int = 20) -> list[float]:
    return [secs * (1 + 0.001 * (i % 3)) for i in range(count)]


def test_a_task_whose_best_is_faster_than_the_best_of_another_share_changes() -> None:
    found = change("t", {10: {"a": noisy(1), "b": noisy(2)}, 100: {"a": noisy(2), "b": noisy(1)}})
    assert found.answer is Answer.YES
    assert found.best == {10: "a", 100: "b"}
    assert found.comparison is not None
    assert found.comparison.ratio == pytest.approx(2, rel=0.01)


def test_a_task_with_one_best_at_all_shares_does_not_change() -> None:
    times = {"a": noisy(1), "b": noisy(2)}
    assert change("t", {10: times, 100: times}).answer is Answer.NO


def test_best_candidates_within_a_percent_are_no_change() -> None:
    found = change(
        "t", {10: {"a": noisy(1), "b": noisy(1.002)}, 100: {"a": noisy(1.002), "b": noisy(1)}}
    )
    assert len(set(found.best.values())) == 2
    assert found.answer is Answer.NO


def test_few_samples_cannot_tell_and_a_candidate_that_failed_at_a_share_takes_no_part() -> None:
    few = {10: {"a": [1.0, 1.0], "b": [2.0, 2.0]}, 100: {"a": [2.0, 2.0], "b": [1.0, 1.0]}}
    assert change("t", few).answer is Answer.CANNOT_TELL
    gone = {10: {"a": noisy(1), "b": noisy(2)}, 100: {"b": noisy(1)}}
    assert change("t", gone).best == {10: "b", 100: "b"}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.9, 1.1), min_size=20, max_size=20))
def test_what_judges_a_best_candidate_is_not_what_has_chosen_it(noise: list[float]) -> None:
    # The other candidate's odd samples, which judge, are the same at both shares.
    times = {"a": [1.0] * 20, "b": noise}
    assert change("t", {10: times, 100: times}).answer is Answer.NO


def measured(secs: float) -> Measurement:
    return Measurement(tuple(noisy(secs)), 1, "p", "cpu-0-0", 1, Conditions(sm_clock_mhz=1980))


FAILED = Failure(Stage.RUN, Kind.CRASH, "gone")


def test_a_winner_is_faster_than_the_default_by_an_interval_or_the_default() -> None:
    assert winner_of({"d": measured(1), "a": measured(0.5), "b": FAILED}, "d") == "a"
    assert winner_of({"d": measured(1), "a": measured(1)}, "d") == "d"
    assert winner_of({"d": FAILED, "a": measured(1)}, "d") == "a"
    assert winner_of({"d": measured(1), "a": FAILED}, "d") == "d"


# --- levels and shares -------------------------------------------------------------------------


@given(st.sets(st.integers(1, 100), min_size=1, max_size=8))
def test_levels_begin_in_the_middle_and_learn_from_what_is_done(shares: set[int]) -> None:
    levels = levels_of(sorted(shares))
    assert {x.pct for x in levels} == shares
    assert levels[0].pct == middle_of(sorted(shares))
    done: set[int] = set()
    for level in levels:
        assert set(level.learns_from) <= done
        assert bool(level.learns_from) == bool(done)
        done.add(level.pct)


def test_a_later_level_has_a_part_of_the_trials_and_the_first_all_of_them() -> None:
    base = TuneSettings(
        model=Path("m.onnx"), out=Path("m"), gpu_pct=100, slice_kind="mps", trials=1000
    )
    first, second, *_, last = levels_of([10, 25, 40, 50, 75, 100])
    alone = settings_of(base, first, [], Path("a"))
    assert (alone.pct, alone.trials, alone.slices, alone.warm_start) == (40, 1000, None, ())
    later = settings_of(base, second, [Path("a")], Path("b"))
    assert (later.pct, later.trials, later.slices) == (50, 150, 2)
    assert later.warm_start == (Path("a"),)
    assert settings_of(base, last, [Path("a")], Path("c")).pct == 10


@pytest.mark.parametrize("text", ["", "40", "10,,20", "0,50", "50,101", "a,b", "1.5,3", "40,40"])
def test_shares_that_make_no_matrix_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--shares"):
        shares_of(text)


def test_shares_are_put_in_order() -> None:
    assert shares_of("100, 10%,40") == (10, 40, 100)


# --- what is kept ------------------------------------------------------------------------------


def test_what_is_kept_comes_back_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    proof = CapProof("cpu-0-0", "CPU", 1, 2, "affinity", True)
    with opened(tmp_path / "m", {"shares": [50, 100]}) as kept:
        kept.add("cell", results=[to_json(measured(1)), to_json(FAILED)], proof=to_json(proof))
    with (tmp_path / "m" / "done.jsonl").open("ab") as file:
        file.write(b'{"kind":"cell","resu')
    with opened(tmp_path / "m", {"shares": [50, 100]}) as kept:
        (line,) = kept.of("cell")
        assert [result_of(r) for r in line["results"]] == [measured(1), FAILED]
        assert proof_of(line["proof"]) == proof
        kept.add("cell", results=[])
    with opened(tmp_path / "m", {"shares": [50, 100]}) as kept:
        assert len(list(kept.of("cell"))) == 2


def test_the_folder_of_another_matrix_is_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m", {"shares": [50, 100]}),
        pytest.raises(FolderError, match="another tunerd"),
        opened(tmp_path / "m", {}),
    ):
        pass
    with pytest.raises(FolderError, match="shares"), opened(tmp_path / "m", {"shares": [1, 2]}):
        pass
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").touch()
    with pytest.raises(FolderError, match="holds no matrix"), opened(tmp_path / "x", {}):
        pass


def test_a_kept_build_whose_bytes_have_changed_is_built_again(tmp_path: Path) -> None:
    candidate = Candidate("t", "c" * 16, Origin.SEARCH)
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # of b"hello"
    spec = TensorSpec("x", (1, 3), "float32")
    build = Build(candidate, b"hello", digest, 0.1, (spec,), (0,), "llvm")
    with opened(tmp_path / "m", {}) as kept:
        kept.save_build(build)
        assert kept.build_of(candidate) == build
        assert kept.build_of(Candidate("u", candidate.candidate_id, Origin.SEARCH)) is None
        library = tmp_path / "m" / "builds" / f"{candidate.candidate_id}.so"
        assert library.stat().st_mode & 0o077 == 0
        library.write_bytes(b"other")
        assert kept.build_of(candidate) is None


@pytest.mark.parametrize(
    "changed",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        {"build_secs": "long"},
        {"build_secs": math.nan},
        {"args": [{"name": "x"}]},
        {"args": None},
        {"weight_args": ["first"]},
        {"weight_args": [1]},
        {"weight_args": [-1]},
        {"compiler": None},
    ],
)
def test_a_kept_build_that_cannot_be_read_is_built_again(
    changed: bytes | dict[str, Any], tmp_path: Path
) -> None:
    candidate = Candidate("t", "c" * 16, Origin.SEARCH)
    spec = TensorSpec("x", (1, 3), "float32")
    digest = hashlib.sha256(b"hello").hexdigest()
    with opened(tmp_path / "m", {}) as kept:
        kept.save_build(Build(candidate, b"hello", digest, 0.1, (spec,), (0,), "llvm"))
        about = tmp_path / "m" / "builds" / f"{candidate.candidate_id}.json"
        if isinstance(changed, dict):
            changed = json.dumps(json.loads(about.read_bytes()) | changed).encode()
        about.write_bytes(changed)
        assert kept.build_of(candidate) is None


@pytest.mark.parametrize("line", [b"[]", b"{}", b"7", b'{"kind":7}', b"[" * 100_000, b"\xff"])
def test_a_line_of_what_has_ended_that_is_none_is_refused(line: bytes, tmp_path: Path) -> None:
    with opened(tmp_path / "m", {}) as kept:
        kept.add("cell")
    with (tmp_path / "m" / "done.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(FolderError, match="is damaged"), opened(tmp_path / "m", {}):
        pass


@pytest.mark.parametrize("content", [b"[]", b"7", b"[" * 100_000, b"\xff", b""])
def test_settings_of_a_matrix_that_are_none_are_refused(content: bytes, tmp_path: Path) -> None:
    with opened(tmp_path / "m", {}):
        pass
    (tmp_path / "m" / "matrix.json").write_bytes(content)
    with pytest.raises(FolderError, match="cannot be read"), opened(tmp_path / "m", {}):
        pass


def test_a_matrix_s_folder_is_private_however_it_came_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir(mode=0o755)
    with opened(folder, {}):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    theirs = tmp_path / "x"
    theirs.mkdir(mode=0o755)
    (theirs / "thesis.tex").touch()
    with pytest.raises(FolderError), opened(theirs, {}):
        pass
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755


# --- costs -------------------------------------------------------------------------------------


def kept_lines(*lines: dict[str, Any]) -> Kept:
    kept = Kept(Path("none"))
    kept.lines = list(lines)
    return kept


def cost_line(kind: str, secs: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "cost": to_json(Cost(secs, secs, secs)), **values}


WHOLE = (
    cost_line("level", 100, pct=50, learns_from=[], artifact_cost=to_json(Cost(40, 40, 40))),
    cost_line("level", 10, pct=100, learns_from=[50]),
    cost_line("cost", 20, stage="finalists"),
    *({"kind": "artifact", "tuned_at": pct} for pct in (DEFAULT, 50, 100)),
    cost_line("cost", 60, stage="artifacts"),
    *(
        line
        for number in range(2)
        for line in (
            *({"kind": "cell", "round": number, "run_at": pct} for pct in (50, 100)),
            cost_line("cost", 15, stage="rounds"),
        )
    ),
)


def test_what_all_shares_took_over_one_counts_the_same_on_both_sides() -> None:
    costs = costs_of(kept_lines(*WHOLE))
    assert costs.kernels_over_one == dict.fromkeys(("cpu", "slice", "wall"), Times(90 / 60))
    # One round of the two, as a tune times its model once.
    assert costs.artifacts_over_one["cpu"] == Times(205 / 100)
    assert costs.all == Cost(220, 220, 220)


def test_without_artifacts_what_they_take_cannot_be_told() -> None:
    costs = costs_of(kept_lines(*WHOLE[:5]))
    assert costs.artifacts == UNKNOWN
    assert costs.artifacts_over_one["wall"] == Times(None)
    assert costs.kernels_over_one["wall"] == Times(90 / 60)


def old(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line as tunerds wrote it that counted slices and stages otherwise."""
    line = {k: v for k, v in line.items() if k != "artifact_cost"}
    if "cost" in line:
        line["cost"] = dict(line["cost"])
        line["cost"]["slice_secs"] = line["cost"].pop("slice_work_secs")
    if line.get("stage") in ("artifacts", "rounds"):
        line["stage"] = "models"
    return line


def test_what_an_older_tunerd_has_kept_is_said_as_far_as_it_can_be_told() -> None:
    costs = costs_of(kept_lines(*map(old, WHOLE)))
    assert costs.artifacts.cpu_secs == 60
    assert costs.rounds.cpu_secs == 30
    assert costs.kernels_over_one["cpu"] == Times(130 / 100, is_least=True)
    assert costs.kernels_over_one["slice"] == costs.artifacts_over_one["slice"] == Times(None)
    assert costs.artifacts_over_one["cpu"] == Times(205 / 100)


def test_time_on_slices_is_that_of_their_work_alone(tmp_path: Path) -> None:
    phases = [(Phase.START, 0, 5), (Phase.SEARCH, 5, 20), (Phase.FINALS, 20, 30)]
    spans = [
        Span("tuner-0", Activity.BUILD, 6, 9, "tuner"),
        Span("a", Activity.MEASURE, 6, 9, "slice", busy_secs=2.0),
        Span("b", Activity.MEASURE, 7, 8, "slice", busy_secs=1.0),
        Span("a", Activity.MEASURE, 25, 29, "slice"),
        Span("a", Activity.MEASURE, 50, 51, "slice"),
    ]
    with Store.create_or_open(tmp_path, facts=FACTS) as kept:
        kept.add_spans(spans)
        for phase, start, end in [*phases, (Phase.MODEL, 30, 60)]:
            kept.add_phase(PhaseTime(phase, start, end, core_busy_secs=((0, 1.0),)))
        assert cost_of(kept) == Cost(60, 4, 8)
        assert cost_of(kept, (Phase.MODEL,)) == Cost(30, 1, 1)


# --- the report --------------------------------------------------------------------------------


def result_of_samples(cells: Cells, model: str) -> MatrixResult:
    cost = Cost(60.0, 100.0, 20.0)
    costs = Costs(
        one=cost,
        one_artifact=Cost(20.0, 20.0, 5.0),
        later=cost,
        finalists=cost,
        artifacts=Cost(10.0, None, 5.0),
        rounds=cost + cost + cost,
        round_count=3,
    )
    times = {10: {"a": noisy(1), "b": noisy(2)}, 100: {"a": noisy(2), "b": noisy(1)}}
    return MatrixResult(
        model=model,
        device="NVIDIA H200",
        unit="gpu",
        sms={10: 12, 40: 52, 100: 132},
        rounds=3,
        trials={10: 75, 40: 500, 100: 75},
        learns_from={},
        findings=findings(cells, resamples=100),
        changes=(change("t", times),),
        names={"t": "conv2d<b>", "u": "pool"},
        costs=costs,
        verified={DEFAULT: "right", 10: "cannot tell"},
        clocks_mhz=(1700, 1980),
    )


def test_a_page_shows_each_cell_with_its_interval_and_reads_names_as_text() -> None:
    cells = samples_of(losses(OFF | {(10, 100): 2.5}) | {(DEFAULT, b): 9.0 for b in SHARES})
    result = result_of_samples(cells, "<script>net")
    page = matrix_page(result)
    assert page.count('data-label="run at ') == 12
    assert "tuned at 10%, run at 100%: 2.50\N{NO-BREAK SPACE}ms; over the best 2.5" in page
    assert page.count("heat-0 own") == 3
    assert "&lt;script&gt;net" in page
    assert "conv2d&lt;b&gt;" in page
    assert "Whether these are right cannot be told: tuned at 10%" in page
    plot = ElementTree.fromstring(matrix_plot(result))
    drawn = [e.get("class") for e in plot.iter("{http://www.w3.org/2000/svg}rect")]
    assert Counter(drawn) == {"page": 1, "best": 3, "cell": 9, "own": 3}
    assert "<script>net" in (plot.get("aria-label") or "")
    text = matrix_markdown(result)
    assert "| tuned at 40% |" in text
    assert "cannot be told |" in text  # core time with artifacts
    assert "40% was tuned first, with 500 trials, each other share with 75" in text
    assert "changes with the share for 1 of 1 task, does not for 0" in text
    assert "100%. 1 task more had the default schedule alone." in text
    changed = json.loads(json.dumps(result_json(result)))["changed_tasks"]
    assert (changed["yes"], changed["default_alone"]) == (1, 1)


# --- recipes -----------------------------------------------------------------------------------


def test_the_recipe_of_shares_makes_matrices_profiles_and_runs_to_judge_the_search_by() -> None:
    recipes = script("reproduce").recipes_in(ROOT / "recipes" / "shares.yaml")
    runs = [run for recipe in recipes for run in recipe.runs]
    assert [run.argv[0] for run in runs] == ["matrix"] * 8 + ["profile"] * 4 + ["tune"] * 2
    assert {"light_densenet121-batch8", "encoder12-batch1"} <= {run.name for run in runs}
    assert len({run.out for run in runs}) == 14


def test_what_a_recipe_says_wrong_is_refused_with_its_line(tmp_path: Path) -> None:
    reproduce = script("reproduce")
    path = tmp_path / "r.yaml"
    for text, problem in [
        ("matrix:\n  model: a.onnx\n  shares: 10,200\n", "r.yaml:3.*--?shares"),
        ("matrix:\n  model: a.onnx\n  shares: 10,20\n  gpu-pct: 5\n", "r.yaml:4.*gpu-pct"),
        ("matrix: {}\nmodel: a.onnx\n", "beside matrix"),
        ("profile:\n  model: a.onnx\n  duration: short\n", "r.yaml:3.*'short' is not a dur"),
    ]:
        path.write_text(text)
        with pytest.raises(InputError, match=problem):
            reproduce.recipes_in(path)


def test_a_recipe_begins_nothing_that_has_ended_and_notes_nothing_that_has_failed(
    tmp_path: Path,
) -> None:
    reproduce = script("reproduce")
    path = tmp_path / "r.yaml"
    path.write_text("matrix:\n  model: none.onnx\n  shares: 10,20\n  out: m\n")
    (recipe,) = reproduce.recipes_in(path)
    code, is_through = reproduce.reproduce(recipe, recipe.runs)
    assert code == ExitCode.BAD_MODEL
    assert is_through
    assert not reproduce.has_ended(recipe.runs[0])
    reproduce.marker_of(recipe.runs[0]).write_text(json.dumps({"argv": recipe.runs[0].argv}))
    assert reproduce.reproduce(recipe, recipe.runs) == (0, True)


# --- whole ones --------------------------------------------------------------------------------

needs_two_cores = pytest.mark.skipif(
    host.facts().usable_cores < 2, reason="a level uses two slices of a core each"
)


def command(model: Path, out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tunerd", "matrix", str(model), "--out", str(out), *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@needs_two_cores
def test_a_matrix_that_is_interrupted_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    model, out = tmp_path / "net.onnx", tmp_path / "m"
    onnx.save(conv_net(), model)
    flags = ("--shares", "50,100", "--trials", "16", "--rounds", "2", "--slice", "simulated")
    first = subprocess.Popen(
        command(model, out, *flags), stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert first.stderr is not None
    for line in first.stderr:  # until there is something to lose
        if "finalists of all levels" in line:
            first.send_signal(signal.SIGKILL)
            break
    first.communicate()
    levels = [line for line in done(out) if line["kind"] == "level"]
    assert [line["pct"] for line in levels] == [50, 100]
    ended = subprocess.run(
        [*command(model, out, *flags), "--json"], capture_output=True, text=True, env=environment()
    )
    assert ended.returncode == 0, ended.stderr
    lines = done(out)
    assert [line for line in lines if line["kind"] == "level"] == levels
    contests = [(x["run_at"], x["task_id"]) for x in lines if x["kind"] == "contest"]
    assert len(contests) == len(set(contests))
    document = json.loads(ended.stdout)
    # A simulated candidate takes as long at any share: all that differs is nothing.
    assert {c["answer"] for c in document["findings"]["claims"]} <= {"no", "cannot tell"}
    assert document["changed_tasks"]["yes"] == 0
    page = (out / "report.html").read_text()
    assert "run at 50%" in page
    assert "default schedules" in page
    many = command(model, out, *flags[:-4], "--rounds", "90", *flags[-2:])
    stopped = subprocess.Popen(many, stderr=subprocess.PIPE, text=True, env=environment())
    assert stopped.stderr is not None
    for line in stopped.stderr:
        if "round 4 of 90" in line:
            stopped.send_signal(signal.SIGTERM)
            break
    _, said = stopped.communicate()
    assert stopped.returncode == ExitCode.INTERRUPTED, said
    found = json.loads((out / "matrix-result.json").read_bytes())["rounds"]
    assert 3 <= found < 90
    assert f"{found} of 90 rounds are in {out / 'report.html'}" in said


@pytest.mark.slow
@needs_two_cores
def test_a_matrix_of_cores_has_real_artifacts_at_each_share(tmp_path: Path) -> None:
    model, out = tmp_path / "net.onnx", tmp_path / "m"
    onnx.save(conv_net(), model)
    flags = ("--shares", "50,100", "--trials", "8", "--rounds", "1", "--slice", "cpu", "--json")
    ended = subprocess.run(
        command(model, out, *flags), capture_output=True, text=True, env=environment()
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["sms"]["50"] < document["sms"]["100"]
    assert set(document["verified"].values()) == {"right"}
    for over in document["costs"]["over_one_level"].values():
        assert all(over[what]["value"] > 1 for what in ("cpu", "slice", "wall"))
        assert not any(each["is_least"] for each in over.values())
    for part in document["costs"].values():  # none is left out, and none counts what it only holds
        assert "slice_work_secs" not in part or 0 <= part["slice_work_secs"] < part["wall_secs"]
    cells = {(c["tuned_at"], c["run_at"]) for c in document["findings"]["cells"]}
    assert cells == {(a, b) for a in (DEFAULT, 50, 100) for b in (50, 100)}
    for line in done(out):
        if line["kind"] == "cell":
            assert line["proof"]["sm_count"] == document["sms"][str(line["run_at"])]
            assert all(len(r["run_secs"]) == 10 for r in line["results"])


def done(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "done.jsonl").read_text().splitlines()]
