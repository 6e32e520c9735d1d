"""Task -> Candidates of a library: what its heuristic names, the first of them first.

Nothing is learnt: the library has ranked them, and they are few.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from tunerd.candidates.base import Search
from tunerd.candidates.libraries.recipe import Recipe
from tunerd.vocabulary import (
    Candidate,
    Proposal,
    Result,
    Task,
    TrainingRow,
    TransferredResults,
    candidate_id,
)

_MOST_FAILED = 4  # of a task: behind the last that the heuristic names, all others fail


class RankSearch(Search):
    """Proposes ranks of a library's heuristic in their order.

    Args:
        source: the library's.
        sms: that the heuristic is to count on; 0: those of the device.
    """

    def __init__(self, source: str, ranks: int, *, sms: int, version: str) -> None:
        self._source = source
        self._recipes = [Recipe(rank, sms, version).text for rank in range(ranks)]
        self._ended: dict[str, dict[str, bool]] = {}  # whether a candidate failed, by task and id
        self._proposed: dict[str, set[str]] = {}

    def learn(self, transferred: Sequence[TransferredResults], tasks: Mapping[str, Task]) -> None:
        """Learn nothing: all ranks are tried."""

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
        if sum(ended.values()) < _MOST_FAILED:
            for recipe in self._recipes:
                name = candidate_id(task.task_id, recipe, source=self._source)
                if name not in proposed and name not in ended and name not in exclude:
                    found.append(Candidate(task.task_id, name, self._source, recipe))
        found = found[:count]
        proposed.update(candidate.candidate_id for candidate in found)
        message = "" if found else "the library names no more algorithms"
        return Proposal(tuple(found), not found, message, time.perf_counter() - started)
