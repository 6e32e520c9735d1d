"""Whose turn it is in lanes whose seats are processes: what runs in a lane runs in order.

Each start has a turn. A seat's process takes a request while it runs the one before, and goes on
to it at once; another seat of the lane waits until the one before has left.
"""

from __future__ import annotations

import threading

from tunerd.colocation.work import Seat


class Turn:
    """One start in its lane. The thread that runs it asks, and then hears."""

    def __init__(self, seat: Seat, previous: Turn | None) -> None:
        self.seat = seat
        self._previous = previous
        self._asked, self._left = threading.Event(), threading.Event()

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def may_ask(self) -> None:
        """Wait until its process may have the request."""
        previous = self._previous
        if previous is not None and previous.seat == self.seat:
            previous._asked.wait()
            if not previous.is_left:  # its process goes on from that one to this
                return
        self._await_those_before()

    def asked(self) -> None:
        """Let the seat's next request be asked for."""
        self._asked.set()

    def may_hear(self) -> None:
        """Wait until the next answer of its process is its own: it runs now."""
        self._await_those_before()
        self._previous = None

    def _await_those_before(self) -> None:
        """Wait for the one before, and for what that waited for where it was left without a run."""
        before = self._previous
        while before is not None:
            before._left.wait()
            before = before._previous

    def leave(self) -> None:
        """Nothing of it runs any more, or nobody waits for that; idempotent."""
        self._asked.set()
        self._left.set()


class Turns:
    """The turns of all lanes of a place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while these change
        self._last: dict[str, Turn] = {}  # by lane
        self._open: dict[Seat, list[Turn]] = {}

    def next(self, seat: Seat) -> Turn:
        """Give a seat the turn behind all that its lane has."""
        with self._lock:
            self._last[seat.lane] = turn = Turn(seat, self._last.get(seat.lane))
            turns = [each for each in self._open.get(seat, ()) if not each.is_left]
            self._open[seat] = [*turns, turn]
        return turn

    def leave(self, seat: Seat) -> None:
        """Leave all turns of a seat: its process is gone, or is waited for no longer.

        The last one first: who has waited for an earlier one sees then that its own was left.
        """
        with self._lock:
            left = self._open.pop(seat, [])
        for turn in reversed(left):
            turn.leave()

    def leave_all(self) -> None:
        for seat in list(self._open):
            self.leave(seat)
