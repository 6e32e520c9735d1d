"""What `compare` may say about two sets of samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunerd.stats.paired import compare, fastest
from tunerd.vocabulary.verdict import Verdict

OPPOSITE = {
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
    Verdict.SAME: Verdict.SAME,
    Verdict.CANNOT_TELL: Verdict.CANNOT_TELL,
}

samples = st.lists(st.floats(1e-6, 1e-1), min_size=1, max_size=25)


def noisy(median: float, count: int, seed: int, spread: float = 0.05) -> list[float]:
    """Skewed like run times: most near the median, some far above."""
    rng = np.random.default_rng(seed)
    return [float(s) for s in median * np.exp(np.abs(rng.normal(0.0, spread, count)))]


def test_half_the_time_is_faster_and_the_interval_holds_the_ratio() -> None:
    result = compare(noisy(2e-3, 20, 1), noisy(1e-3, 20, 2))
    assert result.verdict is Verdict.FASTER
    assert 1.8 < result.ratio_low <= result.ratio <= result.ratio_high < 2.2
    assert result.base_secs == pytest.approx(2 * result.new_secs, rel=0.1)


def test_twice_the_time_is_slower() -> None:
    assert compare(noisy(1e-3, 20, 1), noisy(2e-3, 20, 2)).verdict is Verdict.SLOWER


def test_samples_that_agree_within_a_percent_are_the_same() -> None:
    assert compare([1e-3] * 10, [1e-3] * 10).verdict is Verdict.SAME
    alternating = [1e-3 * (1.0 + 0.001 * (-1) ** i) for i in range(20)]
    assert compare(alternating, alternating[1:] + alternating[:1]).verdict is Verdict.SAME


def test_wide_noise_around_one_median_cannot_be_told() -> None:
    assert compare(noisy(1e-3, 8, 1, 0.5), noisy(1e-3, 8, 2, 0.5)).verdict is Verdict.CANNOT_TELL


@pytest.mark.parametrize(("base", "new"), [(4, 40), (40, 4), (1, 1)])
def test_fewer_than_five_samples_on_a_side_tell_nothing_of_what_is_near(
    base: int, new: int
) -> None:
    result = compare(noisy(1.9e-3, base, 1, 0.001), noisy(1e-3, new, 2, 0.001))
    assert result.verdict is Verdict.CANNOT_TELL
    assert result.ratio_low <= result.ratio <= result.ratio_high


@pytest.mark.parametrize(("base", "new"), [(1, 20), (3, 3), (2, 4)])
def test_what_may_be_chance_is_not_told_however_far_it_is(base: int, new: int) -> None:
    assert compare([9.0] * base, [1.0] * new).verdict is Verdict.CANNOT_TELL


def test_two_samples_tell_what_is_far_from_many() -> None:
    slow, fast = [20.0, 21.0], noisy(1.0, 20, 1)
    forward, backward = compare(slow, fast), compare(fast, slow)
    assert forward.verdict is Verdict.FASTER
    assert backward.verdict is Verdict.SLOWER
    assert forward.ratio_low < forward.ratio < forward.ratio_high
    assert compare([20.0, 1.0], fast).verdict is Verdict.CANNOT_TELL
    assert compare(slow, fast, of=100).verdict is Verdict.CANNOT_TELL


def test_pairs_see_through_a_drift_that_both_sides_share() -> None:
    drift = np.linspace(1.0, 3.0, 20)
    base = [float(s) for s in 1.05e-3 * drift]
    new = [float(s) for s in 1.00e-3 * drift]
    assert compare(base, new).verdict is Verdict.FASTER
    assert compare(base, new[:-1]).verdict is Verdict.CANNOT_TELL


def test_the_same_seed_repeats_the_interval() -> None:
    base, new = noisy(1e-3, 12, 1), noisy(1e-3, 12, 2)
    assert compare(base, new, seed=3) == compare(base, new, seed=3)


@settings(max_examples=60, deadline=None)
@given(base=samples, new=samples)
def test_swapping_the_sides_inverts_the_result(base: list[float], new: list[float]) -> None:
    forward, backward = compare(base, new), compare(new, base)
    assert backward.verdict is OPPOSITE[forward.verdict]
    assert backward.ratio == pytest.approx(1 / forward.ratio)
    assert backward.ratio_low == pytest.approx(1 / forward.ratio_high)
    assert backward.ratio_high == pytest.approx(1 / forward.ratio_low)


@settings(max_examples=40, deadline=None)
@given(base=samples, new=samples, scale=st.floats(0.01, 100.0))
def test_the_unit_of_time_does_not_matter(
    base: list[float], new: list[float], scale: float
) -> None:
    one, other = compare(base, new), compare([s * scale for s in base], [s * scale for s in new])
    assert other.ratio == pytest.approx(one.ratio)
    assert other.ratio_low == pytest.approx(one.ratio_low)


@pytest.mark.parametrize("count", [5, 8, 20])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_two_draws_of_the_same_noise_are_seldom_called_faster(count: int, spread: float) -> None:
    verdicts = [
        compare(noisy(1e-3, count, 2 * s, spread), noisy(1e-3, count, 2 * s + 1, spread)).verdict
        for s in range(200)
    ]
    assert sum(v is Verdict.FASTER for v in verdicts) <= 0.1 * len(verdicts)
    assert sum(v is Verdict.SLOWER for v in verdicts) <= 0.1 * len(verdicts)


@pytest.mark.parametrize("count", [3, 6])
def test_the_best_of_several_equally_fast_ones_is_seldom_called_faster(count: int) -> None:
    rng = np.random.default_rng(1)
    called = {"as of one": 0, "as of several": 0}
    for _ in range(400):
        base, *rivals = np.exp(rng.normal(0.0, 0.01, (1 + count, 20)))
        best = min(rivals, key=lambda secs: float(np.median(secs)))
        called["as of one"] += compare(base, best).verdict is Verdict.FASTER
        called["as of several"] += compare(base, best, of=count).verdict is Verdict.FASTER
    assert called["as of several"] <= 0.025 * 400 < called["as of one"]


def test_the_best_of_several_keeps_the_interval_of_one() -> None:
    base, best = [1.0, 1.01, 1.02, 1.0, 1.01], [0.99, 1.0, 1.01, 0.99, 1.0]
    alone, several = compare(base, best), compare(base, best, of=4)
    assert (several.ratio_low, several.ratio_high) == (alone.ratio_low, alone.ratio_high)
    assert compare(base, best, of=1) == alone


@pytest.mark.parametrize("bad", [[], [0.0] * 6, [-1e-3] * 6, [math.nan] * 6, [math.inf] * 6])
def test_times_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="new_secs"):
        compare([1e-3] * 6, bad)


def test_the_fastest_is_that_of_the_least_median_and_is_judged_as_the_best_of_all() -> None:
    base = noisy(1e-3, 20, 0)
    rivals = {str(seed): noisy(1e-3, 20, seed) for seed in range(1, 7)}
    best, compared = fastest(base, rivals)
    assert float(np.median(rivals[best])) == min(float(np.median(r)) for r in rivals.values())
    assert compared == compare(base, rivals[best], of=6)
    assert fastest(None, rivals) == (best, None)
    assert fastest(base, {"first": base, "second": base})[0] == "first"
