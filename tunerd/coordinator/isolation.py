"""Trials that were lost with a worker: how often, and each measured again alone on its device.

A fault of one kernel ends all clients of its GPU. What was under way there is repeated while the
device's other slices are idle: a fault can then be nobody else's. Holding them costs the time of a
trial or two, after a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from tunerd.coordinator.worker_pool import Worker, WorkerPool
from tunerd.vocabulary import Build, Candidate, Failure, Kind, Stage

MAX_ATTEMPTS = 3  # how often a trial may be lost; the last time it is taken for the cause


class Isolation:
    """What to measure alone, and where."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._ids: set[str] = set()  # of trials that have not ended
        self._losses: dict[str, int] = {}  # of trials that have not ended
        self._built: deque[Build] = deque()
        # Fault domains whose slices begin nothing else, and whether one measures alone already.
        self._held: dict[str, bool] = {}

    def __bool__(self) -> bool:
        """Whether one is built and waits."""
        return bool(self._built)

    def lose(self, candidate_id: str, result: Failure) -> Failure | None:
        """Count that a trial was lost; return how it ends where that was once too often.

        One that was lost in a slice is measured alone from now on.
        """
        losses = self._losses[candidate_id] = self.was_lost(candidate_id) + 1
        if losses >= MAX_ATTEMPTS:
            message = f"lost {losses} times, the last: {result.message}"
            return Failure(result.stage, Kind.CRASH, message)
        if result.stage is not Stage.BUILD:
            self.add(candidate_id)
        return None

    def was_lost(self, candidate_id: str) -> int:
        """Return how often a trial of this session was lost that has not ended."""
        return self._losses.get(candidate_id, 0)

    def together(self, queue: Iterable[Candidate], most: int) -> int:
        """Return how many of a queue's first go to a worker together.

        Whatever was lost with a worker goes alone, so that it can take no other down again.
        """
        count = 0
        for candidate in islice(queue, most):
            if self.was_lost(candidate.candidate_id):
                return max(1, count)
            count += 1
        return count

    def add(self, candidate_id: str) -> None:
        self._ids.add(candidate_id)

    def clear(self, candidate_id: str) -> None:
        """Forget a trial that has ended."""
        self._ids.discard(candidate_id)
        self._losses.pop(candidate_id, None)

    def take(self, build: Build) -> bool:
        """Take a build to measure it alone, if its trial is lost."""
        is_isolated = build.candidate.candidate_id in self._ids
        if is_isolated:
            self._built.append(build)
        return is_isolated

    def next(self) -> tuple[Worker, Build] | None:
        """Return a build and a slice whose device is idle; None while there is none of both.

        For each build that waits, the slices of a fault domain are held back: until those at work
        have ended, then while one of them measures alone.
        """
        coming = sum(not has_begun for has_begun in self._held.values())
        while coming < len(self._built) and (worker := self._pool.free("slice")):
            self._held[worker.fault_domain] = False
            self._pool.hold(worker.fault_domain)
            coming += 1
        for domain in [d for d in self._held if self._pool.is_quiet(d)]:
            if self._built and (lone := self._pool.held_back(domain)):
                self._held[domain] = True
                return lone, self._built.popleft()
            del self._held[domain]  # nothing is left to measure alone, or nobody to do it
            self._pool.let_go(domain)
        return None
