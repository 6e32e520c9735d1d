"""What a matrix says of its samples: the claims, and the kernels that change with the share."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.matrix_samples import (
    FAILED,
    OFF,
    SHARES,
    Cells,
    answers,
    losses,
    measured,
    noisy,
    samples_of,
)
from tunerd.studies.matrix.changes import change
from tunerd.studies.matrix.claims import DEFAULT, findings
from tunerd.studies.matrix.execute import winner_of
from tunerd.vocabulary.verdict import Verdict


def test_where_each_share_has_its_own_best_artifact_the_first_claim_holds() -> None:
    assert answers(findings(samples_of(losses(OFF))))["own"] is Verdict.YES


def test_where_one_artifact_is_as_fast_as_the_own_one_the_first_claim_does_not_hold() -> None:
    assert answers(findings(samples_of(losses(OFF | {(40, 10): 1.0}))))["own"] is Verdict.NO


def test_what_is_tuned_at_full_and_slow_when_cut_is_poor() -> None:
    found = findings(samples_of(losses({(100, 10): 1.5, (100, 40): 1.2})))
    assert answers(found)["cut"] is Verdict.YES
    assert {g.run_at: round(g.ratio.value, 2) for g in found.gains} == {10: 1.5, 40: 1.2}


def test_what_is_tuned_at_full_and_as_fast_when_cut_is_not_poor() -> None:
    assert answers(findings(samples_of(losses({}))))["cut"] is Verdict.NO


def test_the_middle_is_robust_where_both_ends_lose_more_at_worst() -> None:
    table = {(10, 100): 2.0, (100, 10): 1.5, (40, 10): 1.1, (40, 100): 1.1}
    found = findings(samples_of(losses(table)))
    assert answers(found)["middle"] is Verdict.YES
    assert found.robust == 40
    (first, *_) = found.robustness
    assert (first.tuned_at, round(first.worst.value, 2)) == (40, 1.1)


def test_the_middle_is_not_robust_where_an_end_loses_less() -> None:
    found = findings(samples_of(losses({(40, 10): 1.3, (100, 10): 1.05})))
    assert answers(found)["middle"] is Verdict.NO


def test_equal_artifacts_leave_none_the_most_robust() -> None:
    found = findings(samples_of(losses({})))
    assert found.robust is None
    assert {c.answer for c in found.claims} == {Verdict.NO}


def test_rounds_that_contradict_each_other_cannot_tell() -> None:
    cells = samples_of(losses({}))
    cells[100, 10] = [
        [x * f for x in of] for of, f in zip(cells[100, 10], (0.7, 1, 1.5), strict=True)
    ]
    assert answers(findings(cells))["cut"] is Verdict.CANNOT_TELL


def drawn(times: Mapping[tuple[int, int], float], seed: int, noise: float = 0.02) -> Cells:
    rng = np.random.default_rng(seed)
    return {
        cell: [list(secs * np.exp(rng.normal(0, noise, 10))) for _ in range(3)]
        for cell, secs in times.items()
    }


def test_noise_alone_makes_neither_a_false_yes_nor_a_false_no() -> None:
    own_is_best = losses(dict.fromkeys(OFF, 1.025))
    for seed in range(20):
        nothing = answers(findings(drawn(losses({}), seed)))
        assert Verdict.YES not in nothing.values()
        assert answers(findings(drawn(own_is_best, seed)))["own"] is not Verdict.NO


def of_rounds(times: Mapping[tuple[int, int], float], seed: int, count: int) -> Cells:
    """Samples that differ more between rounds than within one."""
    rng = np.random.default_rng(seed)
    return {
        cell: [
            list(secs * np.exp(rng.normal(0, 0.01) + rng.normal(0, 0.003, 10)))
            for _ in range(count)
        ]
        for cell, secs in times.items()
    }


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_differs_between_rounds_is_no_finding(count: int) -> None:
    # Each ratio is what the margin allows, so that a yes as well as a no is false.
    times = losses(dict.fromkeys(OFF, 1.01))
    found = [answers(findings(of_rounds(times, seed, count))) for seed in range(200)]
    for claim in ("own", "cut"):
        false = sum(answer[claim] is not Verdict.CANNOT_TELL for answer in found)
        assert false <= 0.05 * 200 + 6  # two standard deviations over what 95% intervals allow
    gains = [findings(of_rounds(times, seed, count)).gains[0].ratio for seed in range(200)]
    assert sum(g.low <= 1.01 <= g.high for g in gains) >= 0.95 * 200 - 6


def test_one_round_has_no_interval_and_answers_nothing() -> None:
    cells = {cell: rounds[:1] for cell, rounds in samples_of(losses(OFF)).items()}
    found = findings(cells)
    assert {c.answer for c in found.claims} == {Verdict.CANNOT_TELL}
    assert found.robust is None
    own = next(c for c in found.claims if c.name == "own")
    assert own.ratio is not None
    assert (round(own.ratio.value, 3), own.ratio.low, own.ratio.high) == (1.2, 0.0, math.inf)


def test_one_share_answers_nothing() -> None:
    found = findings({(100, 100): [[1.0, 1.1]]})
    assert {c.answer for c in found.claims} == {Verdict.CANNOT_TELL}
    assert found.robust is None


def test_two_shares_have_no_middle_and_no_full_one_is_no_claim() -> None:
    times = {(a, b): 1.0 for a in (25, 50) for b in (25, 50)}
    claims = {c.name: c for c in findings(samples_of(times)).claims}
    assert claims["middle"].answer is Verdict.CANNOT_TELL
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
    first, second = findings(cells), findings(scaled)
    assert answers(first) == answers(second)
    assert first.robust == second.robust


@settings(max_examples=25, deadline=None)
@given(TIMES)
def test_the_best_at_each_share_has_no_loss_and_intervals_hold_no_less(
    times: dict[tuple[int, int], float],
) -> None:
    found = findings(samples_of(times, noise=0.01))
    for b in SHARES:
        of = [c.loss for c in found.cells if c.run_at == b]
        assert min(loss.value for loss in of) == pytest.approx(1.0)
        assert all(1 - 1e-9 <= loss.low <= loss.high for loss in of)
    worst = [r.worst.value for r in found.robustness]
    assert worst == sorted(worst)
    assert all(r.mean.value <= r.worst.value + 1e-9 for r in found.robustness)


@settings(max_examples=25, deadline=None)
@given(TIMES)
def test_an_answer_follows_from_its_interval_and_repeats(
    times: dict[tuple[int, int], float],
) -> None:
    cells = samples_of(times, noise=0.02)
    first = findings(cells)
    assert first == findings(cells)
    for claim in first.claims:
        assert claim.ratio is not None
        assert (claim.answer is Verdict.YES) == (claim.ratio.low > 1.01)
        assert (claim.answer is Verdict.NO) == (claim.ratio.high < 1.01)


# --- kernels -----------------------------------------------------------------------------------


def test_a_task_whose_best_is_faster_than_the_best_of_another_share_changes() -> None:
    found = change("t", {10: {"a": noisy(1), "b": noisy(2)}, 100: {"a": noisy(2), "b": noisy(1)}})
    assert found.answer is Verdict.YES
    assert found.best == {10: "a", 100: "b"}
    assert found.comparison is not None
    assert found.comparison.ratio == pytest.approx(2, rel=0.01)


def test_a_task_with_one_best_at_all_shares_does_not_change() -> None:
    times = {"a": noisy(1), "b": noisy(2)}
    assert change("t", {10: times, 100: times}).answer is Verdict.NO


def test_best_candidates_within_a_percent_are_no_change() -> None:
    found = change(
        "t", {10: {"a": noisy(1), "b": noisy(1.002)}, 100: {"a": noisy(1.002), "b": noisy(1)}}
    )
    assert len(set(found.best.values())) == 2
    assert found.answer is Verdict.NO


def test_few_samples_cannot_tell_and_a_candidate_that_failed_at_a_share_takes_no_part() -> None:
    few = {10: {"a": [1.0, 1.0], "b": [2.0, 2.0]}, 100: {"a": [2.0, 2.0], "b": [1.0, 1.0]}}
    assert change("t", few).answer is Verdict.CANNOT_TELL
    gone = {10: {"a": noisy(1), "b": noisy(2)}, 100: {"b": noisy(1)}}
    assert change("t", gone).best == {10: "b", 100: "b"}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.9, 1.1), min_size=20, max_size=20))
def test_what_judges_a_best_candidate_is_not_what_has_chosen_it(noise: list[float]) -> None:
    # The other candidate's odd samples, which judge, are the same at both shares.
    times = {"a": [1.0] * 20, "b": noise}
    assert change("t", {10: times, 100: times}).answer is Verdict.NO


def test_a_winner_is_faster_than_the_default_by_an_interval_or_the_default() -> None:
    for results, winner in (
        ({"d": measured(1), "a": measured(0.5), "b": FAILED}, "a"),
        ({"d": measured(1), "a": measured(1)}, "d"),
        ({"d": FAILED, "a": measured(1)}, "a"),
        ({"d": measured(1), "a": FAILED}, "d"),
        ({"d": measured(1), "other": measured(0.1), "a": measured(0.5)}, "a"),
    ):
        assert winner_of(results, "d", {"a", "b"}) == winner
