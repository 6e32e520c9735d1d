"""What a gate may say: how often it is wrong, and what it finds, on samples like a machine's."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.gate_runs import DEFAULT_SECS, TASK_SECS, TUNED_SECS, noisy
from tunerd.stats.blocks import median_interval
from tunerd.stats.gate import Timing, judge, judge_rounds
from tunerd.vocabulary.verdict import Verdict

BETTER, SAME, WORSE, CANNOT_TELL = (
    Verdict.FASTER,
    Verdict.SAME,
    Verdict.SLOWER,
    Verdict.CANNOT_TELL,
)
TIMES = 200  # comparisons of a simulation


def night(
    rng: np.random.Generator,
    *,
    slower: float = 1.0,
    machine_spread: float = 0.0,
    tuned_hit: float = 1.0,
    controls: int = 60,
    **noise: float,
) -> Timing:
    """Return a session's samples; the machine's own speed differs between nights."""
    drift = np.exp(rng.normal(0.0, machine_spread)) if machine_spread else 1.0
    return Timing(
        noisy(TUNED_SECS * slower * drift**tuned_hit, 60, rng, **noise),
        noisy(DEFAULT_SECS * drift, controls, rng, **noise) if controls else (),
    )


def shares(
    base: Callable[[np.random.Generator], Timing],
    new: Callable[[np.random.Generator], Timing],
    *,
    fail_above: float = 0.05,
) -> dict[Verdict, float]:
    """Return how often each verdict comes; the seeds are fixed, so it is always as often."""
    found: Counter[Verdict] = Counter()
    for seed in range(TIMES):
        rng = np.random.default_rng(seed)
        found[judge(base(rng), new(rng), fail_above=fail_above).verdict] += 1
    return {verdict: found[verdict] / TIMES for verdict in Verdict}


# --- how often it is wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("machine_spread", [0.0, 0.03])
@pytest.mark.parametrize("controls", [8, 60])
def test_equal_models_are_never_called_worse_with_the_default_margin(
    machine_spread: float, controls: int
) -> None:
    def same(rng: np.random.Generator) -> Timing:
        return night(rng, machine_spread=machine_spread, controls=controls)

    assert shares(same, same)[WORSE] <= 0.005


def test_equal_models_are_seldom_called_worse_without_any_margin() -> None:
    def same(rng: np.random.Generator) -> Timing:
        return night(rng, controls=0)

    assert shares(same, same, fail_above=0.0)[WORSE] <= 0.06


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_a_slowdown_of_just_the_margin_is_seldom_called_anything(memory: float) -> None:
    found = shares(
        lambda rng: night(rng, memory=memory),
        lambda rng: night(rng, memory=memory, slower=1.05),
    )
    assert found[WORSE] <= 0.025
    assert found[SAME] + found[BETTER] <= 0.025


@pytest.mark.parametrize("tuned_hit", [0.0, 1.0, 2.0])
def test_the_control_keeps_a_machine_that_changed_from_being_called_a_regression(
    tuned_hit: float,
) -> None:
    """However hard the machine hit the tuned model: not at all, as the control, or twice."""

    def same(rng: np.random.Generator, controls: int = 60) -> Timing:
        return night(rng, machine_spread=0.08, tuned_hit=tuned_hit, controls=controls)

    assert shares(same, same)[WORSE] <= 0.025
    if tuned_hit:
        assert shares(lambda r: same(r, 0), lambda r: same(r, 0))[WORSE] >= 0.15


def test_no_task_of_a_model_is_called_worse_by_chance() -> None:
    """40 tasks in a model: of 25 models with equal tasks, at most one has a task that is worse."""
    tasks, models = 40, 25
    rng = np.random.default_rng(0)

    def timing() -> Timing:
        return Timing(noisy(TASK_SECS, 40, rng), noisy(3 * TASK_SECS, 8, rng))

    def verdicts() -> set[Verdict]:
        confidence = 1 - 0.05 / tasks
        return {
            judge(timing(), timing(), fail_above=0.0, confidence=confidence).verdict
            for _ in range(tasks)
        }

    assert sum(WORSE in verdicts() for _ in range(models)) <= 1


# --- what it finds -----------------------------------------------------------------------------


@pytest.mark.parametrize("controls", [8, 60])
def test_a_tenth_slower_is_found_with_the_default_number_of_samples(controls: int) -> None:
    found = shares(
        lambda rng: night(rng, machine_spread=0.01, controls=controls),
        lambda rng: night(rng, machine_spread=0.01, controls=controls, slower=1.10),
    )
    assert found[SAME] + found[BETTER] == 0.0
    assert found[WORSE] >= (0.95 if controls == 60 else 0.7)


def test_a_tenth_slower_is_nearly_always_found_on_a_quiet_machine() -> None:
    found = shares(
        lambda rng: night(rng, controls=8, spread=0.01),
        lambda rng: night(rng, controls=8, spread=0.01, slower=1.10),
    )
    assert found[WORSE] >= 0.95


def test_equal_models_pass_and_a_tenth_faster_is_better() -> None:
    assert shares(night, night)[SAME] >= 0.95
    found = shares(night, lambda rng: night(rng, slower=0.90))
    assert found[BETTER] >= 0.99


def test_thrice_as_slow_is_worse_even_where_the_machine_changed() -> None:
    rng = np.random.default_rng(0)
    base = night(rng)
    new = Timing(noisy(3 * 1.4 * TUNED_SECS, 60, rng), noisy(1.4 * DEFAULT_SECS, 60, rng))
    judged = judge(base, new, fail_above=0.05)
    assert judged.verdict is WORSE
    assert [v.name for v in judged.views] == ["as measured", "corrected", "corrected twice"]


def test_a_machine_that_changed_is_told_to_be_measured_now() -> None:
    rng = np.random.default_rng(0)
    base = night(rng)
    new = Timing(noisy(1.2 * TUNED_SECS, 60, rng), noisy(1.2 * DEFAULT_SECS, 60, rng))
    judged = judge(base, new, fail_above=0.05)
    assert judged.verdict is CANNOT_TELL
    assert judged.control is not None
    assert judged.control.low > 1.15
    assert "the default schedules changed by +" in judged.why
    assert "--measure" in judged.why


# --- measured now, in turns --------------------------------------------------------------------


def turns(
    rng: np.random.Generator, slower: float, process_spread: float = 0.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return samples in turns: noise hits both alike, a process's memory each for itself."""
    shared = np.array(noisy(1.0, 60, rng, spread=0.1, memory=0.8))
    own = np.exp(rng.normal(0.0, process_spread, 2)) if process_spread else (1.0, 1.0)
    base, new = (
        tuple(float(s) for s in secs * factor * shared * np.exp(rng.normal(0, 0.01, 60)))
        for secs, factor in ((TUNED_SECS, own[0]), (TUNED_SECS * slower, own[1]))
    )
    return base, new


