"""When a slice runs the baseline, a kernel whose time should never change. No I/O, no clock.

The baseline is the default schedule of the task that costs the model most by its defaults, so the
same one in all slices and sessions of a run. A slice runs it every ten seconds, and so seldom that
it takes at most 1% of the search: the first time as soon as that much has passed. A check waits for
a moment without a build to measure; one that is overdue by as much again does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from tunerd.coordinator.events import BaselineChecked
from tunerd.coordinator.task_state import TaskState
from tunerd.vocabulary import Build, Candidate, Failure, Measurement, default_candidate

INTERVAL_SECS = 10.0
COST = 0.01  # of a slice's time
SCAN_SECS = 1.0  # how often free slices are looked at
_OVERHEAD_SECS = 0.05  # of a check, besides its samples: a guess until one was timed
_MOST_TRIES = 3  # to build the baseline in a session that goes on


class BaselineChecks:
    """Which slice is due. The coordinator tells what happens, and asks."""

    def __init__(self) -> None:
        self.build: Build | None = None
        self.wanted: Candidate | None = None  # to be built first, by any tuner
        self.builder = ""  # the tuner that builds it
        self._offered: tuple[float, Build] | None = None
        self._is_chosen = False
        self._tries = 0
        self._expected_secs = _OVERHEAD_SECS
        self._last_at: dict[str, float] = {}  # by slice
        self._spent_secs: dict[str, float] = {}
        self._scanned_at = 0.0

    def offer(self, build: Build, result: Measurement | Failure, weight: int) -> None:
        """Take note of a default schedule that was measured: it may be the baseline."""
        if not build.candidate.is_default or isinstance(result, Failure):
            return
        cost = weight * result.median_secs
        if not self._is_chosen and (self._offered is None or cost > self._offered[0]):
            self._offered = (cost, build)
            samples_secs = sum(result.run_secs) * result.calls_per_sample
            self._expected_secs = _OVERHEAD_SECS + 2 * samples_secs

    def scan(self, elapsed_secs: float, states: Iterable[TaskState]) -> bool:
        """Say whether to look at free slices now; choose the baseline once all defaults ended."""
        if elapsed_secs - self._scanned_at < SCAN_SECS:
            return False
        self._scanned_at = elapsed_secs
        if not self._is_chosen:
            self._choose(list(states))
        return self.build is not None

    def _choose(self, states: list[TaskState]) -> None:
        if any(not s.default_ended for s in states):
            return
        self._is_chosen = True
        known = [(s.task.weight * s.default_secs, s) for s in states if s.default_secs is not None]
        if not known:
            return
        _, costliest = max(known, key=lambda k: k[0])
        baseline = default_candidate(costliest.task)
        if self._offered is not None and self._offered[1].candidate == baseline:
            self.build = self._offered[1]
        else:  # an earlier session has measured it
            self.wanted = baseline
            self._expected_secs = _OVERHEAD_SECS + 10 * (costliest.default_secs or 0.0)
        self._offered = None

    def built(self, result: Build | Failure | None) -> None:
        """Take the baseline from its tuner; None where the tuner was lost."""
        baseline, self.builder = self.wanted, ""
        self._tries += 1
        if isinstance(result, Build):
            self.build, self.wanted = result, None
        elif isinstance(result, Failure) or self._tries >= _MOST_TRIES:
            self.wanted = None
        else:
            self.wanted = baseline

    def is_due(self, slice_id: str, elapsed_secs: float, *, patience: float = 1.0) -> bool:
        """Say whether a slice is to be checked; `patience` times the interval must be over."""
        if self.build is None:
            return False
        last_at = self._last_at.get(slice_id)
        if last_at is not None and elapsed_secs - last_at < patience * INTERVAL_SECS:
            return False
        spent_secs = self._spent_secs.get(slice_id, 0.0)
        return spent_secs + self._expected_secs <= COST * elapsed_secs

    def ended(self, check: BaselineChecked, elapsed_secs: float) -> None:
        """Count a check; a baseline that fails by its own fault is run no more."""
        slice_id = check.worker_id
        self._last_at[slice_id] = elapsed_secs
        self._spent_secs[slice_id] = self._spent_secs.get(slice_id, 0.0) + check.busy_secs
        if isinstance(check.result, Measurement):
            self._expected_secs = check.busy_secs
        elif check.result.kind.ends_trial:
            self.build = None
