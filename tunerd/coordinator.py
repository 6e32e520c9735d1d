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

from tunerd.search import BATCH, Told
from tunerd.vocabulary import Build, Candidate, Failure, Kind, Measurement, Origin, Stage, Task

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerJoined:
    worker_id: str
    role: str  # "tuner" or "slice"
    lane: str | None = None


@dataclass(frozen=True)
class WorkerLost:
    worker_id: str
    message: str


@dataclass(frozen=True)
class Proposed:
    worker_id: str
    task_id: str
    candidates: tuple[Candidate, ...]
    exhausted: bool
    message: str = ""


@dataclass(frozen=True)
class BuildsEnded:
    worker_id: str
    results: tuple[tuple[Candidate, Build | Failure], ...]


@dataclass(frozen=True)
class MeasurementsEnded:
    worker_id: str
    results: tuple[tuple[Candidate, Measurement | Failure], ...]


@dataclass(frozen=True)
class Tick:
    elapsed_secs: float


@dataclass(frozen=True)
class StopRequested:
    reason: str


Event = (
    WorkerJoined | WorkerLost | Proposed | BuildsEnded | MeasurementsEnded | Tick | StopRequested
)

# --- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Propose:
    worker_id: str
    task: Task
    count: int
    told: tuple[Told, ...]
    exclude: tuple[str, ...]


@dataclass(frozen=True)
class BuildThem:
    worker_id: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Measure:
    worker_id: str
    builds: tuple[Build, ...]
    neighbours: int  # other slices at work


@dataclass(frozen=True)
class StoreProposed:
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class StoreBuilt:
    builds: tuple[Build, ...]


@dataclass(frozen=True)
class StoreEnded:
    results: tuple[tuple[Candidate, Measurement | Failure], ...]


@dataclass(frozen=True)
class Finish:
    reason: str


Instruction = Propose | BuildThem | Measure | StoreProposed | StoreBuilt | StoreEnded | Finish

# --- state -------------------------------------------------------------------------------------

MAX_ATTEMPTS = 3  # how often a trial is run again after others' faults
BUILD_CHUNK = 4
MEASURE_CHUNK = 4
_OPTIMISM = 0.2  # alpha of MetaSchedule's gradient-based task scheduler
_WINDOW = 3  # batches that the recent gain is taken over, as there
_SMALL_GAIN = 5e-4  # of the weighted latency a batch: stop when no task promises more


@dataclass
class _Worker:
    worker_id: str
    role: str
    lane: str | None
    work: Propose | BuildThem | Measure | None = None
    islands: dict[str, int] = field(default_factory=dict)  # task_id -> results told so far


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
    told: list[Told] = field(default_factory=list)
    proposing: int = 0
    batches: int = 0
    best_after_batch: list[float] = field(default_factory=list)
    exhausted: bool = False
    message: str = ""

    @property
    def reference_secs(self) -> float:
        """The time that counts for the task now: the best so far, the default, or a guess."""
        known = [s for s in (self.best_secs, self.default_secs) if s is not None]
        return min(known, default=max(self.task.flops / 1e12, 1e-6))

    def opened(self, candidate: Candidate) -> bool:
        """Mark a trial as under way; False where it is or was already."""
        if candidate.origin is Origin.DEFAULT:
            known = self.default_open or self.default_failed or self.default_secs is not None
            self.default_open = True
            return not known
        told = any(t.candidate.candidate_id == candidate.candidate_id for t in self.told)
        if told or candidate.candidate_id in self.open:
            return False
        self.open.add(candidate.candidate_id)
        return True

    def gain_secs(self) -> float:
        """Estimate what the next batch saves per inference, as Ansor does (arXiv 2006.06762, §6).

        The mean of what the last batches brought and of an optimistic guess that shrinks with the
        number of batches. What the first batch brought over the default says nothing of the next.
        """
        latency = self.reference_secs
        if not self.batches:
            return self.task.weight * latency
        history = self.best_after_batch[-_WINDOW - 1 :] or [latency]
        recent = (history[0] - history[-1]) / max(1, len(history) - 1)
        guess = latency / (self.batches + 1)
        return self.task.weight * ((1 - _OPTIMISM) * recent + _OPTIMISM * guess)


