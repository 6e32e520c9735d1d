"""What a report says of what a result depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from tests.lib.report_runs import gpu_outcome, view
from tunerd.report.facts_section import model_section
from tunerd.report.figures import weighted_secs
from tunerd.report.markdown import run_markdown
from tunerd.report.markdown_text import text
from tunerd.report.slice_section import slice_section
from tunerd.report.view import Pairs
from tunerd.vocabulary.outcome import Outcome


def said_of_the_whole_model(outcome: Outcome) -> list[str]:
    (pairs,) = model_section(view(outcome)).blocks
    assert isinstance(pairs, Pairs)
    return [said for name, said in pairs.rows if name == "Whole model"]


@pytest.mark.parametrize(
    ("times", "said"), [(1.25, "more than its kernels"), (0.75, "less than its kernels")]
)
def test_the_whole_model_is_held_against_its_kernels(times: float, said: str) -> None:
    outcome = gpu_outcome()
    timed = tuple(t for t in outcome.tasks if weighted_secs([t])[1] is not None)
    outcome = dataclasses.replace(outcome, tasks=timed)
    _, kernels_secs = weighted_secs(outcome.tasks)
    assert kernels_secs is not None
    latencies = tuple(
        dataclasses.replace(each, run_secs=(times * kernels_secs,) * 31)
        if each.name == "tuned"
        else each
        for each in outcome.latencies
    )
    (found,) = said_of_the_whole_model(dataclasses.replace(outcome, latencies=latencies))
    assert said in found


STORED = (
    "9 tensors between kernels and weights are stored as float16; 2 stay float32: 2 few values "
    "(mean, fused_matmul_add); all floats are computed in float32, with sums of products"
)


def asked_on_the_page(settings: Mapping[str, object]) -> str:
    pairs, *_ = slice_section(view(gpu_outcome(), settings=settings)).blocks
    assert isinstance(pairs, Pairs)
    return str(dict(pairs.rows)["Precision asked"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "none: as exported"),
        ({"precision": None, "precision_from": "flag"}, "none: as exported"),
        ({"precision": "fp16"}, "fp16, sums in fp32"),
        ({"precision": "fp32"}, "fp32"),
        ({"precision": "bf16", "precision_from": "auto"}, "bf16, chosen by tunerd, sums in fp32"),
        ({"precision_from": "auto"}, "auto, not chosen yet"),
    ],
)
def test_the_precision_stands_where_the_page_says_what_was_asked(
    settings: Mapping[str, object], said: str
) -> None:
    assert asked_on_the_page(settings) == said


def test_the_page_and_markdown_say_what_stays_in_fp32() -> None:
    outcome = gpu_outcome()
    model = dataclasses.replace(outcome.model, notes=(*outcome.model.notes, STORED))
    seen = view(dataclasses.replace(outcome, model=model), settings={"precision": "fp16"})
    (pairs,) = model_section(seen).blocks
    assert isinstance(pairs, Pairs)
    rows = list(pairs.rows)
    assert [said for name, said in rows if name == "Precision"] == ["fp16, sums in fp32", STORED]
    assert ("Changed on import", STORED) not in rows
    assert f"- Precision fp16, sums in fp32\n- {text(STORED)}\n" in run_markdown(seen)


def test_nothing_is_said_of_a_precision_that_nobody_asked_for() -> None:
    assert "Precision" not in run_markdown(view(gpu_outcome(), settings={"gpu_pct": 40}))


def test_where_the_whole_model_was_not_timed_nothing_is_said_of_it() -> None:
    assert said_of_the_whole_model(dataclasses.replace(gpu_outcome(), latencies=())) == []
