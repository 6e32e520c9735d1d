"""What was started in a lane whose seats are processes, and which of it may be asked for.

What runs in a lane runs in order. A seat's process takes a request while it runs the one before,
and goes on to it at once; another seat of the lane is asked when the one before has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Started(Protocol):
    """A start in a lane. is_ready: its inputs are where its process finds them."""

    is_ready: bool
    is_asked: bool

    @property
    def held(self) -> Hashable:
        """The seat of which it is."""


_Run = TypeVar("_Run", bound=Started)


class Line(Generic[_Run]):
    """The starts of one lane, in order. Those that were asked for are first, all of one seat."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque()

    def add(self, run: _Run) -> None:
        self._runs.append(run)

    def next(self) -> Iterator[_Run]:
        """Yield what may be asked for now; who takes one asks for it."""
        for run in self._runs:
            if run.held is not self._runs[0].held or not run.is_ready:
                return
            if not run.is_asked:
                yield run

    def leave(self, run: _Run) -> None:
        """Take one out: it has ended, or pauses."""
        if self._runs and self._runs[0] is run:  # as nearly always
            self._runs.popleft()
        else:
            self._runs.remove(run)

    def leave_seat(self, held: Hashable) -> list[_Run]:
        """Take out, and return, what is of a seat: its process is gone, or waited for no longer."""
        left = [run for run in self._runs if run.held is held]
        if left:
            self._runs = deque(run for run in self._runs if run.held is not held)
        return left
