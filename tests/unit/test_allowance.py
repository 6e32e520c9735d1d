"""The time of the finals: how much there is, and who has what of it."""

from __future__ import annotations

import math

import pytest

from tunerd.runs.finals.allowance import (
    FEW_MODEL_TURNS,
    FEW_TURNS,
    Allowance,
    Contest,
    Share,
    Shares,
)
from tunerd.telemetry.time_use import TimeUse, time_use
from tunerd.vocabulary import Phase, PhaseTime, Profile

PROFILE = Profile(
    "final", min_samples=20, max_samples=40, min_sample_secs=0.002, max_total_secs=2.0
)
WHOLE = Profile("whole", min_samples=20, max_samples=60, min_sample_secs=0.05, max_total_secs=8.0)


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def used(*phases: tuple[Phase, float]) -> TimeUse:
    """Return the time use of a run with phases that took so long, one after the other."""
    noted, at = [], 0.0
    for phase, secs in phases:
        noted.append(PhaseTime(phase, at, at + secs))
        at += secs
    found = time_use([], noted)
    assert found is not None
    return found


def contest(name: str, model_secs: float, rivals: int = 3) -> Contest:
    """Return a contest whose default takes so long in a model that calls it ten times."""
    return Contest(name, 10, (model_secs / 10, *[model_secs / 20] * rivals))


def test_the_finals_may_take_half_of_what_came_before_them() -> None:
    allowance = Allowance.after(used((Phase.START, 10.0), (Phase.SEARCH, 50.0)), now=Clock())
    assert allowance.left_secs == pytest.approx(30.0)
    assert Allowance.after(None, now=Clock()).left_secs == math.inf


def test_finals_of_earlier_sessions_have_had_their_part() -> None:
    use = used((Phase.START, 10.0), (Phase.SEARCH, 50.0), (Phase.FINALS, 8.0), (Phase.MODEL, 12.0))
    assert Allowance.after(use, now=Clock()).left_secs == pytest.approx(10.0)


def test_an_allowance_is_spent_by_the_clock_and_its_parts_with_it() -> None:
    clock = Clock()
    allowance = Allowance(30.0, now=clock)
    part = allowance.part(0.5)
    clock.now += 20.0
    assert (allowance.left_secs, part.left_secs) == (10.0, -5.0)
    assert allowance.part(0.5).left_secs == 5.0


def test_where_there_is_time_for_all_nothing_is_cut() -> None:
    shares = Shares([contest("a", 0.1), contest("b", 0.2)], Allowance(60.0), profile=PROFILE)
    assert shares.order == ("b", "a")
    assert shares.take(["b"]) == {"b": Share(3, 40)}
    assert shares.take(["a"]) == {"a": Share(3, 40)}
    assert shares.said() == ""


def test_a_lack_of_time_costs_turns_and_finalists_before_it_costs_tasks() -> None:
    contests = [contest("a", 1.0), contest("b", 0.9)]
    shares = Shares(contests, Allowance(5.0, now=Clock()), profile=PROFILE)
    (share,) = shares.take(["a"]).values()
    assert 1 <= share.finalists <= 3
    assert FEW_TURNS <= share.turns < 40
    assert shares.said() == "of 2 tasks 1 had fewer finalists or turns"


def test_less_time_never_gives_more_of_both() -> None:
    found = []
    for secs in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        shares = Shares([contest("a", 1.0)], Allowance(secs, now=Clock()), profile=PROFILE)
        found.append(shares.take(["a"])["a"])
    assert [s.finalists for s in found] == sorted(s.finalists for s in found)
    assert (found[0], found[-1]) == (Share(1, FEW_TURNS), Share(3, 40))


