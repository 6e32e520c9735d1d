"""What is known of one source of one task while a run lasts, and what its next batch may gain."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tunerd.candidates.base import BATCH
from tunerd.coordinator.isolation import MAX_ATTEMPTS
from tunerd.coordinator.results import MAX_RESULTS, Results
from tunerd.vocabulary import METASCHEDULE

_FIRST_HALF = BATCH // 2  # of its first batch, so that a short search reaches every task
_WINDOW = 3  # batches that the recent gain is taken over, as in MetaSchedule's task scheduler
# For MetaSchedule, where another source has found something already. Of 480 tasks of six models at
# shares of an H100 that templates and MetaSchedule both searched, it found the faster kernel in 18,
# by 12% in the middle, and its first batch costs a tuner 10 to 30 s.
_SECOND_GUESS = 0.03
_FIRST_GUESS = 0.5  # of the latency: what a batch may gain where nothing is known yet
_REACH = 0.6  # so that one that lost twice by 1.3 times is asked no more


@dataclass(slots=True)
class SourceState:
    """One source's part of a task: what it proposed, and how that ended."""

    name: str
    results: Results = field(default_factory=lambda: Results(MAX_RESULTS))
    best_secs: float | None = None
    ended: int = 0
    open: set[str] = field(default_factory=set)  # trials proposed and not ended
    proposing: int = 0
    lost_proposals: int = 0  # tuners that were lost in its search
    batches: float = 0.0  # that it was asked for and has answered; the first comes in two halves
    best_after_batch: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW + 1))
    exhausted: bool = False
    message: str = ""

    @property
    def has_learnt(self) -> bool:
        """Whether enough of its trials have ended for its next batch to learn from them.

        A search that is not told is a random one: more trials at once would be faster, and worse.
        """
        under_way = len(self.open) + BATCH * self.proposing
        if not (self.batches or self.ended):  # nobody knows yet whether it has candidates at all
            return under_way == 0
        return under_way <= BATCH + self.ended // 8

    @property
    def next_count(self) -> int:
        """How many candidates it is asked for next: halves of its first batch, then batches."""
        return BATCH if self.batches >= 1 else _FIRST_HALF

    @property
    def is_of_use(self) -> bool:
        """Whether it has found something, or is about to: it is asked, or is measured."""
        return self.best_secs is not None or bool(self.open) or self.proposing > 0

    def gain(self, least_secs: float | None, *, is_first: bool = True) -> float:
        """Estimate what part of the task's latency the next batch saves.

        Ansor's idea (arXiv 2006.06762, section 6): the mean of what the last batches brought and of
        a guess that shrinks with their number. Both are parts of the latency, so that the leap of a
        second batch does not outweigh a task that is as slow and was tried once. What the first
        batch brought over the default says nothing of the next.

        A source that lags behind `least_secs`, the best of all sources of the task, gains less. It
        may lag by _REACH after its first batch, and by twice that after half of it; what lags
        further saves less than nothing, and is asked when the others have no more.

        is_first: no other source of the task has found something, or is about to.
        """
        if not self.batches:
            return _SECOND_GUESS if self.name == METASCHEDULE and not is_first else 1.0
        history = self.best_after_batch
        recent = 0.0
        if len(history) > 1:
            recent = (1 - history[-1] / history[0]) / (len(history) - 1)
        guess = _FIRST_GUESS / (self.batches + 1)
        part = 0.5 * (recent + guess)
        if self.best_secs is None or not least_secs:
            return part
        behind = self.best_secs / least_secs - 1.0
        return part - part * behind * self.batches / _REACH

    def lose_proposal(self, message: str) -> None:
        """Count a tuner that was lost in its search; too many of them end it."""
        self.lost_proposals += 1
        if self.lost_proposals >= MAX_ATTEMPTS:
            self.exhausted = True
            self.message = f"{MAX_ATTEMPTS} tuners were lost in its search, the last: {message}"
