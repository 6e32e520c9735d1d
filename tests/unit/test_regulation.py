"""Regulations: what they say, what the policy makes of one, and how good the best found is."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lib.regulation_world import SharedDevice
from tunerd.colocation.plan import Plan
from tunerd.colocation.policies import policy_of
from tunerd.colocation.regulation import find, search
from tunerd.colocation.regulation.measure import Busy
from tunerd.colocation.regulation.search import OutOfBudget
from tunerd.colocation.regulation.values import Outcome, Part, Regulation
from tunerd.errors import InputError

A0, A1, B0, B1 = Part("a", 0), Part("a", 1), Part("b", 0), Part("b", 1)


def device(seed: int, *, members: int = 2, kernels: int = 4, **said: float) -> SharedDevice:
    """Return one whose kernels want a fifth, a half or most of it, for a millisecond or so."""
    rng = np.random.default_rng(seed)
    models = {
        name: [
            (1e-4 + float(rng.exponential(1e-3)), float(rng.choice([0.2, 0.5, 0.9])))
            for _ in range(kernels)
        ]
        for name in "abc"[:members]
    }
    return SharedDevice(models, **said)  # type: ignore[arg-type]


# --- values ------------------------------------------------------------------------------------


def test_a_regulation_is_read_as_it_is_written() -> None:
    made = Regulation((("a", (2,)), ("b", ())), frozenset({(A1, B0)}))
    parameters = made.parameters()
    assert parameters == {"stops": {"a": [2], "b": []}, "apart": ["a:1 b:0"]}
    assert policy_of("regulated", parameters).cut_of("a") == (2,)
    assert Regulation.read({"a": (2,), "b": ()}, ["b:0 a:1"]) == made


@pytest.mark.parametrize(
    ("stops", "apart", "said"),
    [
        ({"a": [2], "b": []}, ["a:2 b:0"], "a:2 is no part"),
        ({"a": [2], "b": []}, ["a:0 a:1"], "never run at once"),
        ({"a": [2], "b": []}, ["a0 b0"], "write it as"),
        ({"a": [4, 2], "b": []}, [], "are to grow"),
    ],
)
def test_what_is_no_regulation_is_said(
    stops: dict[str, list[int]], apart: list[str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        policy_of("regulated", {"stops": stops, "apart": apart})


def test_a_part_that_is_split_stays_apart_from_what_it_was() -> None:
    whole = Regulation((("a", ()), ("b", (3,))), frozenset({(A0, B1)}))
    split = whole.moved("a", (2,))
    assert split.apart == {(A0, B1), (A1, B1)}
    assert split.moved("a", ()) == whole
    assert split.toggled((A0, B1)).moved("b", ()).apart == {(A1, B0)}


def test_stops_where_nobody_waits_are_left_out() -> None:
    stops = (("a", (1, 2, 3)), ("b", (5,)))
    assert Regulation(stops).simplified() == Regulation((("a", ()), ("b", ())))
    some = Regulation(stops, frozenset({(Part("a", 2), B0)}))
    assert some.simplified() == Regulation((("a", (2, 3)), ("b", (5,))), frozenset({(A1, B0)}))
    assert some.simplified().simplified() == some.simplified()


def test_within_the_bounds_comes_before_work() -> None:
    slow, fast = Outcome(1.0), Outcome(2.0, excess=0.5)
    assert slow.is_better_than(fast)
    assert not fast.is_better_than(slow)
    assert Outcome(1.0, 0.2).is_better_than(fast)
    assert not Outcome(1.005).is_better_than(slow, margin=0.01)


# --- what was measured -------------------------------------------------------------------------


def test_a_tail_over_its_bound_is_the_excess_and_requests_are_worth_what_they_take_alone() -> None:
    plan = Plan.model_validate(
        {"members": [{"name": "a", "artifact": "a", "slo_ms": 50}, {"name": "b", "artifact": "b"}]}
    )
    busy = Busy({"a": 10.0, "b": 2.0}, {"a": 0.06, "b": 0.2})
    bounds = find.bounds_of(plan, busy)
    assert bounds == pytest.approx({"a": 0.05, "b": 0.22})
    found = find.outcome(busy, {"a": 0.03, "b": 0.1}, bounds)
    assert (found.work, found.excess) == pytest.approx((0.5, 0.2))


# --- the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_parts_that_are_apart_do_not_run_at_once_and_all_have_their_turns(seed: int) -> None:
    subject = device(seed, members=3, until=0.4)
    stages = search.in_stages(subject.kernels, 2)
    rng = np.random.default_rng(seed)
    for regulation in (stages, search.one_by_one(subject.kernels)):
        pairs = [pair for pair in regulation.pairs if rng.random() < 0.7]
        subject(Regulation(regulation.stops, frozenset(pairs)))
    assert subject.met_apart == 0
    assert min(subject.answered.values()) > 10


# --- the search --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 7, 10])
def test_what_is_found_is_close_to_the_best_there_is(seed: int) -> None:
    subject = device(seed)
    best = max(subject(regulation).work for regulation in subject.every(1))
    needed, subject.measured = subject.measured, 0
    found = search.find(subject.kernels, subject, most_parts=2)
    assert found.outcome.work >= 0.94 * best  # the README says so
    assert subject.measured <= needed / 4


def test_three_models_are_better_off_than_at_once_or_one_by_one() -> None:
    subject = device(1, members=3, kernels=6, quarrel=1.0)
    found = search.find(subject.kernels, subject)
    assert found.outcome.work > 1.05 * subject(search.free(subject.kernels)).work
    assert found.outcome.work > 1.05 * subject(search.one_by_one(subject.kernels)).work
    assert found.regulation.apart


def test_a_bound_on_a_tail_is_kept_at_the_cost_of_work() -> None:
    models = {"long": [(2e-3, 0.9)] * 4, "short": [(2e-4, 0.2)]}
    free = search.find(SharedDevice(models).kernels, SharedDevice(models))
    bounded = SharedDevice(models, bounds={"short": 6e-4})
    found = search.find(bounded.kernels, bounded)
    assert found.outcome.excess == 0
    assert found.outcome.work <= free.outcome.work


def test_without_time_for_more_the_best_so_far_is_the_answer() -> None:
    subject, said = device(0), []

    def limited(regulation: Regulation) -> Outcome:
        if subject.measured >= 6:
            raise OutOfBudget
        return subject(regulation)

    found = search.find(subject.kernels, limited, said.append)
    assert found.tried <= 6
    assert "the budget is used up" in said

    def never(regulation: Regulation) -> Outcome:
        raise OutOfBudget

    with pytest.raises(OutOfBudget, match="give more"):
        search.find(subject.kernels, never)
