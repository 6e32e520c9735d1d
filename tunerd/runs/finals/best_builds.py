"""The builds of a search's best candidates, kept for the finals that follow."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from tunerd.vocabulary import Build, Failure, Measurement


class BestBuilds:
    """The build of each task's default, and of its best few so far, by what the search measured.

    Of trials that others disturbed as many as of quiet ones, as `choose_winners` takes them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._defaults: dict[str, Build] = {}
        self._best: dict[tuple[str, bool], list[tuple[float, Build]]] = {}

    def note(self, builds: Sequence[Build], results: Sequence[Measurement | Failure]) -> None:
        """Take in how the trials of some builds have ended."""
        for build, result in zip(builds, results, strict=True):
            if isinstance(result, Failure):
                continue
            task_id = build.candidate.task_id
            if build.candidate.is_default:
                self._defaults[task_id] = build
                continue
            best = self._best.setdefault((task_id, result.conditions.is_disturbed), [])
            bisect.insort(best, (result.median_secs, build), key=lambda entry: entry[0])
            del best[self._count :]

    def all(self) -> tuple[Build, ...]:
        """Return what is kept of all tasks."""
        return (*self._defaults.values(), *(b for best in self._best.values() for _, b in best))
