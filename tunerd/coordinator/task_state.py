"""What is known of one task while a run lasts, and what its next batch may gain."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf

from tunerd.vocabulary import Candidate, Failure, Measurement, Result, Task

_WINDOW = 3  # batches that the recent gain is taken over, as in MetaSchedule's task scheduler
_FIRST_GUESS = 0.5  # of the latency: what a batch may gain where nothing is known yet
KEPT_MOST = 512  # results of a task that are kept to be told to tuners; a trace is some 3 KB


class KnownIds:
    """Candidate ids in eight bytes each: a run keeps them all, so that none is paid twice."""

    def __init__(self) -> None:
        self._numbers = array("Q")  # sorted

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, candidate_id: str) -> bool:
        number = int(candidate_id, 16)
        place = bisect_left(self._numbers, number)
        return place < len(self._numbers) and self._numbers[place] == number

    def add(self, candidate_id: str) -> bool:
        """Add an id of 16 hex digits; False where it is known."""
        number = int(candidate_id, 16)
        place = bisect_left(self._numbers, number)
        if place < len(self._numbers) and self._numbers[place] == number:
            return False
        self._numbers.insert(place, number)
        return True


class Results:
    """What tuners are told: of a task's results the newest, and the best of the older ones.

    Keeps at most `most` and a quarter, so that the memory of a run does not grow with its trials.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[tuple[int, Result]] = []  # numbered as they came
        self.count = 0  # that ever came

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, result: Result) -> None:
        self._kept.append((self.count, result))
        self.count += 1
        if len(self._kept) > self._most + self._most // 4:
            newest = self._kept[-self._most // 2 :]
            older = self._kept[: -len(newest)]
            best = nsmallest(self._most - len(newest), older, key=_secs)
            self._kept = sorted(best, key=_number) + newest

    def since(self, number: int) -> tuple[Result, ...]:
        """Return those kept, in order, except for the first `number` that came."""
        first = bisect_left(self._kept, number, key=_number)
        return tuple(result for _, result in self._kept[first:])


def _secs(kept: tuple[int, Result]) -> float:
    return inf if kept[1].run_secs is None else kept[1].run_secs


def _number(kept: tuple[int, Result]) -> int:
    return kept[0]


@dataclass(slots=True)
class TaskState:
    """One task's progress; read by the progress display."""

    task: Task
    most_trials: int | None = None
    default_secs: float | None = None
    default_failed: bool = False
    default_open: bool = False  # proposed and not ended
    best_secs: float | None = None
    ended: int = 0  # search trials
    failed: int = 0
    open: set[str] = field(default_factory=set)  # search trials proposed and not ended
    seen: KnownIds = field(default_factory=KnownIds)  # search trials ever proposed
    results: Results = field(default_factory=lambda: Results(KEPT_MOST))
    proposing: int = 0
    lost_proposals: int = 0  # tuners that were lost in its search
    batches: int = 0
    best_after_batch: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW + 1))
    exhausted: bool = False
    message: str = ""

    @property
    def default_ended(self) -> bool:
        return self.default_failed or self.default_secs is not None

    @property
    def committed(self) -> int:
        """The search trials that have ended or will."""
        return self.ended + len(self.open)

    @property
    def is_full(self) -> bool:
        return self.most_trials is not None and self.committed >= self.most_trials

    def room(self, batch: int) -> int:
        """Return how many trials, at most `batch`, may be proposed now."""
        if self.most_trials is None:
            return batch
        return max(0, min(batch, self.most_trials - self.committed - batch * self.proposing))

    @property
    def known_secs(self) -> float | None:
        """The best time measured so far, the default's included."""
        if self.best_secs is None or self.default_secs is None:
            return self.default_secs if self.best_secs is None else self.best_secs
        return min(self.best_secs, self.default_secs)

    @property
    def reference_secs(self) -> float:
        """The time that counts for the task now: the best so far, the default, or a guess."""
        known = self.known_secs
        return max(self.task.flops / 1e12, 1e-6) if known is None else known

    @property
    def weighted_secs(self) -> float | None:
        """Its part of the model's time; 0 where its default failed and nothing else is known."""
        known = self.known_secs
        if known is None:
            return 0.0 if self.default_failed else None
        return self.task.weight * known

    def opened(self, candidate: Candidate) -> bool:
        """Mark a trial as under way; False where it is or was already."""
        if candidate.is_default:
            if self.default_open or self.default_ended:
                return False
            self.default_open = True
            return True
        if not self.seen.add(candidate.candidate_id):
            return False
        self.open.add(candidate.candidate_id)
        return True

    def end(self, candidate: Candidate, result: Measurement | Failure) -> None:
        """Take a trial's end; ValueError with its story where it is not under way."""
        is_default = candidate.is_default
        if not (self.default_open if is_default else candidate.candidate_id in self.open):
            raise ValueError(f"{self._story(candidate)}; now it ended with {result}")
        secs = result.median_secs if isinstance(result, Measurement) else None
        if is_default:
            self.default_open = False
            self.default_secs, self.default_failed = secs, secs is None
            return
        self.open.discard(candidate.candidate_id)
        self.ended += 1
        self.failed += secs is None
        self.results.add(Result(candidate, secs))
        if secs is not None and (self.best_secs is None or secs < self.best_secs):
            self.best_secs = secs
        if not self.open and self.best_secs is not None:
            self.best_after_batch.append(self.reference_secs)

    def _story(self, candidate: Candidate) -> str:
        name = f"{candidate.candidate_id} ({candidate.source}) of {self.task.name}"
        if candidate.is_default:
            ends = [self.default_secs] if self.default_ended else []
        elif candidate.candidate_id not in self.seen:
            ends = []
        else:
            ends = [t.run_secs for t in self.results.since(0) if t.candidate == candidate]
            if not ends:
                return f"{name} had ended: with what is no longer kept here"
        if not ends:
            return f"{name} was never proposed"
        before = "failed" if ends[0] is None else f"was measured at {ends[0]:.6g} s"
        return f"{name} had ended: it {before}"

    def gain_secs(self) -> float:
        """Estimate what the next batch saves per inference.

        Ansor's idea (arXiv 2006.06762, section 6): the mean of what the last batches brought and of
        a guess that shrinks with their number. Both are parts of the latency, so that the leap of a
        task's second batch does not outweigh a task that is as slow and was tried once. What the
        first batch brought over the default says nothing of the next.
        """
        latency = self.reference_secs
        if not self.batches:
            return self.task.weight * latency
        history = self.best_after_batch
        recent = 0.0
        if len(history) > 1:
            recent = (1 - history[-1] / history[0]) / (len(history) - 1)
        guess = _FIRST_GUESS / (self.batches + 1)
        return self.task.weight * latency * 0.5 * (recent + guess)
