"""When a search stops: its limits, and the trials and seconds that they are held against."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.candidates.base import BATCH
from tunerd.coordinator.task_scheduler import TaskScheduler
from tunerd.vocabulary import Failure, Measurement

_SMALL_GAIN = 5e-4  # of the weighted latency a batch: stop when no task promises more


@dataclass(frozen=True)
class Limits:
    """When to stop: whichever comes first. Neither: when little gain is left."""

    trials: int | None = None
    budget_secs: float | None = None
    trials_per_task: int | None = None


class Budget:
    """The search trials that have ended or will, and what is left to spend."""

    def __init__(self, limits: Limits, scheduler: TaskScheduler) -> None:
        self.ended = 0
        self.failed = 0
        self.elapsed_secs = 0.0
        self._open = 0
        self._limits = limits
        self._scheduler = scheduler
        self._stop = ""

    def open(self) -> None:
        """Count a trial that will end."""
        self._open += 1

    def end(self, result: Measurement | Failure) -> None:
        self._open -= 1
        self.ended += 1
        self.failed += isinstance(result, Failure)

    def stop(self, reason: str) -> None:
        self._stop = self._stop or reason

    @property
    def is_cut_short(self) -> bool:
        """Say whether something was left to search: its time is up, or somebody stopped it."""
        return bool(self._stop)

    def cut_short(self) -> str:
        """Say why nothing new is built: what is built is measured, the rest is left."""
        budget = self._limits.budget_secs
        if not self._stop and budget is not None and self.elapsed_secs >= budget:
            self._stop = f"the budget of {budget:g} s is spent"
        return self._stop

    def satisfied(self) -> str:
        """Say why nothing new is proposed: what is proposed is built and measured."""
        if self.has_enough_trials:
            return f"{self.ended} trials were measured"
        if self._limits == Limits() and self._little_gain():
            return "no task promises more than 0.05% of the model's time for its next batch"
        return ""

    def exhausted(self) -> str:
        """Say why nothing more can be proposed."""
        if self._scheduler.all_exhausted:
            return "every task's search space is exhausted"
        if self._scheduler.all_exhausted_or_full:
            return f"no task may have more than {self._limits.trials_per_task} trials"
        return ""

    @property
    def has_enough_trials(self) -> bool:
        return self._limits.trials is not None and self._committed >= self._limits.trials

    def room(self, proposing: int) -> int:
        """Return how many trials, at most a batch, may be proposed beside so many batches.

        0 while the trials left would not do for a batch of each task whose default is still
        under way: its gain is a guess, and a wrong guess could not be made good.
        """
        if self._limits.trials is None:
            return BATCH
        left = self._limits.trials - self._committed - BATCH * proposing
        if left <= BATCH * self._scheduler.defaults_open:
            return 0
        return min(BATCH, left)

    @property
    def _committed(self) -> int:
        return self.ended + self._open

    def _little_gain(self) -> bool:
        total = self._scheduler.weighted_best_secs()
        return total is not None and self._scheduler.highest_gain_secs() < _SMALL_GAIN * total
