"""Calls that have not come back: how long they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tunerd.cluster import ray_calls
from tunerd.cluster.ray_calls import Calls
from tunerd.system import clock


class SilentRay:
    """No call ever ends."""

    exceptions = SimpleNamespace(RayError=OSError)

    def wait(self, asked: Sequence[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [], list(asked)

    def cluster_resources(self) -> dict[str, float]:
        return {}

    available_resources = cluster_resources


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set; whoever sleeps has it pass."""
    time = [1000.0]

    def sleep(secs: float) -> None:
        time[0] += secs

    monkeypatch.setattr(clock, "now", lambda: time[0])
    monkeypatch.setattr(ray_calls.time, "sleep", sleep)
    return time


@pytest.fixture
def calls(now: list[float]) -> Calls:
    return Calls(SilentRay(), (), {"warm_up": 50.0})


def test_work_that_takes_longer_than_it_may_is_lost(calls: Calls, now: list[float]) -> None:
    calls.watch("tuner-0", "build", "a call", limit_secs=90.0)
    now[0] += 90.0
    assert calls.ended(0.5) == []
    now[0] += 1.0
    (answer,) = calls.ended(0.5)
    assert (answer.worker_id, answer.method) == ("tuner-0", "build")
    assert answer.error == "it has not ended build after 91 s"
    assert calls.of("build") == []


def test_who_is_not_ready_in_time_is_told_what_is_free(calls: Calls, now: list[float]) -> None:
    calls.watch("tuner-0", "warm_up", "a call")
    now[0] += 51.0
    (answer,) = calls.ended(0.5)
    assert "tuner-0: not ready after 51 s; free in the cluster" in answer.error


def test_what_is_hurried_is_lost_sooner_and_nothing_else(calls: Calls, now: list[float]) -> None:
    calls.watch("tuner-0", "build", "one", limit_secs=5.0)
    calls.watch("tuner-1", "propose", "two", limit_secs=600.0)
    calls.watch("cpu-0-0", "measure", "three", limit_secs=600.0)
    calls.hurry(("propose", "build"), 15.0)
    now[0] += 6.0
    assert [a.worker_id for a in calls.ended(0.5)] == ["tuner-0"]
    now[0] += 10.0
    assert [a.worker_id for a in calls.ended(0.5)] == ["tuner-1"]
    assert calls.of("measure") == ["cpu-0-0"]


def test_who_waits_for_nobody_waits_as_long_as_it_said(calls: Calls, now: list[float]) -> None:
    assert calls.ended(0.5) == []
    assert now == [1000.5]
