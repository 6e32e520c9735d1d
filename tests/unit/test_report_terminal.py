"""The terminal table and the JSON document say what the outcome says, and no more."""

# ruff: noqa: RUF001  the multiplication sign and the en dash are what people read

from __future__ import annotations

import dataclasses
import io
import json
import math
import re

import pytest
from rich.console import Console

from tests.lib.report_pages import terminal
from tests.lib.report_runs import gpu_outcome
from tunerd.report.figures import by_share
from tunerd.report.table import outcome_json
from tunerd.report.terminal import table
from tunerd.report.view import Grid
from tunerd.vocabulary.outcome import Comparison
from tunerd.vocabulary.verdict import Verdict


def test_the_terminal_shows_the_twenty_heaviest_tasks() -> None:
    outcome = gpu_outcome(tasks=43)
    text = terminal(outcome)
    shown = [s.task.name for s in by_share(outcome.tasks)]
    assert all(re.search(rf"{name}\b", text) for name in shown[:20])
    assert not re.search(rf"{shown[20]}\b", text)
    assert "and 23 more" in text
    assert text.startswith("2.10× faster")


def test_the_terminal_names_the_tasks_that_stay_at_their_default_and_why() -> None:
    text = terminal(gpu_outcome(tasks=8))
    assert (
        "at the default, no finalist is faster than the default by an interval: "
        "fused_conv2d_add_relu5"
    ) in text
    assert "at the default, the search found no candidate: stem_conv2d8" in text


@pytest.mark.parametrize("width", [1, 20, 40, 80])
def test_the_terminal_may_be_narrow(width: int) -> None:
    assert terminal(gpu_outcome(), width)


def test_brackets_and_escapes_in_names_reach_no_terminal() -> None:
    outcome = gpu_outcome(tasks=2)
    odd = dataclasses.replace(outcome.tasks[0], name="[bold]x[/]\x1b]0;title\x07")
    text = terminal(dataclasses.replace(outcome, tasks=(odd,)))
    assert "[bold]x[/]" in text
    assert "\x1b" not in text


def test_the_document_is_json_with_the_derived_figures() -> None:
    outcome = gpu_outcome(tasks=12)
    document = json.loads(json.dumps(outcome_json(outcome), allow_nan=False))
    assert document["hit_rate"] == outcome.hit_rate
    assert document["verdict"] == "faster"
    assert document["ratio"] == 2.102
    assert document["tasks_tuned"] == 10
    assert document["tasks"][0]["best_secs"] == outcome.tasks[0].best_secs
    assert document["tasks"][0]["is_tuned"] is True
    assert document["kernels_default_secs"] is None
    assert "proto" not in document["model"]
    assert len(document["latencies"][0]["run_secs"]) == 31


def test_the_document_has_null_for_what_is_no_number() -> None:
    compared = Comparison(Verdict.CANNOT_TELL, math.nan, math.inf, math.nan, 0.0, math.inf)
    document = outcome_json(dataclasses.replace(gpu_outcome(tasks=1), end_to_end=compared))
    assert document["ratio"] is None
    assert json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(("width", "lines"), [(140, 2), (105, 3)])
def test_a_table_that_is_too_wide_folds_the_heads_of_its_numbers_and_no_name(
    width: int, lines: int
) -> None:
    heads = ("policy", "member", "tenant", *("within SLO", "of admitted") * 4)
    row = ("ordered", "squeezenet", "default", *("87.3%", "100.0%") * 4)
    console = Console(width=width, file=io.StringIO())
    console.print(table(Grid(heads, [row], numbers=range(3, 11))))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert len(shown) == lines
    assert shown[-1].split() == [*row]
