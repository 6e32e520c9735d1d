"""How a report says verdicts, latencies and intervals in words."""

# ruff: noqa: RUF001  the multiplication sign and the en dash are what people read

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.lib.report_pages import plain, with_verdict
from tests.lib.report_runs import gpu_outcome
from tunerd.report.figures import outcome_headline
from tunerd.stats.interval import median_interval
from tunerd.system.text import (
    duration_text,
    numbers_text,
    percent_text,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.vocabulary.outcome import Verification
from tunerd.vocabulary.verdict import Interval, Verdict


def test_a_wrong_result_outweighs_any_speed() -> None:
    outcome = gpu_outcome()
    wrong = Verification(Verdict.WRONG, 3, 1e-3, 1e-4, 31.4, "output 0 differs")
    said = outcome_headline(dataclasses.replace(outcome, verification=wrong))
    assert said.tone == "bad"
    assert said.text == (
        "Wrong result: the tuned model disagrees with ONNX Runtime on 3 seeds, "
        "by 31.4 × the tolerance"
    )


def test_speed_without_a_checked_result_is_not_celebrated() -> None:
    outcome = gpu_outcome()
    unknown = Verification(Verdict.CANNOT_TELL, 3, 1e-3, 1e-4, 0.0, "the reference is constant")
    said = outcome_headline(dataclasses.replace(outcome, verification=unknown))
    assert said.tone == "neutral"
    assert "cannot tell whether its results are right" in said.text


@pytest.mark.parametrize(
    ("verdict", "ratio", "words"),
    [
        (Verdict.SLOWER, 0.9, "No gain: 0.90× the speed of the default schedules, slower"),
        (Verdict.SAME, 1.0, "No gain: as fast as the default schedules (ratio 1.00"),
        (Verdict.CANNOT_TELL, 1.02, "Cannot tell whether it is faster"),
    ],
)
def test_no_gain_is_said_neutrally(verdict: Verdict, ratio: float, words: str) -> None:
    said = outcome_headline(with_verdict(verdict, ratio))
    assert said.text.startswith(words)
    assert said.tone == "neutral"


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0 s"),
        (1.234e-6, "1.23 µs"),
        (3.4e-9, "0.00340 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1.00 ms"),
        (9.996e-3, "10.0 ms"),
        (0.588, "588 ms"),
        (12.3456, "12.3 s"),
    ],
)
def test_a_latency_has_three_digits_and_the_unit_that_fits(secs: float | None, text: str) -> None:
    assert plain(secs_text(secs)) == text


def test_a_range_of_latencies_shows_that_its_ends_differ() -> None:
    assert plain(secs_range_text(12.331e-3, 12.384e-3)) == "12.33–12.38 ms"
    assert plain(secs_range_text(0.999e-3, 1.002e-3)) == "0.999–1.002 ms"


def test_durations_and_shares_read_as_people_say_them() -> None:
    durations = (0.25, 43, 59.7, 150, 600, 3900, 7199.9)
    assert [duration_text(s) for s in durations] == [
        "0.2 s", "43 s", "1 min", "2 min 30 s", "10 min", "1 h 05 min", "2 h 00 min",
    ]  # fmt: skip
    assert [percent_text(f) for f in (None, 0.0, 0.0001, 0.394)] == ["–", "0.0%", "<0.1%", "39.4%"]


def test_a_tight_interval_gets_the_digits_to_be_seen() -> None:
    assert ratio_texts(Interval(2.1, 2.05, 2.16)) == ("2.10", "2.05–2.16")
    assert ratio_texts(Interval(1.013, 1.0122, 1.0138)) == ("1.0130", "1.0122–1.0138")


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    seen = median_interval([float(i) for i in range(1, 21)])
    assert seen is not None
    assert (seen.low, seen.value, seen.high) == (6.0, 10.5, 15.0)
    few = median_interval([1.0, 2.0, 3.0])
    assert few is not None
    assert (few.low, few.high) == (-math.inf, math.inf)


def test_numbers_are_shown_as_ranges() -> None:
    assert numbers_text([]) == ""
    assert numbers_text([7]) == "7"
    assert numbers_text([3, 0, 1, 2, 32, 34, 33, 2]) == "0-3,32-34"
