"""What is known of one task while a run lasts, and what its next batch may gain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tunerd.candidates.base import BATCH
from tunerd.coordinator.results import MAX_RESULTS, KnownIds, Results
from tunerd.coordinator.source_state import SourceState
from tunerd.vocabulary import METASCHEDULE, Candidate, Failure, Measurement, Result, Task


def _one_source() -> dict[str, SourceState]:
    return {METASCHEDULE: SourceState(METASCHEDULE)}


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
    seen: KnownIds = field(default_factory=KnownIds)  # search trials ever proposed
    sources: dict[str, SourceState] = field(default_factory=_one_source)

    @classmethod
    def by(
        cls, task: Task, sources: Iterable[str], most_trials: int | None = None, *, kept: int
    ) -> TaskState:
        """Return a task that these sources search; so many results are kept of each."""
        states = {name: SourceState(name, Results(kept)) for name in sources}
        return cls(task, most_trials, sources=states)

    def source(self, candidate: Candidate) -> SourceState:
        """Return a candidate's source; one that only an earlier session had proposes nothing."""
        name = candidate.source
        if name not in self.sources:
            self.sources[name] = SourceState(name, Results(MAX_RESULTS), exhausted=True)
        return self.sources[name]

    @property
    def open(self) -> int:
        """The search trials that were proposed and have not ended."""
        return sum(len(s.open) for s in self.sources.values())

    @property
    def proposing(self) -> int:
        return sum(s.proposing for s in self.sources.values())

    @property
    def exhausted(self) -> bool:
        return all(s.exhausted for s in self.sources.values())

    @property
    def message(self) -> str:
        """Why sources propose no more, or what they said last."""
        return "; ".join(dict.fromkeys(s.message for s in self.sources.values() if s.message))

    @property
    def hardly_searched(self) -> bool:
        """Whether a source has had too few batches to say how much it gains."""
        return any(s.batches < 2 for s in self.sources.values() if not s.exhausted)

    def next_source(self) -> SourceState | None:
        """Return the source that promises most for the next batch, None where none is ready.

        Of equals the first named proposes. One that lags too far behind another waits until that
        one has no more.
        """
        left = [s for s in self.sources.values() if not s.exhausted]
        promising = max(left, key=self._gain, default=None)
        best = max((s for s in left if s.has_learnt), key=self._gain, default=None)
        if best is None:
            return None
        return best if best is promising or self._gain(best) > 0 else None

    def _gain(self, source: SourceState) -> float:
        is_first = not any(s.is_of_use for s in self.sources.values() if s is not source)
        return source.gain(self._least_secs, is_first=is_first)

    @property
    def default_ended(self) -> bool:
        return self.default_failed or self.default_secs is not None

    @property
    def committed(self) -> int:
        """The search trials that have ended or will."""
        return self.ended + self.open

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
        self.source(candidate).open.add(candidate.candidate_id)
        return True

    def end(self, candidate: Candidate, result: Measurement | Failure) -> None:
        """Take a trial's end; ValueError with its history where it is not under way."""
        is_default = candidate.is_default
        source = None if is_default else self.source(candidate)
        if not (self.default_open if source is None else candidate.candidate_id in source.open):
            raise ValueError(f"{self._history(candidate)}; now it ended with {result}")
        secs = result.median_secs if isinstance(result, Measurement) else None
        if source is None:
            self.default_open = False
            self.default_secs, self.default_failed = secs, secs is None
            return
        source.open.discard(candidate.candidate_id)
        self.ended += 1
        source.ended += 1
        self.failed += secs is None
        source.results.add(Result(candidate, secs))
        if secs is not None:
            self.best_secs = secs if self.best_secs is None else min(secs, self.best_secs)
            source.best_secs = secs if source.best_secs is None else min(secs, source.best_secs)
        if not source.open:
            self.note_best(source)

    def proposed(self, source: SourceState, count: int) -> None:
        """Count what a source was asked for, with what its batches before this have brought."""
        source.batches += count / BATCH
        self.note_best(source)

    def restored(self) -> None:
        """Begin the histories anew, of what an earlier session measured."""
        for source in self.sources.values():
            source.batches = source.ended / BATCH
            source.best_after_batch.clear()
            # A guess in it would look like a loss as soon as the first batch is measured.
            self.note_best(source)

    def note_best(self, source: SourceState) -> None:
        """Note the best of a source, at most the default: what is slower is not used."""
        if source.best_secs is None:
            return
        best = source.best_secs
        source.best_after_batch.append(
            best if self.default_secs is None else min(best, self.default_secs)
        )

    def _history(self, candidate: Candidate) -> str:
        name = f"{candidate.candidate_id} ({candidate.source}) of {self.task.name}"
        if candidate.is_default:
            ends = [self.default_secs] if self.default_ended else []
        elif candidate.candidate_id not in self.seen:
            ends = []
        else:
            ends = [
                t.run_secs
                for t in self.source(candidate).results.since(0)
                if t.candidate == candidate
            ]
            if not ends:
                return f"{name} had ended: with what is no longer kept here"
        if not ends:
            return f"{name} was never proposed"
        before = "failed" if ends[0] is None else f"was measured at {ends[0]:.6g} s"
        return f"{name} had ended: it {before}"

    @property
    def _least_secs(self) -> float | None:
        known = [s.best_secs for s in self.sources.values() if s.best_secs is not None]
        return min(known, default=None)

    def gain_secs(self) -> float:
        """Estimate what a batch saves per inference, of the source that promises most."""
        gains = [self._gain(s) for s in self.sources.values() if not s.exhausted]
        return self.task.weight * self.reference_secs * max(gains, default=0.0)

    def next_gain_secs(self) -> float | None:
        """Estimate what the next batch saves per inference, None where no source is ready."""
        source = self.next_source()
        if source is None:
            return None
        return self.task.weight * self.reference_secs * self._gain(source)
