"""What a report says of what a result depends on."""

from __future__ import annotations

import dataclasses

import pytest

from tests.lib.report_runs import gpu_outcome, view
from tunerd.report.facts_section import model_section
from tunerd.report.figures import weighted_secs
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
    (text,) = said_of_the_whole_model(dataclasses.replace(outcome, latencies=latencies))
    assert said in text


def test_where_the_whole_model_was_not_timed_nothing_is_said_of_it() -> None:
    assert said_of_the_whole_model(dataclasses.replace(gpu_outcome(), latencies=())) == []
