"""The lab's script on the wait for company and objectives: what it serves, and what it tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.colocation.company import Turn, Way, as_served, shown, simulated, turn
from lab.colocation.simulated import Calls, simulated_places
from tunerd.colocation.plan import LoadChoice, PolicyChoice
from tunerd.errors import InputError


def test_a_plan_is_served_with_another_wait_and_with_or_without_objectives(tmp_path: Path) -> None:
    plan = simulated(tmp_path, 10.0)
    with_them, without = (as_served(plan, Way(0.5, has)) for has in (True, False))
    assert {m.slo_ms for m in with_them.members} == {20.0}
    assert {m.slo_ms for m in without.members} == {None}
    assert {p.policy.parameters["window_ms"] for p in (with_them, without)} == {0.5}
    with pytest.raises(InputError, match="give one of space-time"):
        as_served(plan.model_copy(update={"policy": PolicyChoice(kind="time")}), Way(0.5, True))


def test_a_turn_counts_what_was_answered_and_how_many_were_in_a_launch(tmp_path: Path) -> None:
    place = simulated_places(200.0, 8, calls=Calls(0.0, 0.0, 0.0))["graphs"]()
    load = LoadChoice(kind="poisson", duration=0.5)
    found = turn(simulated(tmp_path, 50.0), Way(1.0, has_objectives=True), load, place)
    assert 0 < found.answered <= found.asked
    assert 0.2 <= found.p50_ms <= found.p99_ms
    assert found.per_launch >= 1
    assert found.joules is None


def test_each_way_is_a_row_of_all_its_turns() -> None:
    on, off = Way(1.0, has_objectives=True), Way(0.0, has_objectives=False)
    turns = [Turn(on, p50, 2.0, 90, 100, 3.0, 0.5) for p50 in (1.0, 1.2, 1.1)]
    text = shown([*turns, Turn(off, 1.0, 2.0, 100, 100, 2.0, None)])
    assert "1.1 ms (1 ms to 1.2 ms)" in text
    assert "30 of 300" in text
    assert "| 0 ms | no |" in text.replace("  ", " ")
