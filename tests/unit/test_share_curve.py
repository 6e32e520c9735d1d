"""Curves over shares: intervals, the knee, the share for a latency. No slices and no files."""

from __future__ import annotations

import math
import random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.shares.share_plot import Panel, knee_text, shares_svg
from tunerd.studies.profile.curve import (
    Curve,
    Visit,
    curves,
    estimate,
    knee,
    meets,
    share_for,
    whole_rounds,
)
from tunerd.vocabulary.verdict import Answer, Verdict

ROUNDS = 5


def visit(number: int, pct: int, secs: float, *, batch: int = 1, count: int = 20) -> Visit:
    return Visit(number, pct, pct, batch, (secs,) * count, secs * count)


def exact(latencies: dict[int, float], *, rounds: int = ROUNDS) -> Curve:
    """Return a curve of shares that obtain an SM a percent, without noise."""
    visits = [
        visit(number, pct, secs)
        for number in range(1, rounds + 1)
        for pct, secs in latencies.items()
    ]
    (curve,) = curves(visits)
    return curve


def noisy(latencies: dict[int, float], noise: float, seed: int) -> list[Visit]:
    rng = random.Random(seed)
    return [
        visit(number, pct, secs * math.exp(rng.gauss(0, noise)))
        for number in range(1, ROUNDS + 1)
        for pct, secs in latencies.items()
    ]


def pcts(answer: Answer) -> tuple[int | None, int | None]:
    safe, least = answer.safe, answer.least
    return (safe.pct if safe else None, least.pct if least else None)


FALLING = {10: 10e-3, 25: 4e-3, 40: 2.15e-3, 50: 2.05e-3, 100: 2e-3}
latencies = st.dictionaries(
    st.integers(1, 99), st.floats(1e-4, 1e-1), min_size=1, max_size=8
).flatmap(lambda some: st.floats(1e-4, 1e-1).map(lambda full: {**some, 100: full}))
falling = latencies.map(
    lambda some: dict(zip(sorted(some), sorted(some.values(), reverse=True), strict=True))
)
losses = st.floats(0.01, 3.0)


def test_rounds_are_whole_up_to_the_first_that_lacks_a_visit() -> None:
    visits = [visit(r, pct, 1e-3, batch=b) for r in (1, 2, 3) for pct in (10, 100) for b in (1, 8)]
    assert whole_rounds(visits) == 3
    assert whole_rounds(visits[:-1]) == 2
    assert whole_rounds(v for v in visits if (v.round, v.pct) != (2, 10)) == 1
    assert whole_rounds([*visits, visit(1, 50, 1e-3)]) == 1
    assert whole_rounds([]) == 0


# --- the picture -------------------------------------------------------------------------------


def panel(latencies: dict[int, float], loss: float = 0.1) -> Panel:
    curve = exact(latencies)
    return Panel("<net>", (curve,), (knee(curve, loss),))


def test_a_picture_rings_a_knee_that_is_known_and_shades_where_another_may_be() -> None:
    known = shares_svg("<b>", [panel(FALLING)])
    assert known.count('class="knee') == 1
    assert 'class="curve maybe' not in known
    assert "knee 40%" in known
    assert "&lt;net&gt;" in known
    (curve,) = curves(noisy(FALLING, 0.08, 1))
    unknown = shares_svg("", [Panel("net", (curve,), (knee(curve, 0.1),))])
    assert unknown.count('class="knee') == 0
    assert unknown.count('class="curve maybe') == 1
    ElementTree.fromstring(known)


def test_a_knee_is_said_in_short() -> None:
    assert knee_text(knee(exact(FALLING), 0.1)) == "40%"
    assert knee_text(knee(exact({10: 1e-3, 100: 1e-3}), 0.1)) == "10% or less"


def test_nothing_is_no_picture() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        shares_svg("", [])


# --- the knee ----------------------------------------------------------------------------------


