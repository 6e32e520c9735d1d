"""What is known of one task while a run lasts, and what its next batch may gain."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunerd.search import Told
from tunerd.vocabulary import Candidate, Failure, Measurement, Origin, Task

_WINDOW = 3  # batches that the recent gain is taken over, as in MetaSchedule's task scheduler
_FIRST_GUESS = 0.5  # of the latency: what a batch may gain where nothing is known yet


@dataclass
class TaskState:
    """One task's progress; read by the progress display."""

    task: Task
    default_secs: float | None = None
    default_failed: bool = False
    default_open: bool = False  # proposed and not ended
    best_secs: float | None = None
    ended: int = 0  # search trials
    failed: int = 0
    open: set[str] = field(default_factory=set)  # search trials proposed and not ended
    seen: set[str] = field(default_factory=set)  # search trials ever proposed
    told: list[Told] = field(default_factory=list)
    proposing: int = 0
    lost_proposals: int = 0  # tuners that were lost in its search
    batches: int = 0
    best_after_batch: list[float] = field(default_factory=list)
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
    def reference_secs(self) -> float:
        """The time that counts for the task now: the best so far, the default, or a guess."""
        known = [s for s in (self.best_secs, self.default_secs) if s is not None]
        return min(known, default=max(self.task.flops / 1e12, 1e-6))

    def opened(self, candidate: Candidate) -> bool:
        """Mark a trial as under way; False where it is or was already."""
        if candidate.origin is Origin.DEFAULT:
            if self.default_open or self.default_ended:
                return False
            self.default_open = True
            return True
        if candidate.candidate_id in self.seen:
            return False
        self.seen.add(candidate.candidate_id)
        self.open.add(candidate.candidate_id)
        return True

    def end(self, candidate: Candidate, result: Measurement | Failure) -> None:
        """Take a trial's end; ValueError with its story where it is not under way."""
        is_default = candidate.origin is Origin.DEFAULT
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
        self.told.append(Told(candidate, secs))
        if secs is not None and (self.best_secs is None or secs < self.best_secs):
            self.best_secs = secs
        if not self.open and self.best_secs is not None:
            self.best_after_batch.append(self.reference_secs)

    def _story(self, candidate: Candidate) -> str:
        name = f"{candidate.candidate_id} ({candidate.origin}) of {self.task.name}"
        if candidate.origin is Origin.DEFAULT:
            ends = [self.default_secs] if self.default_ended else []
        else:
            ends = [t.run_secs for t in self.told if t.candidate == candidate]
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
        history = self.best_after_batch[-_WINDOW - 1 :]
        recent = 0.0
        if len(history) > 1:
            recent = (1 - history[-1] / history[0]) / (len(history) - 1)
        guess = _FIRST_GUESS / (self.batches + 1)
        return self.task.weight * latency * 0.5 * (recent + guess)
