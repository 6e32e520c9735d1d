"""Slowdowns of pairs: what is learned from measured ones, how sure it is, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tunerd.colocation.load.alone import AgainstAlone
from tunerd.colocation.plan import Member, Plan, lane_of
from tunerd.colocation.planning import pairs
from tunerd.colocation.planning.estimates import (
    LEVEL,
    Calibration,
    Checked,
    SlowdownModel,
    model_of,
)
from tunerd.colocation.planning.pairs import PAIRS, Pair, Pairs, Side, append, read_pairs
from tunerd.errors import InputError
from tunerd.report.calibration import calibration_plot
from tunerd.vocabulary.verdict import Interval

DEVICE = "a device"
SHARES = (10, 25, 50, 75)


def side(name: str, share: int, weights: float, flops: float) -> Side:
    return Side(name, name, share, {"weight_bytes": weights, "flops": flops})


def models(count: int, seed: int, *, inner: float = 0.0) -> list[tuple[str, float, float]]:
    """Return names, bytes of weights and operations; `inner` of the ranges' ends are left out."""
    rng = random.Random(seed)

    def within(low: float, high: float) -> float:
        cut = inner * (high - low)
        return float(10 ** rng.uniform(low + cut, high - cut))

    return [(f"m{i}", within(6, 8.5), within(8, 10.5)) for i in range(count)]


def law(of: Side, beside: Side) -> float:
    """Return a slowdown: a neighbour that moves much hurts one that computes little."""
    moved = math.log10(beside.features["weight_bytes"]) - 6
    computed = math.log10(of.features["flops"]) - 8
    return 1 + 0.06 * moved * (beside.share / 50) * (1 - 0.25 * computed)


def pairs_of(count: int, *, seed: int = 0, noise: float = 0.01, inner: float = 0.0) -> list[Pair]:
    rng = random.Random(seed)
    found = []
    for one, two in itertools.combinations(models(count, seed, inner=inner), 2):
        for a, b in itertools.product(SHARES, SHARES):
            if a + b > 100:
                continue
            for first, s, second, t in ((one, a, two, b), (two, b, one, a)):
                of, beside = side(first[0], s, *first[1:]), side(second[0], t, *second[1:])
                value = law(of, beside) * (1 + rng.gauss(0, noise))
                found.append(Pair(of, beside, DEVICE, Interval(value, value, value), "a law"))
    return found


@pytest.fixture(scope="module")
def model() -> SlowdownModel:
    return SlowdownModel(pairs_of(8))


def test_pairs_of_models_that_were_left_out_are_estimated_well(model: SlowdownModel) -> None:
    assert model.calibration.median_error < 0.05
    assert model.calibration.median_error < 0.7 * model.calibration.median_error_of_constant
    assert model.calibration.coverage >= LEVEL - 0.03
    wide = [each.estimate.high / each.estimate.low for each in model.calibration.checked]
    assert np.median(wide) < 1.2  # an interval that holds everything tells nothing


def test_the_constant_that_estimates_have_to_beat_is_of_other_models() -> None:
    a, b, c = (Side(name, name, 50, {}) for name in "abc")

    def checked(of: Side, beside: Side, slowdown: float) -> Checked:
        exactly = Interval(slowdown, slowdown, slowdown)
        return Checked(Pair(of, beside, DEVICE, exactly, "a law"), exactly)

    found = Calibration((checked(a, b, 2.0), checked(b, a, 2.0), checked(a, c, 1.0)))
    assert found.median_error == 0
    assert found.median_error_of_constant == pytest.approx(0.5)  # 1.0 is said of 2.0


def test_pairs_that_lack_a_feature_teach_without_it() -> None:
    def told(side: Side) -> Side:
        return replace(side, features={**side.features, "waves": 0.5})

    pairs = pairs_of(8)
    newer = [replace(pair, of=told(pair.of), beside=told(pair.beside)) for pair in pairs[:10]]
    mixed, older = SlowdownModel([*newer, *pairs[10:]]), SlowdownModel(pairs)
    asked = pairs[3]
    expected = older.estimate(asked.of, asked.beside)
    assert mixed.estimate(told(asked.of), told(asked.beside)) == expected
    assert older.estimate(told(asked.of), asked.beside) == expected


