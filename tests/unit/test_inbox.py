"""What any thread has for one thread, which sleeps while there is nothing."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tests.lib.waiting import until
from tunerd.colocation.inbox import Inbox
from tunerd.colocation.places.bell import Bell

WAIT_SECS = 10


@pytest.mark.parametrize("has_bell", [False, True])
def test_who_sleeps_is_woken_by_what_comes_and_finds_all_of_it_in_order(has_bell: bool) -> None:
    with contextlib.closing(Bell()) as bell:
        inbox: Inbox[int] = Inbox(bell if has_bell else None)
        found: list[int] = []

        def sleep() -> None:
            found.extend(inbox.wait(WAIT_SECS))
            while inbox.size():
                found.append(inbox.take())

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        until(lambda: inbox.is_awaited)
        inbox.put(0)
        sleeper.join(WAIT_SECS)
        assert not sleeper.is_alive()
        inbox.put(1)
        inbox.put(2)
        sleep()  # at once: nobody has rung
        assert found == [0, 1, 2]
        assert inbox.wait(0.0) == ()
        assert not inbox.is_awaited
