"""The engine's end of a runner that holds a model: what is made of the end of its process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tunerd.runner.client import ModelRunError
from tunerd.runner.host import Blame, RunnerHost
from tunerd.runner.seat_client import SeatClient
from tunerd.runner.seat_service import DONE, TOLD
from tunerd.system import wire
from tunerd.vocabulary import CapProof, Kind

WAIT_SECS = 10


class Host(RunnerHost):
    """A process that has proved its share, and notes when it is to be ended."""

    slice_id = "a-seat"

    def __init__(self) -> None:
        mine, self.theirs = socket.socketpair()
        self._mine = mine
        self.fenced: list[str] = []
        wire.send(self.theirs, {"facts": {}})

    def connect(self) -> socket.socket:
        return self._mine

    def check(self, facts: dict[str, Any]) -> CapProof:
        return CapProof("a-seat", "a device", 1, 1, "affinity", True, runner_pid=os.getpid())

    def fence(self, reason: str, *, is_alone: bool) -> Blame:
        self.fenced.append(reason)
        return Blame()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    with contextlib.closing(made.theirs):
        yield made


def test_the_end_of_a_process_is_seen_behind_what_nobody_has_read_yet(host: Host) -> None:
    client = SeatClient(host)
    client.prove()
    assert not client.is_lost
    host.theirs.sendall(TOLD.pack(DONE, 0))
    assert not client.is_lost
    host.theirs.close()
    assert client.is_lost
    assert client.answer() is None
    client.close()
    assert client.is_lost


def test_who_looks_for_the_end_of_a_process_does_not_wait_for_what_it_says(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who awaits an answer may take it as soon as it can be seen."""
    client = SeatClient(host)
    client.prove()
    host.theirs.sendall(TOLD.pack(DONE, 0))
    usual = select.select

    def late(*given: Any) -> Any:
        seen = usual(*given)
        client.answer()
        return seen

    monkeypatch.setattr(select, "select", late)
    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(lambda: client.is_lost)
        try:
            assert looked.result(WAIT_SECS) is False
        finally:
            host.theirs.close()


def test_a_process_that_has_ended_is_fenced_by_who_finds_it_and_by_nobody_after(
    host: Host,
) -> None:
    client = SeatClient(host)
    client.prove()
    host.theirs.close()
    with pytest.raises(ModelRunError) as found:
        client.answer()
    assert found.value.failure.kind is Kind.CRASH
    client.ask(0)
    with pytest.raises(ModelRunError) as after:
        client.answer()
    assert after.value.failure.kind is Kind.COLLATERAL
    assert len(host.fenced) == 1