def test_the_tasks_that_weigh_least_are_left_out_and_the_heavy_ones_never() -> None:
    contests = [contest("light", 0.01), contest("heavy", 5.0), contest("none", 9.0, rivals=0)]
    shares = Shares(contests, Allowance(-1.0, now=Clock()), profile=PROFILE)
    assert shares.order == ("heavy", "light", "none")
    assert shares.take(["heavy"]) == {"heavy": Share(1, FEW_TURNS)}
    assert shares.take(["light"]) == shares.take(["none"]) == {}
    assert shares.said() == (
        "of 2 tasks 1 had fewer finalists or turns and 1 had the search's times alone"
    )


def test_what_is_decided_counts_among_the_heavy_ones() -> None:
    contests = [contest("light", 0.01), contest("heavier", 0.5)]
    none = Shares(contests, Allowance(-1.0, now=Clock()), profile=PROFILE, decided_secs=9.5)
    assert none.take(["heavier", "light"]) == {}
    one = Shares(contests, Allowance(-1.0, now=Clock()), profile=PROFILE, decided_secs=4.0)
    assert list(one.take(["heavier", "light"])) == ["heavier"]


def test_none_is_left_out_where_none_may_be() -> None:
    contests = [contest("light", 0.01), contest("heavy", 5.0), contest("none", 9.0, rivals=0)]
    allowance = Allowance(-1.0, leaves_out=False, now=Clock())
    shares = Shares(contests, allowance.part(0.5), profile=PROFILE)
    assert shares.take(["heavy", "light", "none"]) == {
        "heavy": Share(1, FEW_TURNS),
        "light": Share(1, FEW_TURNS),
        "none": Share(0, FEW_TURNS),
    }
    assert shares.said() == "of 2 tasks 2 had fewer finalists or turns"


def test_what_a_task_does_not_need_is_for_those_that_follow() -> None:
    clock = Clock()
    contests = [contest("a", 1.0), contest("b", 0.9)]
    allowance = Allowance(12.0, now=clock)
    shares = Shares(contests, allowance, profile=PROFILE)
    shares.take(["a"])  # takes no time at all
    assert shares.take(["b"]) == {"b": Share(3, 40)}
    slow = Shares(contests, allowance, profile=PROFILE)
    slow.take(["a"])
    clock.now += 11.0
    assert slow.take(["b"]) == {"b": Share(1, FEW_TURNS)}


def test_tasks_that_are_measured_at_once_have_their_time_at_once() -> None:
    contests = [contest("a", 1.0), contest("b", 1.0)]
    one = Shares(contests, Allowance(9.0, now=Clock()), profile=PROFILE)
    two = Shares(contests, Allowance(9.0, now=Clock()), profile=PROFILE, at_once=2)
    assert one.take(["a"])["a"] != Share(3, 40)
    assert two.take(["a", "b"]) == {"a": Share(3, 40), "b": Share(3, 40)}


def test_a_whole_model_is_timed_in_fewer_turns_but_never_in_none() -> None:
    clock = Clock()
    allowance = Allowance(60.0, now=clock)
    assert allowance.for_models(WHOLE, 2) == WHOLE
    assert allowance.remarks() == ()
    clock.now += 55.0
    brief = allowance.for_models(WHOLE, 2)
    assert (brief.name, brief.min_samples) == (WHOLE.name, FEW_MODEL_TURNS)
    assert 0 < brief.max_total_secs < 2.5
    clock.now += 55.0
    assert allowance.for_models(WHOLE, 2).max_total_secs == 0.0
    assert allowance.for_models(WHOLE, 2).min_samples == FEW_MODEL_TURNS


def test_what_was_cut_is_said_once_and_so_is_a_time_that_was_exceeded() -> None:
    clock = Clock()
    allowance = Allowance(10.0, now=clock)
    allowance.cut("")
    assert allowance.remarks() == ()
    allowance.cut("one was left out")
    allowance.cut("one was left out")
    (said,) = allowance.remarks()
    assert said == "to keep the finals to a third of the run's time one was left out"
    clock.now += 14.0
    assert allowance.remarks()[1].startswith("the finals took 4 s more than a third of the run's")
