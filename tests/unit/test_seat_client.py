"""The engine's end of a runner that holds a model: what is made of the end of its process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tunerd.runner.host import Blame, RunnerHost
from tunerd.runner.seat_client import SeatClient
from tunerd.runner.seat_service import DONE, FAILED, PAUSED, TOLD
from tunerd.system import wire
from tunerd.vocabulary import CapProof, Failure, Kind, Stage, to_json

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


def proved(host: Host) -> SeatClient:
    """Return a client whose process has loaded a model, as `take` leaves it."""
    client = SeatClient(host)
    client.prove()
    assert client._connection is not None
    client._connection.settimeout(0.0)
    return client


def test_the_end_of_a_process_is_seen_behind_what_nobody_has_read_yet(host: Host) -> None:
    client = proved(host)
    assert not client.is_lost
    host.theirs.sendall(TOLD.pack(DONE, 0, 1.5))
    assert not client.is_lost
    host.theirs.close()
    assert client.is_lost
    assert client.hear() == (DONE, 0, 1.5)
    with pytest.raises(ConnectionError):
        client.hear()
    client.close()
    assert client.is_lost


def test_who_hears_waits_for_nothing_and_takes_one_answer_after_the_other(host: Host) -> None:
    client = proved(host)
    assert client.hear() is None
    told = TOLD.pack(PAUSED, 3, 0.5) + TOLD.pack(DONE, 0, 1.0)
    host.theirs.sendall(told[:4])
    assert client.hear() is None
    host.theirs.sendall(told[4:])
    assert client.hear() == (PAUSED, 3, 0.5)
    assert client.hear() == (DONE, 0, 1.0)
    assert client.hear() is None
    client.close()


def test_what_was_told_to_have_failed_is_said_with_its_message(host: Host) -> None:
    client = proved(host)
    host.theirs.sendall(TOLD.pack(FAILED, 0, 1.0))
    failed = Failure(Stage.RUN, Kind.WRONG_ANSWER, "it has no rows")
    wire.send(host.theirs, {"failure": to_json(failed)})
    heard = client.hear()
    assert heard is not None
    assert heard.what == FAILED
    assert client.failure(None).failure == failed
    assert host.fenced == []  # the process is of use, to whoever loads it again
    client.close()


def test_a_process_that_has_ended_is_fenced_by_who_finds_it_and_by_nobody_after(
    host: Host,
) -> None:
    client = proved(host)
    host.theirs.close()
    client.ask(0)
    with pytest.raises(ConnectionError) as found:
        client.hear()
    assert client.failure(found.value).failure.kind is Kind.CRASH
    client.ask(0)
    with pytest.raises(ConnectionError) as after:
        client.hear()
    assert client.failure(after.value).failure.kind is Kind.COLLATERAL
    assert len(host.fenced) == 1
