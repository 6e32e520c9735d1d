"""Trials that were in a slice when it was lost, each measured again alone on its device.

A fault of one kernel ends all clients of its GPU. What was under way there is repeated while the
device's other slices are idle: a fault can then be nobody else's. Holding them costs the time of a
trial or two, after a fault.
"""

from __future__ import annotations

from collections import deque

from tunerd.coordination.roster import Roster, Worker
from tunerd.vocabulary import Build


class Suspects:
    """Whom to measure alone, and where. One device at a time is held for them."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._ids: set[str] = set()  # of trials that have not ended
        self._built: deque[Build] = deque()
        self._held: str | None = None  # the device none of whose slices begins anything else

    def __bool__(self) -> bool:
        """Whether one is built and waits."""
        return bool(self._built)

    def add(self, candidate_id: str) -> None:
        self._ids.add(candidate_id)

    def clear(self, candidate_id: str) -> None:
        """Forget a trial that has ended."""
        self._ids.discard(candidate_id)

    def take(self, build: Build) -> bool:
        """Take a build to measure it alone, if its trial is suspected."""
        is_suspect = build.candidate.candidate_id in self._ids
        if is_suspect:
            self._built.append(build)
        return is_suspect

    def next(self) -> tuple[Worker, Build] | None:
        """Return a build and a slice whose device is idle; None while there is none of both.

        While builds wait, the slices of one device are held back: until those at work have ended,
        then for one build after the other.
        """
        if self._built and self._held is None and (worker := self._roster.free("slice")):
            self._held = worker.device
            self._roster.hold(worker.device)
        if self._held is None or not self._roster.is_quiet(self._held):
            return None
        if self._built and (lone := self._roster.held_back(self._held)):
            return lone, self._built.popleft()
        self._roster.let_go(self._held)  # the last has ended, or the device has left
        self._held = None
        return None