@dataclass(frozen=True)
class Limits:
    """When to stop: whichever comes first. Neither: when little gain is left."""

    trials: int | None = None
    budget_secs: float | None = None


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
        """Take over an earlier session's trials: what ended counts, what did not is built again."""
        for candidate, result in ended:
            self.tasks[candidate.task_id].opened(candidate)
            self._end(candidate, result)
        for state in self.tasks.values():
            state.batches = state.ended // BATCH
            state.best_after_batch = [state.reference_secs]
        for candidate in unfinished:
            self.tasks[candidate.task_id].opened(candidate)
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
            self._end(candidate, result)
            stored.append((candidate, result))
        out.append(StoreEnded(tuple(stored)))

    def _end(self, candidate: Candidate, result: Measurement | Failure) -> None:
        state = self.tasks[candidate.task_id]
        is_default = candidate.origin is Origin.DEFAULT
        if not (state.default_open if is_default else candidate.candidate_id in state.open):
            raise ValueError(
                f"{candidate.candidate_id} of {state.task.name} ended twice, now with {result}"
            )
        secs = result.median_secs if isinstance(result, Measurement) else None
        if is_default:
            state.default_open = False
            state.default_secs, state.default_failed = secs, secs is None
            return
        state.open.discard(candidate.candidate_id)
        state.ended += 1
        state.failed += secs is None
        state.told.append(Told(candidate, secs))
        if secs is not None and (state.best_secs is None or secs < state.best_secs):
            state.best_secs = secs
        if not state.open:
            state.best_after_batch.append(state.reference_secs)

    def _lose(self, worker_id: str, message: str, out: list[Instruction]) -> None:
        worker = self.workers.pop(worker_id)
        match worker.work:
            case Propose(task=task):
                self.tasks[task.task_id].proposing -= 1
            case BuildThem(candidates=candidates):
                self._requeue(candidates, message, out)
            case Measure(builds=builds):
                self._requeue([b.candidate for b in builds], message, out)

    def _requeue(
        self, candidates: Sequence[Candidate], message: str, out: list[Instruction]
    ) -> None:
        lost = Failure(Stage.RUN, Kind.COLLATERAL, f"its worker was lost: {message}")
        self._store_results([(c, lost) for c in candidates], out)

    # --- decisions -----------------------------------------------------------------------------

    def _dispatch(self, out: list[Instruction]) -> None:
        if self.finished:
            return
        stopping = self._stopping()
        if stopping:
            self._unbuilt = deque() if stopping != _ENOUGH else self._unbuilt
        for worker in self.workers.values():
            if worker.role == "slice" and self._is_free(worker) and self._built:
                self._measure(worker, out)
        for worker in self.workers.values():
            if worker.role != "tuner" or not self._is_free(worker):
                continue
            if self._unbuilt and len(self._built) < self._build_ahead():
                self._build(worker, out)
            elif not stopping and len(self._unbuilt) < BATCH * self._count("tuner"):
                self._propose(worker, out)
        idle = all(w.work is None for w in self.workers.values())
        if idle and not self._built and not self._unbuilt and (self.workers or stopping):
            reason = stopping or "every task's search space is exhausted"
            if stopping == _ENOUGH:
                reason = f"{self.ended_trials} trials were measured"
            self.finished = reason
            out.append(Finish(reason))

    def _stopping(self) -> str:
        if self._stop:
            return self._stop
        limits = self._limits
        if limits.budget_secs is not None and self._elapsed_secs >= limits.budget_secs:
            return f"the budget of {limits.budget_secs:g} s is spent"
        if limits.trials is not None and self._committed() >= limits.trials:
            return _ENOUGH
        if limits.trials is None and limits.budget_secs is None and self._little_gain():
            return "no task promises more than 0.05% of the model's time for its next batch"
        return ""

    def _committed(self) -> int:
        """Return the search trials that have ended or will."""
        return self.ended_trials + sum(len(s.open) for s in self.tasks.values())

    def _little_gain(self) -> bool:
        total = self.weighted_best_secs()
        if total is None or any(s.batches < 2 and not s.exhausted for s in self.tasks.values()):
            return False
        gains = [s.gain_secs() for s in self.tasks.values() if not s.exhausted]
        return max(gains, default=0.0) < _SMALL_GAIN * total

    def _measure(self, worker: _Worker, out: list[Instruction]) -> None:
        share = math.ceil(len(self._built) / self._count("slice"))
        count = min(len(self._built), MEASURE_CHUNK, share)
        builds = tuple(self._built.popleft() for _ in range(count))
        neighbours = self.busy("slice")
        worker.work = Measure(worker.worker_id, builds, neighbours)
        out.append(worker.work)

    def _build(self, worker: _Worker, out: list[Instruction]) -> None:
        # A tuner prefers what it proposed itself: it still has the module.
        mine = [c for c in self._unbuilt if c.task_id in worker.islands]
        share = math.ceil(len(self._unbuilt) / self._count("tuner"))
        count = min(BUILD_CHUNK, max(1, share))
        chosen = (mine or list(self._unbuilt))[:count]
        for candidate in chosen:
            self._unbuilt.remove(candidate)
        worker.work = BuildThem(worker.worker_id, tuple(chosen))
        out.append(worker.work)

    def _propose(self, worker: _Worker, out: list[Instruction]) -> None:
        count = BATCH
        if self._limits.trials is not None:
            proposing = BATCH * sum(s.proposing for s in self.tasks.values())
            count = min(count, self._limits.trials - self._committed() - proposing)
        state = self._most_to_gain(worker)
        if count < 1 or state is None:
            return
        task_id = state.task.task_id
        told_already = worker.islands.get(task_id, 0)
        told = tuple(state.told[told_already:])
        worker.islands[task_id] = len(state.told)
        state.proposing += 1
        worker.work = Propose(worker.worker_id, state.task, count, told, tuple(state.open))
        out.append(worker.work)

    def _most_to_gain(self, worker: _Worker) -> TaskState | None:
        def score(state: TaskState) -> float:
            under_way = state.proposing + math.ceil(len(state.open) / BATCH)
            at_home = 1.0 if task_is_here(state) else 0.7  # a new island starts from nothing
            return at_home * state.gain_secs() / (1 + under_way) ** 2

        def task_is_here(state: TaskState) -> bool:
            return state.task.task_id in worker.islands

        # One batch of a task after the other, until it has been seen to have candidates at all.
        ready = [
            s for s in self.tasks.values() if not s.exhausted and (s.batches or not s.proposing)
        ]
        return max(ready, key=score, default=None)

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


_ENOUGH = "enough trials"