def test_the_knee_is_the_smallest_share_within_the_loss() -> None:
    found = knee(exact(FALLING), 0.1)
    assert (found.found, pcts(found)) == ("found", (40, 40))
    assert pcts(knee(exact(FALLING), 0.05)) == (50, 50)
    assert pcts(knee(exact(FALLING), 1.5)) == (25, 25)


def test_a_curve_that_is_flat_has_its_knee_at_the_smallest_share_or_below() -> None:
    found = knee(exact({10: 1e-3, 50: 1e-3, 100: 1e-3}), 0.1)
    assert (found.found, pcts(found)) == ("at most", (10, 10))


def test_a_curve_that_falls_to_its_end_has_its_knee_at_the_whole_device() -> None:
    found = knee(exact({25: 4e-3, 50: 2e-3, 100: 1e-3}), 0.1)
    assert (found.found, pcts(found)) == ("found", (100, 100))


def test_a_share_below_one_that_is_too_slow_is_no_knee() -> None:
    found = knee(exact({10: 1e-3, 25: 2e-3, 50: 1e-3, 100: 1e-3}), 0.1)
    assert (found.found, pcts(found)) == ("found", (50, 50))


def test_noise_of_the_size_of_the_loss_leaves_the_knee_open() -> None:
    (curve,) = curves(noisy({40: 2.18e-3, 100: 2e-3}, 0.05, 1))
    found = knee(curve, 0.1)
    assert found.found == "cannot tell"
    assert pcts(found) == (100, 40)


def test_one_round_tells_nothing() -> None:
    found = knee(exact(FALLING, rounds=1), 0.1)
    assert (found.found, pcts(found)) == ("cannot tell", (100, 10))


def test_a_drift_that_slows_whole_rounds_hides_no_knee() -> None:
    visits = [
        visit(number, pct, secs * (1 + 0.3 * number))
        for number in range(1, ROUNDS + 1)
        for pct, secs in FALLING.items()
    ]
    (curve,) = curves(visits)
    assert pcts(knee(curve, 0.1)) == (40, 40)
    assert curve.full.latency.high / curve.full.latency.low > 1.5  # it does show in latencies


@given(falling, losses)
def test_without_noise_the_knee_is_what_the_definition_says(
    some: dict[int, float], loss: float
) -> None:
    found = knee(exact(some), loss)
    limit = (1 + loss) * (1 + 1e-9)
    near = [p for p, secs in some.items() if abs(secs / some[100] / (1 + loss) - 1) < 1e-9]
    if not near:  # where rounding decides either is right
        assert pcts(found)[0] == min(p for p, secs in some.items() if secs / some[100] <= limit)
        assert found.found != "cannot tell"


@given(latencies, losses, losses)
def test_who_may_lose_more_needs_no_larger_share(
    some: dict[int, float], one: float, other: float
) -> None:
    curve = exact(some)
    less, more = knee(curve, min(one, other)), knee(curve, max(one, other))
    assert less.safe is not None
    assert more.safe is not None
    assert more.safe.sm_count <= less.safe.sm_count


@settings(max_examples=40)
@given(falling, losses, st.floats(0.001, 0.3), st.integers(0, 1000), st.floats(0.01, 100.0))
def test_the_knee_depends_on_ratios_alone_and_on_no_order(
    some: dict[int, float], loss: float, noise: float, seed: int, faster: float
) -> None:
    visits = noisy(some, noise, seed)
    shuffled = [visit(v.round, v.pct, v.run_secs[0] * faster) for v in visits]
    random.Random(seed).shuffle(shuffled)
    (curve,), (other,) = curves(visits), curves(shuffled)
    for point, again in zip(curve.points, other.points, strict=True):
        assert again.slowdown.value == pytest.approx(point.slowdown.value)
    one, two = knee(curve, loss), knee(other, loss)
    limit = 1 + loss
    edges = [e for p in curve.points for e in (p.slowdown.low, p.slowdown.high)]
    if all(abs(e / limit - 1) > 1e-9 for e in edges):
        assert (one.found, pcts(one)) == (two.found, pcts(two))


