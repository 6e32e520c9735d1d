"""What was launched on a device and has not ended, and when it is worth a look.

The thread that starts segments looks itself, between two turns: another thread would have to wake
it at each end, and two threads that call a driver in turns wait for the interpreter more than they
work. To look is to ask, without waiting: who waited for one end would not see the others, nor what
arrives. The next look is due after half of the time that is left to the next end that is expected,
and after a sixteenth of what takes so long at least: an end is seen about that much late at most,
and a launch costs few looks. What is due sooner than a sleeping thread may wake, above all in a
virtual machine, is looked at again at once: the thread takes a core for that long. What is late
is looked at the more seldom the later it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

_PART = 1 / 16  # of what a launch takes
_AWAKE_SECS = 100e-6  # a sleep of so little may take more
_MOST_SECS = 200e-6  # between two looks
_PR_SET_TIMERSLACK, _SLACK_NANOSECS = 29, 1000  # prctl(2)


def sleep_exactly() -> None:
    """Have the calling thread's sleeps end when they should: Linux lets them be 50 us longer."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECS, 0, 0, 0)


class Launched(Protocol):
    """Work that was given to a device."""

    def is_done(self) -> bool:
        """Say without waiting whether it has ended; raises what went wrong."""
        ...


class Entry(NamedTuple):
    """A launch, and what is called with what `is_done` raised or None.

    secs: what it is expected to take from its turn on.
    """

    work: Launched
    secs: float
    ended: Callable[[Exception | None], None]


class Line:
    """Launches that end in order. One that is left is waited for, and its ends are told nobody."""

    def __init__(self, *, is_first: bool = False) -> None:
        self.is_first = is_first
        self.entries: deque[Entry] = deque()
        self.began_at = 0.0  # the first of them
        self.is_left = False


class Completions:
    """The lines of a place. All is called by one thread, but for `line`."""

    def __init__(self) -> None:
        self._lines: tuple[Line, ...] = ()
        self._firsts: tuple[Line, ...] = ()
        self._begin = 0  # the line with which a look begins
        self._is_more = False  # was added to a first line since a look began

    def line(self, *, is_first: bool = False) -> Line:
        """Return a new line; those that were left and have ended are forgotten.

        is_first: looked at before the others, because its ends have work added to them.
        """
        made = Line(is_first=is_first)
        self._lines, self._firsts = _kept(self._lines), _kept(self._firsts)
        if is_first:
            self._firsts = (*self._firsts, made)
        else:
            self._lines = (*self._lines, made)
        return made

    def add(self, line: Line, entry: Entry) -> None:
        """Watch a launch, behind the others of its line."""
        if not line.entries:
            line.began_at = time.monotonic()
        line.entries.append(entry)
        self._is_more |= line.is_first

    def look(self) -> float | None:
        """Tell what has ended; return after how long to look again, None where nothing runs.

        The lines come first in turns: who is seen first is answered first, and started again.
        """
        now, least = time.monotonic(), math.inf
        self._is_more, lines = False, self._lines
        self._begin = begin = (self._begin + 1) % max(len(lines), 1)
        lines = (*self._firsts, *lines[begin:], *lines[:begin])
        for line in lines:
            entries = line.entries
            while entries:
                work, secs, ended = entries[0]
                left_secs = line.began_at + secs - now
                if left_secs > secs / 2 or not self._has_ended(work, ended, line, now):
                    late_secs = -left_secs * _PART
                    least = min(least, max(left_secs / 2, secs * _PART, late_secs))
                    break
        if self._is_more:
            return 0.0
        if math.isinf(least):
            return 0.0 if any(line.entries for line in lines) else None  # since it was looked at
        return 0.0 if least < _AWAKE_SECS else min(least, _MOST_SECS)

    def _has_ended(
        self,
        work: Launched,
        ended: Callable[[Exception | None], None],
        line: Line,
        now: float,
    ) -> bool:
        found: Exception | None = None
        try:
            if not work.is_done():
                return False
        except Exception as error:
            found = error
        line.entries.popleft()
        line.began_at = now
        if not line.is_left:
            ended(found)
        return True


def _kept(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.entries or not line.is_left)
