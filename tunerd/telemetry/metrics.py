"""What a run counts for a metrics server, under the names that it is scraped by.

Ray puts `ray_` before each name. Names follow Prometheus: units are base units and in the name,
what only grows ends in `_total`. All have the labels `model` and `share`, which stay the same from
night to night; the rest are of few values, but for the tasks of a model, some tens to hundreds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tunerd.telemetry.progress import TaskProgress
from tunerd.vocabulary import CapProof, Failure, Measurement


@dataclass(frozen=True)
class Name:
    """One metric: its name, what it is, and its labels beside model and share."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def only_grows(self) -> bool:
        return self.name.endswith("_total")


TRIALS = Name(
    "tunerd_trials_total",
    "Trials that ended, defaults among them, by how: measured or failed.",
    ("state",),
)
FAILURES = Name(
    "tunerd_trial_failures_total", "Trials that failed, by where and how.", ("stage", "kind")
)
DISTURBED = Name(
    "tunerd_trials_disturbed_total",
    "Trials that were measured beside others, or with clocks held down.",
)
REQUEUED = Name(
    "tunerd_trials_requeued_total",
    "Attempts that ended without blame for the trial, which was queued again.",
    ("kind",),
)
WORKERS = Name("tunerd_workers", "Tuners and slices that take part.", ("role",))
BUSY = Name(
    "tunerd_worker_busy_ratio",
    "Part of the time of a role's workers that was work, since the session began.",
    ("role",),
)
BUSY_SECS = Name(
    "tunerd_worker_busy_seconds_total",
    "Time in which workers of a role searched, built or measured.",
    ("role",),
)
RESTARTS = Name("tunerd_worker_restarts_total", "Workers that were started again.", ("role",))
PROOFS = Name(
    "tunerd_cap_proofs_total", "Slices that proved what they obtained, restarts among them."
)
SLICE_SMS = Name("tunerd_slice_sms", "SMs, or cores, that a slice obtained.")
TASK_BEST = Name(
    "tunerd_task_best_seconds",
    "Best time of a task's kernel so far, at most the default's.",
    ("task", "task_id"),
)
TASK_DEFAULT = Name(
    "tunerd_task_default_seconds",
    "Time of a task's kernel with the default schedule.",
    ("task", "task_id"),
)
KERNELS_BEST = Name(
    "tunerd_kernels_best_seconds", "All kernels of a model by how often it calls them, the best."
)
KERNELS_DEFAULT = Name("tunerd_kernels_default_seconds", "The same with the default schedules.")

CATALOG = (
    TRIALS,
    FAILURES,
    DISTURBED,
    REQUEUED,
    WORKERS,
    BUSY,
    BUSY_SECS,
    RESTARTS,
    PROOFS,
    SLICE_SMS,
    TASK_BEST,
    TASK_DEFAULT,
    KERNELS_BEST,
    KERNELS_DEFAULT,
)
COMMON_LABELS = ("model", "share")

Record = Callable[[Name, float, Mapping[str, str]], None]
"""Adds a number to a metric that only grows, and sets any other."""


def record_nothing(name: Name, value: float, labels: Mapping[str, str]) -> None:
    """Pass over a number: nobody scrapes a private cluster, which ends with its run."""


@dataclass
class _There:
    """The time in which workers of one role were there, summed over them."""

    secs: float = 0.0
    busy_secs: float = 0.0
    until_secs: float = 0.0


class Metrics:
    """Records what happens in a run.

    Args:
        share: "gpu40" or "cpu50".
    """

    def __init__(self, record: Record, *, model: str, share: str) -> None:
        self._to = record
        self._common = {"model": model, "share": share}
        self._said: dict[tuple[str, ...], float] = {}
        self._there: dict[str, _There] = defaultdict(_There)

    def trials_ended(self, results: Iterable[Measurement | Failure]) -> None:
        for result in results:
            if isinstance(result, Measurement):
                self._add(TRIALS, 1, state="measured")
                if result.conditions.is_disturbed:
                    self._add(DISTURBED, 1)
            elif result.kind.ends_trial:
                self._add(TRIALS, 1, state="failed")
                self._add(FAILURES, 1, stage=str(result.stage), kind=str(result.kind))
            else:
                self._add(REQUEUED, 1, kind=str(result.kind))

    def answered(self, role: str, busy_secs: float | None) -> None:
        if busy_secs is not None and busy_secs > 0:
            self._add(BUSY_SECS, busy_secs, role=role)
            self._there[role].busy_secs += busy_secs

    def workers(self, role: str, count: int, elapsed_secs: float) -> None:
        """So many workers of a role have been there since the last call."""
        there = self._there[role]
        there.secs += count * (elapsed_secs - there.until_secs)
        there.until_secs = elapsed_secs
        self._set(WORKERS, count, role=role)
        self._set(BUSY, min(1.0, there.busy_secs / there.secs) if there.secs else 0.0, role=role)

    def restarted(self, role: str) -> None:
        self._add(RESTARTS, 1, role=role)

    def proved(self, proof: CapProof) -> None:
        self._add(PROOFS, 1)
        self._set(SLICE_SMS, proof.sm_count)

    def task(self, task_id: str, task: TaskProgress) -> None:
        for name, secs in ((TASK_BEST, task.best_secs), (TASK_DEFAULT, task.default_secs)):
            if secs is not None:
                self._set(name, secs, task=task.name, task_id=task_id)

    def kernels(self, default_secs: float, best_secs: float) -> None:
        self._set(KERNELS_DEFAULT, default_secs)
        self._set(KERNELS_BEST, best_secs)

    def _add(self, name: Name, value: float, **labels: str) -> None:
        self._to(name, value, self._common | labels)

    def _set(self, name: Name, value: float, **labels: str) -> None:
        """Record what has changed: a run of hundreds of tasks shows itself twice a second."""
        key = (name.name, *labels.values())
        if self._said.get(key) != value:
            self._said[key] = value
            self._to(name, value, self._common | labels)
