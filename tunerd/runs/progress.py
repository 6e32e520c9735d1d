"""What people see of a run while it lasts: its phase, how far it is, and what comes next."""

from __future__ import annotations

import logging
import time

from tunerd.cluster.membership import Membership
from tunerd.coordinator.coordinator import Coordinator
from tunerd.coordinator.task_state import TaskState
from tunerd.runs.plan import RunPlan
from tunerd.telemetry.events import Telemetry
from tunerd.telemetry.progress import SEARCHING, ProgressState, TaskProgress

log = logging.getLogger(__name__)


class RunProgress:
    """Tells a run's telemetry how far it is.

    Args:
        started: when the run began, by time.monotonic().
    """

    def __init__(self, plan: RunPlan, telemetry: Telemetry, *, started: float) -> None:
        self.phase = "starting"
        self._plan = plan
        self._telemetry = telemetry
        self._started = started
        self._search_began: float | None = None

    def begin_search(self) -> None:
        self.phase = SEARCHING
        self._search_began = time.monotonic()

    @property
    def searched_secs(self) -> float:
        """Seconds since the search began; 0 before."""
        return 0.0 if self._search_began is None else time.monotonic() - self._search_began

    def log_step(self, what: str) -> None:
        """Log that a part of the start is done."""
        log.info("%s after %.1f s", what, time.monotonic() - self._started)

    def show(self, message: str, coordinator: Coordinator, membership: Membership | None) -> None:
        """Show how far the run is; no membership: its workers have not started yet."""
        plan, layout = self._plan, self._plan.layout
        total = coordinator.weighted_best_secs() or 0.0
        now = time.monotonic()
        began = now if self._search_began is None else self._search_began
        self._telemetry.update(
            ProgressState(
                elapsed_secs=now - self._started,
                budget_secs=plan.settings.budget_secs,
                trials_done=coordinator.ended_trials,
                trials_failed=coordinator.failed_trials,
                trials_budget=plan.settings.trials,
                slices_busy=coordinator.busy("slice"),
                slices=len(membership.slice_ids if membership else layout.slices),
                tuners_busy=coordinator.busy("tuner"),
                tuners=len(membership.tuner_ids if membership else layout.tuners),
                tasks=tuple(_task_progress(s, total) for s in coordinator.tasks.values()),
                phase=self.phase,
                message=message,
                search_began_secs=began - self._started,
            )
        )


def _task_progress(state: TaskState, total_secs: float) -> TaskProgress:
    task = state.task
    return TaskProgress(
        name=task.name,
        weight=task.weight,
        default_secs=state.default_secs,
        best_secs=state.known_secs,
        trials=state.ended,
        share=task.weight * state.reference_secs / total_secs if total_secs else 0.0,
        task_id=task.task_id,
    )
