"""The engine's end of a runner that holds a model: what is made of the end of its process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tunerd.runner.client import ModelRunError
from tunerd.runner.host import Blame, RunnerHost
from tunerd.runner.seat_client import SeatClient
from tunerd.system import wire
from tunerd.vocabulary import CapProof, Kind


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
