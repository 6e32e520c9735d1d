"""Rounds of repeats as figures: what counts, what is told, and what is not."""

from __future__ import annotations

import pytest

from tunerd.runner.load import Repeats
from tunerd.stats.tail import samples_needed
from tunerd.studies.bench.bench import Condition, Round, summarize
from tunerd.vocabulary.verdict import Verdict


def ran(slice_id: str, *, start: float = 0.0, secs: float = 0.01, count: int = 100) -> Repeats:
    starts = tuple(start + i * secs for i in range(count))
    return Repeats(slice_id, starts, tuple(s + secs for s in starts))


def alone(secs: float = 0.01, count: int = 100) -> Round:
    return Round(Condition.ALONE, (ran("a", secs=secs, count=count),))


def test_only_the_time_counts_in_which_all_slices_worked() -> None:
    late, early = ran("a", start=0.25, count=100), ran("b", start=0.0, count=100)
    together = Round(Condition.BESIDE, (late, early))
    assert together.window == (0.25, 1.0)
    assert len(together.trimmed(late).starts) in (74, 75)  # the last ends there, by rounding
    assert all(s >= 0.25 for s in together.trimmed(early).starts)


def test_neighbours_of_another_kind_trim_the_window_too() -> None:
    short = ran("hog", start=0.5, secs=0.1, count=3)
    together = Round(Condition.BESIDE, (ran("a"),), (short,))
    assert together.window == pytest.approx((0.5, 0.8))
    side = summarize([alone(), together]).beside
    assert side is not None
    assert 29 <= side.replicas[0].samples <= 30  # at the edges by rounding


def test_slices_that_did_not_work_at_once_are_refused() -> None:
    apart = Round(Condition.BESIDE, (ran("a"), ran("b", start=5.0)))
    with pytest.raises(ValueError, match="at the same time"):
        summarize([alone(), apart])
    with pytest.raises(ValueError, match="b did not work"):
        summarize([alone(), Round(Condition.BESIDE, (ran("a"), ran("b", count=0)))])


@pytest.mark.parametrize(("count", "told"), [(9, 0), (10, 1), (100, 2), (499, 2), (500, 3)])
def test_a_percentile_is_told_only_of_enough_samples(count: int, told: int) -> None:
    (speed,) = summarize([alone(count=count)]).alone.replicas
    assert sum(secs is not None for _, secs in speed.percentiles) == told
    assert speed.samples == count
    assert samples_needed(99) == 500


def test_samples_of_all_rounds_are_taken_together() -> None:
    bench = summarize([alone(count=60), alone(count=60)])
    assert (bench.alone.rounds, bench.alone.replicas[0].samples) == (2, 120)
    assert bench.alone.window_secs == pytest.approx(1.2)
    assert bench.alone.replicas[0].per_sec == pytest.approx(100)


def test_the_slow_down_is_beside_over_alone_with_an_interval() -> None:
    rounds = []
    for i in range(10):
        rounds.append(alone(0.01 + 1e-5 * i))
        rounds.append(Round(Condition.BESIDE, (ran("a", secs=0.015 + 1e-5 * i), ran("b"))))
    slowdown = summarize(rounds).slowdown
    assert slowdown is not None
    assert slowdown.ratio == pytest.approx(1.5, rel=0.01)
    assert slowdown.ratio_low <= slowdown.ratio <= slowdown.ratio_high
    assert slowdown.verdict is Verdict.FASTER  # alone is


def test_a_neighbour_that_was_alone_in_turns_has_a_slow_down_too() -> None:
    rounds = []
    for _ in range(10):
        rounds.append(alone())
        rounds.append(Round(Condition.BESIDE, (ran("a"),), (ran("b", secs=0.03, count=33),)))
        rounds.append(Round(Condition.NEIGHBOUR, (), (ran("b", secs=0.02, count=50),)))
    bench = summarize(rounds)
    assert bench.neighbour is not None
    assert bench.neighbour_slowdown is not None
    assert bench.neighbour.others[0].p50_secs == pytest.approx(0.02)
    assert bench.neighbour_slowdown.ratio == pytest.approx(1.5)
    slow = Round(Condition.BESIDE, (ran("a"),), (ran("b", secs=2, count=1),))
    assert summarize([rounds[0], slow, rounds[2]]).neighbour_slowdown is None


def test_replicas_are_told_apart_and_added_up() -> None:
    together = Round(Condition.BESIDE, (ran("a"), ran("b", secs=0.02, count=50)))
    side = summarize([alone(), together]).beside
    assert side is not None
    assert side.spread == pytest.approx(1.0)
    assert side.per_sec == pytest.approx(150, rel=0.02)


def test_a_burst_of_calls_is_one_sample_of_their_mean() -> None:
    burst = Repeats("hog", (0.0, 1.0), (1.0, 2.0), calls=4)
    assert burst.secs == (0.25, 0.25)
    (speed,) = summarize([Round(Condition.ALONE, (burst,))]).alone.replicas
    assert speed.per_sec == 4.0
