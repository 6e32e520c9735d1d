"""The order of what runs in a lane whose seats are processes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tunerd.colocation.places.turns import Turn, Turns
from tunerd.colocation.work import Seat

WAIT_SECS = 10
ONE, OTHER = Seat("one", "lane"), Seat("other", "lane")


def returns(wait: Callable[[], None]) -> bool:
    """Say whether a wait of a turn returns, in a thread of its own; one that does not is left."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.2)
    return not thread.is_alive()


def ran(turn: Turn) -> None:
    turn.may_ask()
    turn.asked()
    turn.may_hear()


def test_a_seat_asks_for_its_next_request_and_another_seat_waits_until_it_has_left() -> None:
    turns = Turns()
    first, second = turns.next(ONE), turns.next(ONE)
    ran(first)
    second.may_ask()
    second.asked()
    assert not returns(second.may_hear)
    other = turns.next(OTHER)
    assert not returns(other.may_ask)
    first.leave()
    second.may_hear()
    second.leave()
    other.may_ask()


def test_what_is_left_without_a_run_lets_nobody_pass_what_runs_before_it() -> None:
    turns = Turns()
    running = turns.next(OTHER)
    ran(running)
    turns.next(ONE)
    turns.leave(ONE)  # its process was lost, and that of the other was not
    again, another = turns.next(ONE), turns.next(OTHER)
    assert not returns(again.may_ask)
    turns.leave(ONE)
    assert not returns(another.may_hear)
    running.leave()
    another.may_ask()
    another.may_hear()


def test_who_waited_for_a_turn_of_a_seat_that_is_left_sees_its_own_left() -> None:
    turns = Turns()
    first, second = turns.next(ONE), turns.next(ONE)
    seen: list[bool] = []
    leave = first.leave

    def noted() -> None:
        seen.append(second.is_left)
        leave()

    first.leave = noted  # type: ignore[method-assign]
    turns.leave(ONE)
    assert seen == [True]