def test_new_models_within_what_was_seen_are_within_their_intervals(model: SlowdownModel) -> None:
    held = total = 0
    errors = []
    for pair in pairs_of(6, seed=3, inner=0.35):
        said = model.estimate(pair.of, pair.beside)
        if isinstance(said, str):
            continue
        total += 1
        held += said.low <= pair.slowdown.value <= said.high
        errors.append(abs(said.value / pair.slowdown.value - 1))
    assert total > 100
    assert np.median(errors) < 0.05
    assert held / total >= 0.8


def test_what_lies_outside_of_what_was_measured_is_refused_by_name(model: SlowdownModel) -> None:
    known = model.calibration.checked[0].pair
    big = Side("big", "big", known.of.share, {**known.of.features, "weight_bytes": 1e11})
    assert model.estimate(big, known.beside) == (
        "its own weight bytes lies outside of what was measured"
    )
    assert model.estimate(known.of, big) == (
        "its neighbour's weight bytes lies outside of what was measured"
    )
    whole = Side("whole", "whole", 100, known.of.features)
    assert "its share" in str(model.estimate(whole, known.beside))
    strange = Side("strange", "strange", 50, {"depth": 1.0})
    assert "features are not those" in str(model.estimate(strange, known.beside))


def test_few_pairs_teach_nothing() -> None:
    found, why = model_of(pairs_of(3))
    assert found is None
    assert "of 3 pairs of models are too few" in why


def test_a_measured_pair_goes_before_an_estimate_and_both_before_an_assumption(
    model: SlowdownModel,
) -> None:
    known = pairs_of(8)
    table = Pairs(known[:1], DEVICE, model=model)
    first, second = known[0], known[2]
    assert table.slowdown(first.of, first.beside).how == "measured"
    said = table.slowdown(second.of, second.beside)
    assert said.how == "estimated"
    assert said.interval.low < said.interval.high
    big = Side("big", "big", 50, {**first.of.features, "flops": 1e15})
    said = table.slowdown(big, first.beside)
    assert said.how == "assumed"
    assert said.note == "not estimated: its own flops lies outside of what was measured"


def test_pairs_are_kept_as_lines_and_half_a_line_is_none(tmp_path: Path) -> None:
    known = pairs_of(3)[:4]
    path = tmp_path / PAIRS
    assert read_pairs(path) == []
    append(path, known)
    with path.open("a") as file:
        file.write('{"of": ')
    assert read_pairs(path) == known
    append(path, known[:1])
    assert read_pairs(path) == [*known, known[0]]
    path.write_text('{"of": 3}\n')
    with pytest.raises(InputError, match=r"line 1 of .* is no measured pair"):
        read_pairs(path)


def test_a_side_is_a_launch_of_one_where_a_file_does_not_say(tmp_path: Path) -> None:
    of, beside = side("a", 50, 1e7, 1e9), replace(side("b", 50, 1e7, 1e9), together=4)
    pair = Pair(of, beside, DEVICE, Interval(1.2, 1.1, 1.3), "told")
    append(tmp_path / "new.jsonl", [pair])
    assert read_pairs(tmp_path / "new.jsonl") == [pair]
    text = (tmp_path / "new.jsonl").read_text()
    assert text.count("together") == 2
    (tmp_path / "old.jsonl").write_text(re.sub(', "together": [0-9]+', "", text))
    (old,) = read_pairs(tmp_path / "old.jsonl")
    assert (old.of.together, old.beside.together) == (1, 1)
    assert old.beside.key != beside.key