def test_turns_see_through_noise_that_hits_both() -> None:
    rng = np.random.default_rng(0)
    same = judge_rounds([turns(rng, 1.0) for _ in range(3)], fail_above=0.05)
    slower = judge_rounds([turns(rng, 1.10) for _ in range(3)], fail_above=0.05)
    assert (same.verdict, slower.verdict) == (SAME, WORSE)
    assert [v.name for v in slower.views] == ["process 1", "process 2", "process 3"]
    assert slower.change.low <= 1.10 <= slower.change.high
    assert slower.new_secs > slower.base_secs


def test_what_is_said_holds_in_every_process() -> None:
    rng = np.random.default_rng(1)
    rounds = [turns(rng, 1.10), turns(rng, 1.10), turns(rng, 1.0)]
    assert judge_rounds(rounds, fail_above=0.05).verdict is CANNOT_TELL


def test_equal_models_in_processes_of_their_own_luck_are_not_called_worse() -> None:
    verdicts = Counter(
        judge_rounds([turns(rng, 1.0, 0.03) for _ in range(3)], fail_above=0.05).verdict
        for rng in map(np.random.default_rng, range(100))
    )
    assert verdicts[WORSE] <= 1


# --- any samples -------------------------------------------------------------------------------

secs = st.floats(1e-6, 1e-1)
timings = st.builds(
    lambda run, control: Timing(tuple(run), tuple(control)),
    st.lists(secs, min_size=1, max_size=12),
    st.lists(secs, max_size=12),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(base=timings, new=timings, scale=st.floats(0.01, 100.0))
def test_the_unit_of_time_does_not_matter(base: Timing, new: Timing, scale: float) -> None:
    def scaled(timing: Timing) -> Timing:
        return Timing(
            tuple(s * scale for s in timing.run_secs),
            tuple(s * scale for s in timing.control_secs),
        )

    one = judge(base, new, fail_above=0.05)
    other = judge(scaled(base), scaled(new), fail_above=0.05)
    assert dataclasses.astuple(other.change) == pytest.approx(dataclasses.astuple(one.change))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(base=timings, new=timings)
def test_the_interval_of_a_change_holds_the_change_and_all_views(base: Timing, new: Timing) -> None:
    judged = judge(base, new, fail_above=0.05)
    assert judged.change.low <= judged.change.value <= judged.change.high
    for view in judged.views:
        assert judged.change.low <= view.change.low <= view.change.high <= judged.change.high


@settings(max_examples=40, deadline=None, derandomize=True)
@given(base=timings, new=timings, more=st.floats(0.0, 3.0))
def test_who_allows_more_is_not_told_worse_for_it(base: Timing, new: Timing, more: float) -> None:
    if judge(base, new, fail_above=0.05).verdict in (BETTER, SAME):
        assert judge(base, new, fail_above=0.05 + more).verdict is not WORSE


@pytest.mark.parametrize("count", [1, 4])
def test_fewer_than_five_samples_tell_nothing(count: int) -> None:
    judged = judge(Timing((1.0,) * 20), Timing((9.0,) * count), fail_above=0.05)
    assert judged.verdict is CANNOT_TELL
    assert f"there are {count} samples" in judged.why


def test_a_side_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        judge(Timing(()), Timing((1.0,) * 9), fail_above=0.05)


def test_the_interval_of_a_median_is_wider_where_samples_resemble_their_neighbours() -> None:
    rng = np.random.default_rng(0)

    def width(memory: float) -> float:
        found = [median_interval(noisy(1.0, 60, rng, memory=memory)) for _ in range(40)]
        return float(np.mean([high - low for low, high in ((i.low, i.high) for i in found)]))

    assert width(0.8) > 1.3 * width(0.0)
