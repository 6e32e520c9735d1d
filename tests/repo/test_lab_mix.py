"""How the lab's script of a mix adds up what each part of the work took."""

from __future__ import annotations

from typing import Any

import pytest

from lab.colocation.mix_of_four import kind_of, secs_by_kind, tables


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("tuning resnet50 at 25%: search", "tuning"),
        ("measuring resnet50: round 1 of 3", "curves"),
        ("the engine with resnet50: loading one", "the engine's cost"),
        ("resnet50 at 25% beside encoder at 25%: space: loading one", "pairs"),
        ("searching placements", "search"),
        ("space: poisson load for 10 s", "proof"),
    ],
)
def test_a_message_belongs_to_a_part_of_the_work(message: str, kind: str) -> None:
    assert kind_of(message) == kind


def line(call: float, at: float, message: str) -> dict[str, Any]:
    return {"call": call, "at": at, "message": message}


def test_what_was_stopped_and_went_on_is_added_up() -> None:
    lines = [
        line(1, 0, "starting"), line(1, 2, "tuning a at 25%"), line(1, 50, "tuning b at 25%"),
        line(1, 580, ""), line(2, 0, "starting"), line(2, 3, "tuning b at 25%"), line(2, 13, ""),
    ]  # fmt: skip
    assert secs_by_kind(lines) == {"start": 5, "tuning": 588}


def test_the_table_says_whether_it_was_in_time_and_what_came() -> None:
    member = {
        "member": "a", "asked": 1000, "answered": 999, "within": 0.995, "is_kept": True,
        "expected": {"p50_secs": 0.001, "tail_secs": 0.004},
        "measured": {"p50_secs": 0.0011, "tail_secs": None},
    }  # fmt: skip
    planned = {"text": "A plan: 25%: a", "proof": {"members": [member]}}
    document = {"by_kind": {"tuning": 400.0, "proof": 60.0}, "calls": 1, "problems": {}}
    shown = tables(document | {"planned": planned})
    assert "460 s (tuning 400 s, proof 60 s)" in shown
    assert "A plan: 25%: a; within 600 s: yes" in shown
    assert "| a | 999 of 1,000 | 1 ms | 1.1 ms | 4 ms | - | 99.50% |" in shown
    assert "goes on" in tables(document)
