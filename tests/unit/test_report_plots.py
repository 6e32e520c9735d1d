"""The plots of a report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lib.report_pages import Page, plain, write
from tests.lib.report_runs import gpu_outcome
from tunerd.report.plot import history_plot
from tunerd.report.svg import ratio_mark
from tunerd.telemetry.history import HistoryPoint
from tunerd.vocabulary.outcome import Comparison
from tunerd.vocabulary.verdict import Verdict


def test_the_history_shows_its_values_to_the_pointer() -> None:
    plot = history_plot([HistoryPoint(3, 0.588, 4), HistoryPoint(60, 0.0661, 90)])
    assert plot is not None
    titles = [plain(t) for t in re.findall("<title>(.*?)<", plot)]
    assert titles == ["588 ms after 3 s, 4 trials", "66.1 ms after 1 min, 90 trials"]


@pytest.mark.parametrize(
    ("verdict", "style"),
    [
        (Verdict.FASTER, "better"),
        (Verdict.SLOWER, "worse"),
        (Verdict.SAME, "open"),
        (Verdict.CANNOT_TELL, "open"),
    ],
)
def test_the_mark_of_a_ratio_claims_no_more_than_the_verdict(verdict: Verdict, style: str) -> None:
    mark = ratio_mark(Comparison(verdict, 2.0, 1.9, 1.05, 1.01, 1.1), scale=(0.8, 2.0))
    assert f'class="dot {style}"' in mark


def test_a_long_history_stays_small() -> None:
    points = [HistoryPoint(1 + i, 1 / (1 + i), i) for i in range(20_000)]
    plot = history_plot(points)
    assert plot is not None
    assert plot.count("<title>") <= 151


@pytest.mark.parametrize(
    "points",
    [
        [],
        [HistoryPoint(0, None, 0)],
        [HistoryPoint(0, 1e-3, 0)],
        [HistoryPoint(0, 0.0, 0), HistoryPoint(0, 0.0, 1)],
        [HistoryPoint(0, 1e-3, 0), HistoryPoint(0, 5e-4, 1)],
        [HistoryPoint(0, 1e-3, 0), HistoryPoint(1e6, 1e-9, 1)],
    ],
)
def test_a_short_or_odd_history_breaks_nothing(tmp_path: Path, points: list[HistoryPoint]) -> None:
    assert Page(write(tmp_path, gpu_outcome(tasks=1), history=tuple(points))).open == []
