"""Task -> Candidates of a library: what its heuristic names, the first of them first.

Nothing is learnt: the library has ranked them, and they are few.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tunerd.candidates.base import CACHED_TASKS, Search
from tunerd.libraries.packages import LibraryCallError
from tunerd.vocabulary import (
    Candidate,
    Proposal,
    Result,
    Task,
    TrainingRow,
    TransferredResults,
)


class ListSearch(Search):
    """Proposes the recipes that a library has for a task, in their order.

    Args:
        source: the library's.
        recipes: of a task, as text; may raise LibraryCallError.
        most_failed: candidates of a task that fail before no more are proposed.
    """

    def __init__(
        self, source: str, recipes: Callable[[Task], Sequence[str]], *, most_failed: int
    ) -> None:
        self._source = source
        self._recipes = functools.lru_cache(CACHED_TASKS)(recipes)
        self._most_failed = most_failed
        self._ended: dict[str, dict[str, bool]] = {}  # whether a candidate failed, by task and id
        self._proposed: dict[str, set[str]] = {}

    def learn(self, transferred: Sequence[TransferredResults], tasks: Mapping[str, Task]) -> None:
        """Learn nothing: all recipes are tried."""

    def propose(
        self,
        task: Task,
        count: int,
        *,
        results: Sequence[Result] = (),
        exclude: Collection[str] = (),
        rows: Sequence[TrainingRow] = (),
    ) -> Proposal:
        started = time.perf_counter()
        ended = self._ended.setdefault(task.task_id, {})
        ended.update((r.candidate.candidate_id, r.run_secs is None) for r in results)
        proposed = self._proposed.setdefault(task.task_id, set())
        found: list[Candidate] = []
        message = "the library names no more algorithms"
        try:
            recipes = self._recipes(task)
        except LibraryCallError as error:
            recipes, message = (), str(error)
        if sum(ended.values()) < self._most_failed:
            for recipe in recipes:
                candidate = Candidate.of_recipe(task.task_id, recipe, source=self._source)
                name = candidate.candidate_id
                if name not in proposed and name not in ended and name not in exclude:
                    found.append(candidate)
        found = found[:count]
        proposed.update(candidate.candidate_id for candidate in found)
        message = "" if found else message
        return Proposal(tuple(found), not found, message, time.perf_counter() - started)
