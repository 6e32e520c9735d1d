"""What a session tells those who watch it: its display, its status file, the log, and metrics.

The session calls it where things happen. Nothing here may end a run, or decide anything in it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable
from typing import Any, Self

from tunerd.records import RunFacts
from tunerd.records.paths import Paths
from tunerd.settings import TuneSettings
from tunerd.system.logs import run_logged
from tunerd.telemetry.metrics import Metrics, Record, record_nothing
from tunerd.telemetry.progress import Progress, ProgressState
from tunerd.telemetry.quietness import Quietness
from tunerd.telemetry.status_file import StatusFile
from tunerd.vocabulary import Candidate, CapProof, Failure, Measurement

log = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 500


class Telemetry(Progress):
    """Tells of one session, until it is left.

    Args:
        progress: shown as well; whoever opened it closes it.
        record: where metrics go, if somebody watches them.
    """

    def __init__(
        self,
        progress: Progress,
        paths: Paths,
        facts: RunFacts,
        settings: TuneSettings,
        *,
        record: Record = record_nothing,
    ) -> None:
        self._metrics = Metrics(record, model=facts.model_name, share=settings.share.label)
        self._progress = progress
        self._status = StatusFile(paths)
        self._stack = contextlib.ExitStack()
        self._run, self._logs = str(settings.out), paths.logs
        self._slices: dict[str, str] = {}  # that trials run in, by candidate id
        self._names: dict[str, str] = {}  # of tasks, by id
        self._best: dict[str, float] = {}  # seconds, by task id
        self._said = ""
        self._quietness = Quietness()

    def update(self, state: ProgressState) -> None:
        """Tell how far the session is."""
        self._progress.update(state)
        self._status.tell(state)
        said = state.message or state.phase
        if said != self._said:
            self._said = said
            log.info("%s", said)
        self._metrics.workers("slice", state.slices, state.elapsed_secs)
        self._metrics.workers("tuner", state.tuners, state.elapsed_secs)
        for task in state.tasks:
            self._metrics.task(task.task_id, task)
            self._names[task.task_id] = task.name
        if state.model_secs:
            self._metrics.kernels(*state.model_secs)

    def proved(self, proof: CapProof) -> None:
        self._metrics.proved(proof)
        log.info(
            "obtained %d of %d of %s",
            proof.sm_count,
            proof.device_sm_count,
            proof.device,
            extra={"slice": proof.slice_id},
        )

    def measured(self, device: str, results: Iterable[Measurement | Failure]) -> None:
        """Results of a device came in, spot checks among them; names it where that is news."""
        for sentence in self._quietness.note(device, results):
            self.warn(sentence)

    def warn(self, sentence: str) -> None:
        self._progress.warn(sentence)
        log.warning("%s", sentence)

    def answered(self, role: str, busy_secs: float | None) -> None:
        """A worker answered; so long it worked, where that is known."""
        self._metrics.answered(role, busy_secs)

    def lost(self, role: str, worker_id: str, message: str) -> None:
        """A worker ended before it should."""
        log.error("lost %s: %s", worker_id, message, extra={role: worker_id})

    def restarted(self, role: str, worker_id: str) -> None:
        self._metrics.restarted(role)
        log.info("starting %s again", worker_id, extra={role: worker_id})

    def trials_started(self, candidates: Iterable[Candidate], slice_id: str) -> None:
        """Trials are about to run in a slice."""
        self._slices |= {c.candidate_id: slice_id for c in candidates}

    def trials_ended(self, results: Iterable[tuple[int, Candidate, Measurement | Failure]]) -> None:
        """Trials have been stored with how they ended, or were put back."""
        results = list(results)
        self._metrics.trials_ended(result for _, _, result in results)
        for trial_id, candidate, result in results:
            task_id = candidate.task_id
            about = {
                "trial": trial_id,
                "task": self._names.get(task_id, task_id),
                "slice": self._slices.pop(candidate.candidate_id, None),
            }
            if isinstance(result, Failure):
                message = result.message[-_MAX_MESSAGE_CHARS:]
                log.info("%s in %s: %s", result.kind, result.stage, message, extra=about)
            elif result.median_secs < self._best.get(task_id, math.inf):
                self._best[task_id] = result.median_secs
                log.info("best of its task: %.6g s", result.median_secs, extra=about)
            else:
                log.debug("measured %.6g s", result.median_secs, extra=about)

    def close(self) -> None:
        """Close nothing: the display is another's."""

    def __enter__(self) -> Self:
        self._stack.enter_context(run_logged(self._run, self._logs))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._status.end(raised[1])
        self._stack.__exit__(*raised)
