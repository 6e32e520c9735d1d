"""Launches of a lane whose inputs are brought in parts, and those that wait behind them.

Or what has its outputs fetched in parts: nothing follows these, and who waits behind is fetched
next (places/fetching.py).

A GPU copies in the order of queueing, so a few parts are queued at a time (artifacts/parts.py): the
first ones when a launch has its turn, each next one when an earlier one is seen to have ended, and
the graph with the last one. What else is started on the lane meanwhile waits for that, so launches
stay in order; where none is brought, none comes here. Lanes that bring at once share the GPU's
bandwidth, and each has so many parts in flight: a copy of another lane waits for all of these.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from tunerd.artifacts.parts import IN_FLIGHT
from tunerd.colocation.places.completions import Completions, Entry, Line
from tunerd.colocation.places.staged import Part

_PART_SECS = 40e-6  # what one takes at 53 GB/s, as on an H200


class Waiting(Protocol):
    """A launch that is queued in its turn."""

    def begin(self) -> Sequence[Part]:
        """Return what is to be brought before; called when it has its turn."""
        ...

    def launch(self) -> None:
        """Queue what follows what is brought."""
        ...

    def give_up(self) -> None:
        """Have it never launched."""
        ...

    def failed(self, error: Exception) -> None:
        """Tell that it could not be brought or launched."""
        ...


_W = TypeVar("_W", bound=Waiting)


class Bringing(Generic[_W]):
    """Queues the parts of one lane and direction, and the launches.

    A part in flight keeps its launch, and so the memory that it reads and writes, also when the
    launch has failed or the lane was left.

    waiting: those that were not launched, the first of which is being brought.
    is_left: nothing is queued any more.
    """

    def __init__(self, completions: Completions, stream: int) -> None:
        """Take the stream for the parts, on which nothing waits."""
        self.waiting: deque[_W] = deque()
        self.is_left = False
        self._completions, self._stream = completions, stream
        self._parts: deque[Part] | None = None  # of the first, which are not queued
        self._alone: Part | None = None  # the last part that was queued, if it goes alone
        self._line: Line | None = None

    def add(self, launch: _W) -> None:
        """Launch it behind the others, at once where there is nothing to be waited for."""
        self.waiting.append(launch)
        if len(self.waiting) == 1:
            self._go_on()

    def leave(self) -> list[_W]:
        """Queue nothing more; return what waited. Nobody is told of them."""
        left = [*self.waiting]
        self.is_left = True
        self.waiting.clear()
        if self._line is not None:
            self._line.is_left = True
        for launch in left:
            launch.give_up()
        return left

    def _go_on(self) -> None:
        """Queue what can be queued now."""
        while self.waiting:
            first = self.waiting[0]
            try:
                if not self._is_launched(first):
                    return
            except Exception as error:
                self._fail(error)
            else:
                self._take_first()

    def _is_launched(self, first: _W) -> bool:
        """Queue parts, and the launch with the last of them; say whether that was possible."""
        if self._parts is None:
            self._parts = deque(first.begin())
        while self._parts:
            if self._line is None:
                self._line = self._completions.line(is_first=True)
            under_way = self._line.entries
            if len(under_way) >= IN_FLIGHT or (under_way and under_way[-1].work is self._alone):
                return False
            part = self._parts.popleft()
            self._alone = part if part.goes_alone else None
            ended = functools.partial(self._ended, first)
            # Before it is queued: what was queued of it when that fails is waited for as well.
            self._completions.add(self._line, Entry(part, _PART_SECS, ended))
            part.queue(self._stream)
        first.launch()
        return True

    def _ended(self, launch: _W, error: Exception | None) -> None:
        # What was launched tells by itself what its copies have met.
        if error is not None and self.waiting and self.waiting[0] is launch:
            self._fail(error)
        self._go_on()

    def _fail(self, error: Exception) -> None:
        first = self._take_first()
        first.give_up()
        first.failed(error)

    def _take_first(self) -> _W:
        self._parts = None
        return self.waiting.popleft()
