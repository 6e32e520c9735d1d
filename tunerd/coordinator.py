"""What to do next: events in, instructions out. No I/O, no clock, no Ray.

The session turns what happened into events and hands them to `handle`; it carries out the
instructions that come back and reports their ends as events again. The coordinator holds each
trial's state, decides which task deserves the next batch over all tasks, and keeps builders ahead
of slices.

    event                         instructions it may cause
    WorkerJoined, WorkerLost      Propose, BuildThem, Measure, Finish
    Proposed                      Store(proposed), Propose, BuildThem
    BuildsEnded                   Store(failed), Measure, Propose, BuildThem
    MeasurementsEnded             Store(measured or failed), Measure, Propose, BuildThem, Finish
    Tick, StopRequested           Finish

Workers of one lane share cores: at most one of them works at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tunerd.events import (
    BuildsEnded,
    BuildThem,
    Event,
    Finish,
    Instruction,
    Measure,
    MeasurementsEnded,
    Propose,
    Proposed,
    StopRequested,
    StoreBuilt,
    StoreEnded,
    StoreProposed,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from tunerd.search import BATCH
from tunerd.task_state import TaskState
from tunerd.vocabulary import Build, Candidate, Failure, Kind, Measurement, Origin, Stage, Task

MAX_ATTEMPTS = 3  # how often a trial is run again after others' faults
BUILD_CHUNK = 4
MEASURE_CHUNK = 4
_SMALL_GAIN = 5e-4  # of the weighted latency a batch: stop when no task promises more


@dataclass
class _Worker:
    worker_id: str
    role: str
    lane: str | None
    work: Propose | BuildThem | Measure | None = None
    islands: dict[str, int] = field(default_factory=dict)  # task_id -> results told so far


@dataclass(frozen=True)
class Limits:
    """When to stop: whichever comes first. Neither: when little gain is left."""

    trials: int | None = None
    budget_secs: float | None = None
    trials_per_task: int | None = None


class Coordinator:
    """The state machine of one run. What `handle` returns is its only way out."""

    def __init__(self, tasks: Sequence[Task], limits: Limits) -> None:
        self.tasks = {t.task_id: TaskState(t) for t in tasks}
        self.workers: dict[str, _Worker] = {}
        self.finished = ""
        self._limits = limits
        self._stop = ""
        self._unbuilt: deque[Candidate] = deque()
        self._built: deque[Build] = deque()
        self._attempts: dict[str, int] = {}
        self._elapsed_secs = 0.0

    # --- what an earlier session of the run knows ----------------------------------------------

    def restore(
        self,
        ended: Sequence[tuple[Candidate, Measurement | Failure]],
        unfinished: Sequence[Candidate],
    ) -> None:
        """Take over an earlier session's trials: what ended counts, what did not is built again.

        Where this session allows fewer trials than that one, what did not end stays as it is.
        """
        for candidate, result in ended:
            state = self.tasks[candidate.task_id]
            state.opened(candidate)
            state.end(candidate, result)
        for state in self.tasks.values():
            state.batches = state.ended // BATCH
            # A guess in it would look like a loss as soon as the first batch is measured.
            known = state.best_secs is not None
            state.best_after_batch = [state.reference_secs] if known else []
        for candidate in unfinished:
            is_default = candidate.origin is Origin.DEFAULT
            state = self.tasks[candidate.task_id]
            if is_default or not (self._enough_trials() or self._is_full(state)):
                state.opened(candidate)
                self._unbuilt.append(candidate)

    def start(self, defaults: Sequence[Candidate]) -> list[Instruction]:
        """Propose the default schedules that have not been measured yet, heaviest tasks first."""
        fresh = [c for c in defaults if self.tasks[c.task_id].opened(c)]
        fresh.sort(key=lambda c: -self._work(c.task_id))
        self._unbuilt.extendleft(reversed(fresh))
        return [StoreProposed(tuple(fresh))] if fresh else []

    # --- figures for the progress display ------------------------------------------------------

    @property
    def ended_trials(self) -> int:
        return sum(s.ended for s in self.tasks.values())

    @property
    def failed_trials(self) -> int:
        return sum(s.failed for s in self.tasks.values())

    def busy(self, role: str) -> int:
        return sum(w.work is not None for w in self.workers.values() if w.role == role)

    def weighted_best_secs(self) -> float | None:
        """Return the model's time by its kernels, or None while a default is not measured yet."""
        total = 0.0
        for state in self.tasks.values():
            known = [s for s in (state.best_secs, state.default_secs) if s is not None]
            if not known:
                if state.default_failed:
                    continue
                return None
            total += state.task.weight * min(known)
        return total

    # --- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what to do about it, in order."""
        out: list[Instruction] = []
        match event:
            case WorkerJoined(worker_id, role, lane):
                self.workers[worker_id] = _Worker(worker_id, role, lane)
            case WorkerLost(worker_id, message):
                self._lose(worker_id, message, out)
            case Proposed(worker_id, task_id, candidates, exhausted, message):
                self._proposed(worker_id, task_id, candidates, exhausted, message, out)
            case BuildsEnded(worker_id, results):
                self._builds_ended(worker_id, results, out)
            case MeasurementsEnded(worker_id, results):
                self._release(worker_id, Measure)
                self._store_results(results, out)
            case Tick(elapsed_secs):
                self._elapsed_secs = elapsed_secs
            case StopRequested(reason):
                self._stop = self._stop or reason
        self._dispatch(out)
        return out

    def _proposed(
        self,
        worker_id: str,
        task_id: str,
        candidates: tuple[Candidate, ...],
        exhausted: bool,
        message: str,
        out: list[Instruction],
    ) -> None:
        self._release(worker_id, Propose)
        state = self.tasks[task_id]
        state.proposing -= 1
        state.exhausted = state.exhausted or exhausted
        state.message = message or state.message
        state.batches += 1
        if state.best_secs is not None:  # of the batches before this one
            state.best_after_batch.append(state.reference_secs)
        fresh = tuple(c for c in candidates if state.opened(c))
        self._unbuilt.extend(fresh)
        if fresh:
            out.append(StoreProposed(fresh))

    def _builds_ended(
        self,
        worker_id: str,
        results: tuple[tuple[Candidate, Build | Failure], ...],
        out: list[Instruction],
    ) -> None:
        self._release(worker_id, BuildThem)
        builds = tuple(r for _, r in results if isinstance(r, Build))
        failures = tuple((c, r) for c, r in results if isinstance(r, Failure))
        if builds:
            out.append(StoreBuilt(builds))
        # Defaults first: the gain of their tasks is a guess until they are measured.
        for build in builds:
            if build.candidate.origin is Origin.DEFAULT:
                self._built.appendleft(build)
            else:
                self._built.append(build)
        if failures:
            self._store_results(failures, out)

    def _store_results(
        self,
        results: Sequence[tuple[Candidate, Measurement | Failure]],
        out: list[Instruction],
    ) -> None:
        stored: list[tuple[Candidate, Measurement | Failure]] = []
        for candidate, result in results:
            if isinstance(result, Failure) and not result.kind.ends_trial:
                attempts = self._attempts.get(candidate.candidate_id, 0) + 1
                self._attempts[candidate.candidate_id] = attempts
                if attempts < MAX_ATTEMPTS:
                    self._unbuilt.append(candidate)
                    stored.append((candidate, result))
                    continue
                message = f"lost {attempts} times, the last: {result.message}"
                result = Failure(result.stage, Kind.CRASH, message)
            self.tasks[candidate.task_id].end(candidate, result)
            stored.append((candidate, result))
        out.append(StoreEnded(tuple(stored)))

    def _lose(self, worker_id: str, message: str, out: list[Instruction]) -> None:
        worker = self.workers.pop(worker_id)
        match worker.work:
            case Propose(task=task):
                self._lose_proposal(self.tasks[task.task_id], message)
            case BuildThem(candidates=candidates):
                self._requeue(candidates, Stage.BUILD, message, out)
            case Measure(builds=builds):
                self._requeue([b.candidate for b in builds], Stage.RUN, message, out)

    def _lose_proposal(self, state: TaskState, message: str) -> None:
        state.proposing -= 1
        state.lost_proposals += 1
        if state.lost_proposals >= MAX_ATTEMPTS:
            state.exhausted = True
            state.message = f"{MAX_ATTEMPTS} tuners were lost in its search, the last: {message}"

    def _requeue(
        self, candidates: Sequence[Candidate], stage: Stage, message: str, out: list[Instruction]
    ) -> None:
        lost = Failure(stage, Kind.COLLATERAL, f"its worker was lost: {message}")
        self._store_results([(c, lost) for c in candidates], out)

    # --- decisions -----------------------------------------------------------------------------

    def _dispatch(self, out: list[Instruction]) -> None:
        if self.finished:
            return
        cut_short = self._cut_short()
        if cut_short:
            self._unbuilt.clear()
        for worker in self.workers.values():
            if worker.role == "slice" and self._is_free(worker) and self._built:
                self._measure(worker, out)
        satisfied = self._satisfied()
        for worker in self.workers.values():
            if worker.role != "tuner" or not self._is_free(worker):
                continue
            if self._unbuilt and len(self._built) < self._build_ahead():
                self._build(worker, out)
            elif not (cut_short or satisfied) and self._wants_proposals():
                self._propose(worker, out)
        reason = cut_short or satisfied or self._exhausted()
        idle = all(w.work is None for w in self.workers.values())
        if reason and idle and not self._built and not self._unbuilt:
            self.finished = reason
            out.append(Finish(reason))

    def _cut_short(self) -> str:
        """Say why nothing new is built: what is built is measured, the rest is left."""
        budget = self._limits.budget_secs
        if not self._stop and budget is not None and self._elapsed_secs >= budget:
            self._stop = f"the budget of {budget:g} s is spent"
        return self._stop

    def _satisfied(self) -> str:
        """Say why nothing new is proposed: what is proposed is built and measured."""
        if self._enough_trials():
            return f"{self.ended_trials} trials were measured"
        limits = self._limits
        if limits == Limits() and self._little_gain():
            return "no task promises more than 0.05% of the model's time for its next batch"
        return ""

    def _exhausted(self) -> str:
        if all(s.exhausted for s in self.tasks.values()):
            return "every task's search space is exhausted"
        if all(s.exhausted or self._is_full(s) for s in self.tasks.values()):
            return f"no task may have more than {self._limits.trials_per_task} trials"
        return ""

    def _is_full(self, state: TaskState) -> bool:
        most = self._limits.trials_per_task
        return most is not None and state.committed >= most

    def _enough_trials(self) -> bool:
        return self._limits.trials is not None and self._committed() >= self._limits.trials

    def _wants_proposals(self) -> bool:
        return len(self._unbuilt) < BATCH * self._count("tuner")

    def _committed(self) -> int:
        """Return the search trials that have ended or will."""
        return sum(s.committed for s in self.tasks.values())

    def _little_gain(self) -> bool:
        total = self.weighted_best_secs()
        if total is None or any(s.batches < 2 and not s.exhausted for s in self.tasks.values()):
            return False
        gains = [s.gain_secs() for s in self.tasks.values() if not s.exhausted]
        return max(gains, default=0.0) < _SMALL_GAIN * total

    def _measure(self, worker: _Worker, out: list[Instruction]) -> None:
        share = math.ceil(len(self._built) / self._count("slice"))
        count = self._chunk([b.candidate for b in self._built], min(MEASURE_CHUNK, share))
        builds = tuple(self._built.popleft() for _ in range(count))
        neighbours = self.busy("slice")
        worker.work = Measure(worker.worker_id, builds, neighbours)
        out.append(worker.work)

    def _build(self, worker: _Worker, out: list[Instruction]) -> None:
        # A tuner prefers what it proposed itself: it still has the module.
        mine = [c for c in self._unbuilt if c.task_id in worker.islands] or list(self._unbuilt)
        share = math.ceil(len(self._unbuilt) / self._count("tuner"))
        chosen = mine[: self._chunk(mine, min(BUILD_CHUNK, share))]
        for candidate in chosen:
            self._unbuilt.remove(candidate)
        worker.work = BuildThem(worker.worker_id, tuple(chosen))
        out.append(worker.work)

    def _chunk(self, queue: Sequence[Candidate], most: int) -> int:
        """Return how many of a queue's first go together.

        Whatever was lost with a worker goes alone, so that it can take no other down again.
        """
        for count, candidate in enumerate(queue[:most]):
            if candidate.candidate_id in self._attempts:
                return max(1, count)
        return min(most, len(queue))

    def _propose(self, worker: _Worker, out: list[Instruction]) -> None:
        count = BATCH
        if self._limits.trials is not None:
            proposing = BATCH * sum(s.proposing for s in self.tasks.values())
            count = min(count, self._limits.trials - self._committed() - proposing)
        state = self._most_to_gain(worker)
        if count < 1 or state is None:
            return
        count = min(count, self._room(state))
        task_id = state.task.task_id
        told_already = worker.islands.get(task_id, 0)
        told = tuple(state.told[told_already:])
        worker.islands[task_id] = len(state.told)
        state.proposing += 1
        worker.work = Propose(worker.worker_id, state.task, count, told, tuple(sorted(state.open)))
        out.append(worker.work)

    def _most_to_gain(self, worker: _Worker) -> TaskState | None:
        def score(state: TaskState) -> float:
            under_way = state.proposing + math.ceil(len(state.open) / BATCH)
            at_home = 1.0 if task_is_here(state) else 0.3  # a new island must be told it all
            return at_home * state.gain_secs() / (1 + under_way) ** 2

        def task_is_here(state: TaskState) -> bool:
            return state.task.task_id in worker.islands

        # One batch of a task after the other, until it has been seen to have candidates at all.
        ready = [
            s
            for s in self.tasks.values()
            if not s.exhausted and (s.batches or not s.proposing) and self._room(s) > 0
        ]
        return max(ready, key=score, default=None)

    def _room(self, state: TaskState) -> int:
        """Return how many more trials of a task may be proposed now."""
        most = self._limits.trials_per_task
        return BATCH if most is None else most - state.committed - BATCH * state.proposing

    def _build_ahead(self) -> int:
        return max(4, 4 * self._count("slice"))

    def _is_free(self, worker: _Worker) -> bool:
        if worker.work is not None:
            return False
        return worker.lane is None or not any(
            w.work is not None and w.lane == worker.lane for w in self.workers.values()
        )

    def _release(self, worker_id: str, expected: type) -> None:
        worker = self.workers[worker_id]
        if not isinstance(worker.work, expected):
            raise ValueError(f"{worker_id} ended {expected.__name__}, but works on {worker.work}")
        worker.work = None

    def _count(self, role: str) -> int:
        return max(1, sum(w.role == role for w in self.workers.values()))

    def _work(self, task_id: str) -> float:
        task = self.tasks[task_id].task
        return task.weight * max(task.flops, 1.0)