@settings(max_examples=40)
@given(falling, losses, st.floats(0.0, 0.5), st.integers(0, 1000))
def test_what_is_sure_is_never_below_what_may_be(
    some: dict[int, float], loss: float, noise: float, seed: int
) -> None:
    (curve,) = curves(noisy(some, noise, seed))
    found = knee(curve, loss)
    assert found.safe is not None
    assert found.least is not None
    assert found.least.sm_count <= found.safe.sm_count
    is_open = found.least.sm_count < found.safe.sm_count
    assert is_open == (found.found == "cannot tell")
    assert all(p.latency.low <= p.latency.value <= p.latency.high for p in curve.points)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    held = 0
    for _ in range(400):
        found = estimate([math.exp(rng.gauss(0, 0.1)) for _ in range(ROUNDS)])
        held += found.low <= 1.0 <= found.high
    assert 0.91 <= held / 400 <= 0.98


# --- the share for a latency -------------------------------------------------------------------


def test_the_smallest_share_that_meets_a_latency() -> None:
    curve = exact(FALLING)
    assert pcts(share_for(curve, 5e-3)) == (25, 25)
    assert pcts(share_for(curve, 2.1e-3)) == (50, 50)
    assert share_for(curve, 20e-3).found == "at most"


def test_a_latency_that_no_share_meets() -> None:
    found = share_for(exact(FALLING), 1e-3)
    assert (found.found, pcts(found)) == ("none", (None, None))


def test_a_latency_is_met_by_95_of_100_inferences_and_not_by_the_median() -> None:
    slow_tail = (1e-3,) * 9 + (9e-3,)
    visits = [Visit(number, 100, 100, 1, slow_tail, 0.02) for number in (1, 2, 3)]
    (curve,) = curves(visits)
    assert meets(curve.full, 5e-3) is Verdict.NO
    assert meets(curve.full, 9.5e-3) is Verdict.YES


@given(falling, st.floats(1e-4, 1e-1), st.floats(1e-4, 1e-1))
def test_a_longer_latency_needs_no_larger_share(
    some: dict[int, float], one: float, other: float
) -> None:
    curve = exact(some)
    short, long = share_for(curve, min(one, other)), share_for(curve, max(one, other))
    if short.safe is not None:
        assert long.safe is not None
        assert long.safe.sm_count <= short.safe.sm_count


# --- curves ------------------------------------------------------------------------------------


def test_shares_that_obtain_the_same_sms_are_one_point() -> None:
    visits = [
        Visit(number, pct, count, 1, (1e-3,), 1e-3)
        for number in (1, 2)
        for pct, count in ((50, 1), (100, 2))
    ]
    (curve,) = curves(visits, [(50, 1), (60, 1), (100, 2)])
    assert [p.pcts for p in curve.points] == [(50, 60), (100,)]


def test_throughput_counts_inputs_while_the_slice_worked() -> None:
    visits = [Visit(number, 100, 100, 8, (1e-3,) * 10, 0.02) for number in (1, 2)]
    (curve,) = curves(visits)
    assert curve.full.per_sec == pytest.approx(8 * 20 / 0.04)
    assert (curve.full.rounds, curve.full.samples) == (2, 20)


def test_each_batch_has_its_curve() -> None:
    visits = [visit(n, 100, 1e-3 * batch, batch=batch) for n in (1, 2) for batch in (8, 1)]
    assert [curve.batch for curve in curves(visits)] == [1, 8]


@pytest.mark.parametrize("secs", [(), (0.0,), (math.nan,), (math.inf,), (-1.0,)])
def test_times_that_are_none_are_refused(secs: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="no times"):
        Visit(1, 50, 50, 1, secs, 1.0)
