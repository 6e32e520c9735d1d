"""A tuner: searches and builds in one long-lived process.

The search uses threads inside TVM, and builds release the GIL, so one process with a few threads
keeps its cores busy and pays TVM's imports once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tunerd.candidates import registry
from tunerd.candidates.base import Search, SearchSettings
from tunerd.vocabulary import (
    Build,
    Candidate,
    Failure,
    Proposal,
    Result,
    TargetSpec,
    Task,
    TrainingRow,
    TransferredResults,
    default_candidate,
)

BUILD_TIMEOUT_SECS = 60.0


class Tuner:
    """Searches and builds the tasks of warm_up(), on the cores it was given."""

    def __init__(
        self, *, seed: int, threads: int, island_number: int, cores: Sequence[int] = ()
    ) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        self._tasks: dict[str, Task] = {}
        self._settings = SearchSettings(seed, threads, island_number)
        self._searches: dict[str, Search] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="build")

    def prepare(self, target: TargetSpec, precision: str = "") -> None:
        """Import what searching and building for a target need, before there are tasks."""
        from tunerd.builder import build

        build.preload(target, precision)

    def warm_up(
        self,
        tasks: Sequence[Task],
        transferred: Sequence[TransferredResults] = (),
        sms: int | None = None,
        libraries: Sequence[str] = (),
    ) -> float:
        """Take the tasks over, learn, and schedule one task; return the seconds it took.

        sms: of the share of a GPU that is tuned for.
        libraries: that are searched, too.
        """
        started = time.perf_counter()
        from tunerd.builder.library import load_tvm

        load_tvm()
        self._tasks = {t.task_id: t for t in tasks}
        sources = registry.searched(libraries)
        self._searches = registry.searches(replace(self._settings, sms=sms), sources)
        for source, search in self._searches.items():
            search.learn([x for x in transferred if x.source == source], self._tasks)
        if tasks:
            registry.lower(tasks[0], default_candidate(tasks[0]))
        return time.perf_counter() - started

    def propose(
        self,
        task_id: str,
        source: str,
        count: int,
        results: Sequence[Result],
        exclude: Sequence[str],
        rows: Sequence[TrainingRow],
    ) -> Proposal:
        """Have a source propose; one that does not take the task is exhausted."""
        task = self._tasks[task_id]
        return registry.not_taken(task, source) or self._searches[source].propose(
            task, count, results=results, exclude=exclude, rows=rows
        )

    def build(self, candidates: Sequence[Candidate]) -> list[Build | Failure]:
        """Build the candidates, as many at once as there are threads; results in order."""
        return list(self._pool.map(self._build, candidates))

    def _build(self, candidate: Candidate) -> Build | Failure:
        from tunerd.builder.build import build_candidate

        search = self._searches.get(candidate.source)
        return build_candidate(
            self._tasks[candidate.task_id],
            candidate,
            lowered=search.lowered(candidate) if search else None,
            timeout_secs=BUILD_TIMEOUT_SECS,
        )
