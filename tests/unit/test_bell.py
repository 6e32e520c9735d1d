"""What a thread waits for that has connections to hear."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tunerd.colocation.places.bell import Bell

WAIT_SECS = 10


@pytest.fixture
def bell() -> Iterator[Bell]:
    with contextlib.closing(Bell()) as made:
        yield made


def test_who_waits_is_woken_by_a_ring_and_hears_nothing(bell: Bell) -> None:
    ringer = threading.Timer(0.05, bell.ring)
    ringer.start()
    bell.wait(WAIT_SECS)
    ringer.join()
    bell.hear()
    bell.wait(0.0)
    bell.hear()  # the ring was heard


def test_a_ring_before_the_wait_ends_it_at_once(bell: Bell) -> None:
    bell.ring()
    bell.ring()
    bell.wait(None)
    bell.hear()


def test_what_is_watched_is_called_as_often_as_there_is_something_to_take(bell: Bell) -> None:
    mine, theirs = socket.socketpair()
    taken: list[bytes] = []
    with mine, theirs:
        bell.watch(mine.fileno(), lambda: taken.append(mine.recv(1)))
        theirs.sendall(b"ab")
        for _ in range(3):
            bell.hear()
        assert taken == [b"a", b"b"]
        theirs.close()
        bell.wait(WAIT_SECS)
        bell.hear()
        assert taken == [b"a", b"b", b""]
        bell.unwatch(mine.fileno())
        bell.unwatch(mine.fileno())
        bell.hear()
        assert len(taken) == 3


def test_what_is_unwatched_after_the_wait_is_not_called(bell: Bell) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        bell.watch(mine.fileno(), lambda: pytest.fail("it was called"))
        theirs.sendall(b"a")
        bell.wait(WAIT_SECS)
        bell.unwatch(mine.fileno())
        bell.hear()


def test_to_close_gives_up_the_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    bell = Bell()
    bell.close()
    bell.close()
    Bell()  # nobody closes it
    assert len(os.listdir("/proc/self/fd")) == before
