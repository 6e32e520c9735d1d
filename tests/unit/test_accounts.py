"""Accounts of queues: who is owed what, against the sums that say what it means."""

from __future__ import annotations

import random

import pytest

from tunerd.colocation.accounts import Accounts
from tunerd.colocation.work import Queue

QUEUES = [Queue("member", f"tenant-{number}") for number in range(40)]


class Summed:
    """The same by looking at every queue, each time."""

    def __init__(self) -> None:
        self.active = dict.fromkeys(QUEUES, 0)
        self.secs = dict.fromkeys(QUEUES, 0.0)

    def of_the_active(self) -> list[float]:
        return [self.secs[queue] for queue, count in self.active.items() if count]

    def open(self, queue: Queue) -> None:
        if not self.active[queue]:
            self.secs[queue] = max(self.secs[queue], min(self.of_the_active(), default=0.0))
        self.active[queue] += 1

    def lag_secs(self, queue: Queue) -> float:
        return max(self.of_the_active(), default=0.0) - self.secs[queue]


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_a_lag_is_that_behind_the_active_queue_that_had_most(count: int) -> None:
    draw = random.Random(count)
    found, expected = Accounts(QUEUES), Summed()
    for _ in range(3000):  # more than the heaps keep
        queue = draw.choice(QUEUES[:count])
        match draw.randrange(4):
            case 0:
                found.open(queue)
                expected.open(queue)
            case 1 if expected.active[queue]:
                found.close(queue)
                expected.active[queue] -= 1
            case 2 | 3:  # also of a request whose queue is idle meanwhile
                secs = draw.choice([0.0, 0.25, 0.5, 1.0])  # equal accounts are usual
                found.charge(queue, secs)
                expected.secs[queue] += secs
        looked = draw.choice(QUEUES[:count])
        assert found.lag_secs(looked) == expected.lag_secs(looked)
        limit_secs = draw.choice([0.0, 0.5, 4.0])
        lags = [expected.lag_secs(each) for each, active in expected.active.items() if active]
        assert max(lags, default=0.0) <= limit_secs or found.may_lag(limit_secs)


def test_nobody_may_lag_while_all_have_about_the_same() -> None:
    accounts = Accounts(QUEUES)
    for queue in QUEUES:
        accounts.open(queue)
    for _ in range(100):
        for queue in QUEUES:
            assert not accounts.may_lag(1.5)
            accounts.charge(queue, 1.0)
    accounts.charge(QUEUES[0], 1.0)
    assert accounts.may_lag(0.5)
    assert not accounts.may_lag(1.5)
