"""When the sender of a load goes on, where sleeps take longer than they should."""

from __future__ import annotations

import pytest

from tunerd.colocation.load import generator
from tunerd.colocation.load.generator import Alarm


class Clock:
    """Time that passes by sleeping alone: each sleep takes `late_secs` more than it should."""

    def __init__(self) -> None:
        self.now = self.late_secs = 0.0
        self.yields = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.yields += not secs
        self.now += max(secs + self.late_secs if secs else 0.0, 1e-5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(generator, "time", made)
    return made


def late_at(alarm: Alarm, clock: Clock, at: float) -> float:
    alarm.wait_until(at)
    assert clock.now >= at
    return clock.now - at


def test_sleeps_that_take_long_make_one_request_late(clock: Clock) -> None:
    alarm = Alarm()
    assert late_at(alarm, clock, 1.0) < 2e-5
    clock.late_secs = 9e-4
    assert late_at(alarm, clock, 2.0) == pytest.approx(7e-4)
    assert all(late_at(alarm, clock, 3.0 + n) < 2e-5 for n in range(10))


def test_a_thread_sleeps_again_where_sleeps_are_exact(clock: Clock) -> None:
    alarm, clock.late_secs = Alarm(), 1e-3
    alarm.wait_until(1.0)
    clock.late_secs, clock.yields = 0.0, 0
    for n in range(300):
        alarm.wait_until(2.0 + n)
    before, clock.yields = clock.yields, 0
    alarm.wait_until(400.0)
    assert clock.yields < before / 300
    assert clock.yields <= 21  # 0.2 ms


def test_a_moment_that_is_over_is_not_waited_for(clock: Clock) -> None:
    clock.now = 5.0
    Alarm().wait_until(4.0)
    assert (clock.now, clock.yields) == (5.0, 0)
