"""What a session measures in its store: each trial as it is proposed, starts and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from tunerd.coordinator import events as ev
from tunerd.errors import TunerdError
from tunerd.runs.folder import RunFolder
from tunerd.telemetry.events import Telemetry
from tunerd.vocabulary import Candidate, Failure, Measurement, TrialState


class Ledger:
    """Writes what the coordinator wants stored, and remembers the trials that have not ended."""

    def __init__(self, folder: RunFolder, telemetry: Telemetry) -> None:
        self._folder, self._telemetry = folder, telemetry
        self._store = folder.store
        self._trial_ids: dict[str, int] = {}  # of candidates whose trial has not ended

    def take_over(
        self, task_ids: Collection[str]
    ) -> tuple[list[tuple[Candidate, Measurement | Failure]], list[Candidate], set[str]]:
        """Return what earlier sessions ended of the tasks, what is to be done, and the suspects.

        Suspects are the ids of candidates to be done that were in a slice when it was lost, or
        when a session ended without a word.
        """
        waiting = [r.candidate for r in self._store.requeue_unfinished()]
        unfinished = [c for c in waiting if c.task_id in task_ids]
        ended = []
        for record in self._store.records():
            if record.candidate.task_id not in task_ids:
                continue
            if record.state in (TrialState.MEASURED, TrialState.FAILED):
                assert record.result is not None
                ended.append((record.candidate, record.result))
            else:
                self._trial_ids[record.candidate.candidate_id] = record.trial_id
        return ended, unfinished, self._store.lost()

    def write(
        self,
        instruction: ev.StoreProposed | ev.StoreBuilt | ev.StoreEnded | ev.StoreSpotCheck,
    ) -> None:
        match instruction:
            case ev.StoreProposed(candidates):
                trial_ids = self._store.propose(candidates)
                new = zip(candidates, trial_ids, strict=True)
                self._trial_ids |= {x.candidate_id: trial_id for x, trial_id in new}
            case ev.StoreBuilt(builds):
                for build in builds:
                    self._store.built(self._trial_ids[build.candidate.candidate_id], build)
            case ev.StoreEnded(results):
                self._end(results)
            case ev.StoreSpotCheck(task_id, measurement, busy_secs):
                self._store.add_spot_check(task_id, measurement, busy_secs)

    def start(self, instruction: ev.Measure) -> None:
        """Write that builds go to a slice, before they do."""
        trial_ids = [self._trial_ids[b.candidate.candidate_id] for b in instruction.builds]
        self._store.start(trial_ids, instruction.worker_id)
        self._telemetry.trials_started(trial_ids, instruction.worker_id)

    def interrupt(self) -> None:
        """Write that the session ends, in order, before what it had begun.

        A store that takes nothing more is not told: then the next session cannot know either.
        """
        with contextlib.suppress(TunerdError):
            self._store.interrupt()

    def _end(self, results: Sequence[tuple[Candidate, Measurement | Failure]]) -> None:
        ended = {self._trial_ids[x.candidate_id]: r for x, r in results}
        # Before the trial ends: what has ended is not looked at again.
        for trial_id, result in ended.items():
            if isinstance(result, Failure):
                self._folder.write_log(trial_id, result.message)
        self._store.finish_all(ended)
        self._telemetry.trials_ended((self._trial_ids[x.candidate_id], x, r) for x, r in results)
        for x, result in results:  # nothing is heard again of what has ended
            if not isinstance(result, Failure) or result.kind.ends_trial:
                del self._trial_ids[x.candidate_id]
