"""Trials that were in a slice when it was lost, each measured again alone on its device.

A fault of one kernel ends all clients of its GPU. What was under way there is repeated while the
device's other slices are idle: a fault can then be nobody else's. Holding them costs the time of a
trial or two, after a fault.
"""

from __future__ import annotations

from collections import deque

from tunerd.coordinator.worker_pool import Worker, WorkerPool
from tunerd.vocabulary import Build


class Isolation:
    """Whom to measure alone, and where."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._ids: set[str] = set()  # of trials that have not ended
        self._built: deque[Build] = deque()
        # Fault domains whose slices begin nothing else, and whether one measures alone already.
        self._held: dict[str, bool] = {}

    def __bool__(self) -> bool:
        """Whether one is built and waits."""
        return bool(self._built)

    def add(self, candidate_id: str) -> None:
        self._ids.add(candidate_id)

    def clear(self, candidate_id: str) -> None:
        """Forget a trial that has ended."""
        self._ids.discard(candidate_id)

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