def test_launches_are_not_estimated_from_pairs_of_single_models(model: SlowdownModel) -> None:
    of, beside = (model.calibration.checked[0].pair.of, model.calibration.checked[0].pair.beside)
    assert isinstance(model.estimate(of, beside), Interval)
    said = model.estimate(of, replace(beside, together=4))
    assert said == "the size of its neighbour's launches lies outside of what was measured"
    # The same models, those beside others as one and as four, which costs twice as much.
    pairs = [each.pair for each in model.calibration.checked]
    launched = [
        replace(
            pair,
            beside=replace(pair.beside, together=4),
            slowdown=Interval(*(2 * x for x in astuple(pair.slowdown))),
        )
        for pair in pairs
    ]
    taught = SlowdownModel([*pairs, *launched])
    one, four = taught.estimate(of, beside), taught.estimate(of, replace(beside, together=4))
    assert isinstance(one, Interval)
    assert isinstance(four, Interval)
    assert four.value / one.value == pytest.approx(2, rel=0.2)


def test_the_calibration_is_drawn_with_a_dot_for_each_pair(model: SlowdownModel) -> None:
    drawn = calibration_plot(model.calibration)
    assert drawn.count("<circle") == len(model.calibration.checked)
    assert "measured 1." in drawn


def test_launches_are_measured_full_each_in_a_lane_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned: list[Plan] = []

    def benched(plan: Plan, *_: object) -> Any:
        planned.append(plan)
        against = [AgainstAlone(name, Interval(1.1, 1.0, 1.2), None, None) for name in ("1", "2")]
        return SimpleNamespace(results=[SimpleNamespace(against_alone=against)])

    monkeypatch.setattr(pairs, "bench", benched)
    like = Plan(members=(Member(name="a", artifact=tmp_path),))
    tenants = [tmp_path / str(n) for n in range(6)]
    model, four = side("a", 50, 1e7, 1e9), replace(side("b", 25, 1e7, 1e9), together=4)

    def measured(one: tuple[Side, list[Path]], two: tuple[Side, list[Path]]) -> Plan:
        first, second = pairs.measure(one, two, like=like, device=DEVICE, say=lambda _: None)
        assert (first.of, first.beside) == (second.beside, second.of) == (one[0], two[0])
        return planned.pop()

    plan = measured((four, tenants), (model, [tmp_path]))
    found = {m.name: (lane_of(m), m.share, m.clients, m.artifact) for m in plan.members}
    assert found == {f"one-{n}": ("one", 25, 2, tenants[n]) for n in range(4)} | {
        "two": ("two", 50, None, tmp_path)
    }
    policy = {"kind": "space-time", "slices": "lanes", "together": 4}
    assert plan.policy.model_dump() == policy
    # A batch of one model beside launches that are larger, into which no more of it may go.
    plan = measured((four, [tmp_path]), (replace(model, together=6), tenants))
    assert [m.clients for m in plan.members] == [4, *(2,) * 6]
    assert plan.policy.parameters["together"] == 6


@pytest.mark.parametrize("answers", [1, 3, 4])
def test_a_pair_that_answers_too_little_is_measured_in_longer_rounds(
    answers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[float] = []

    def benched(plan: Plan, *_: object) -> Any:
        tried.append(plan.load.duration)
        slower = Interval(1.1, 1.0, 1.2)
        known = slower if len(tried) >= answers else None
        against = (AgainstAlone("one", slower, None, None), AgainstAlone("two", known, None, None))
        return SimpleNamespace(results=[SimpleNamespace(against_alone=against)])

    monkeypatch.setattr(pairs, "bench", benched)
    one, two = (side(name, 50, 1e7, 1e9) for name in ("a", "b"))
    like, said = Plan(members=(Member(name="a", artifact=tmp_path),)), list[str]()
    sides = [(each, [tmp_path]) for each in (one, two)]

    def measured() -> tuple[Pair, Pair]:
        return pairs.measure(*sides, like=like, device=DEVICE, say=said.append, round_secs=0.5)

    if answers <= 3:
        first, second = measured()
        assert (first.of, first.beside) == (second.beside, second.of) == (one, two)
        assert len(said) == answers - 1
    else:
        with pytest.raises(InputError, match=r"b answered too little in 8 s .*pairs: estimate"):
            measured()
    assert tried == [0.5, 2.0, 8.0][:answers]
