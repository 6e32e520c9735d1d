"""What to do next: events in, instructions out. No I/O, no clock, no Ray.

The session turns what happened into events and hands them to `handle`; it carries out the
instructions that come back and reports their ends as events again. The coordinator holds each
trial's state, decides which task deserves the next batch over all tasks, and keeps builders ahead
of slices.

    event                         instructions it may cause, besides new work, Hurry and Finish
    WorkerLost                    StoreEnded
    Proposed                      StoreProposed, StoreBuilt
    BuildsEnded                   StoreBuilt, StoreEnded
    MeasurementsEnded             StoreEnded
    BaselineChecked                   StoreBaselineCheck

Workers of one lane share cores: at most one of them works at a time. A trial that was lost with its
slice is measured again alone on its device (`isolation`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

from tunerd.candidates.base import BATCH
from tunerd.coordinator.baseline_checks import BaselineChecks
from tunerd.coordinator.budget import Budget, Limits
from tunerd.coordinator.build_queue import BuildQueue
from tunerd.coordinator.events import (
    BaselineChecked,
    BuildsEnded,
    BuildThem,
    CheckBaseline,
    Event,
    Finish,
    Hurry,
    Instruction,
    Measure,
    MeasurementsEnded,
    Propose,
    Proposed,
    StopRequested,
    StoreBaselineCheck,
    StoreBuilt,
    StoreEnded,
    StoreProposed,
    Tick,
    Work,
    WorkerJoined,
    WorkerLost,
)
from tunerd.coordinator.isolation import Isolation
from tunerd.coordinator.results import MAX_RESULTS
from tunerd.coordinator.source_state import SourceState
from tunerd.coordinator.task_scheduler import TaskScheduler
from tunerd.coordinator.task_state import TaskState
from tunerd.coordinator.training_rows import TrainingRows
from tunerd.coordinator.worker_pool import Worker, WorkerPool
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Stage,
    Task,
)

BUILD_CHUNK = 4
MEASURE_CHUNK = 4
_MAX_RESULTS_IN_ALL = 65_536  # kept to be told, unless that leaves a task fewer than
_MIN_RESULTS = 8
_NOT_REACHED = "not reached before the search ended"


class Coordinator:
    """The state machine of one run. What `handle` returns is its only way out."""

    def __init__(
        self,
        tasks: Sequence[Task],
        limits: Limits,
        *,
        sources: Sequence[str] = (METASCHEDULE,),
        known: Callable[[Candidate], Build | None] = lambda _: None,
    ) -> None:
        """Begin with nothing proposed.

        Args:
            sources: that the trials of a task are split between, by their gains.
            known: returns a candidate's build of an earlier search for the same target.
        """
        searched = max(1, len(tasks) * len(sources))
        kept = min(MAX_RESULTS, max(_MIN_RESULTS, _MAX_RESULTS_IN_ALL // searched))
        most = limits.trials_per_task
        self.tasks = {t.task_id: TaskState.by(t, sources, most, kept=kept) for t in tasks}
        self.finished = ""
        self._proposing = 0
        self._scheduler = TaskScheduler(self.tasks)
        self._pool = WorkerPool()
        self._budget = Budget(limits, self._scheduler)
        self._has_hurried = False
        self._unbuilt = BuildQueue()
        self._built: deque[Build] = deque()
        self._known = known
        self._isolation = Isolation(self._pool)
        self._checks = BaselineChecks()
        self._training_rows = {name: TrainingRows() for name in sources}

    # --- what an earlier session of the run knows ----------------------------------------------

    def restore(
        self,
        ended: Sequence[tuple[Candidate, Measurement | Failure]],
        unfinished: Sequence[Candidate],
        lost: Collection[str] = (),
    ) -> None:
        """Take over an earlier session's trials: what ended counts, what did not is built again.

        Where this session allows fewer trials than that one, what did not end stays as it is.
        Lost ones, by their candidates' ids, are measured alone on their device.
        """
        for candidate, result in ended:
            self._open(candidate)
            self._end(candidate, result)
        for state in self.tasks.values():
            state.restored()
            self._scheduler.changed(state)
        for candidate in unfinished:
            is_default = candidate.is_default
            state = self.tasks[candidate.task_id]
            if is_default or not (self._budget.has_enough_trials or state.is_full):
                self._open(candidate)
                self._unbuilt.add([candidate])
                if candidate.candidate_id in lost:
                    self._isolation.add(candidate.candidate_id)

    def start(self, defaults: Sequence[Candidate]) -> list[Instruction]:
        """Propose the default schedules that have not been measured yet, heaviest tasks first."""
        fresh = [c for c in defaults if self._open(c)]
        fresh.sort(key=lambda c: -self._work(c.task_id))
        if not fresh:
            return []
        out: list[Instruction] = [StoreProposed(tuple(fresh))]
        self._unbuilt.add_first(self._not_known(fresh, out))
        return out

    # --- figures for the progress display ------------------------------------------------------

    @property
    def workers(self) -> dict[str, Worker]:
        return self._pool.workers

    def busy(self, role: str) -> int:
        return self._pool.busy(role)

    @property
    def ended_trials(self) -> int:
        """Of the search, defaults left out."""
        return self._budget.ended

    @property
    def failed_trials(self) -> int:
        return self._budget.failed

    @property
    def is_cut_short(self) -> bool:
        """Say whether something was left to search: its time is up, or somebody stopped it."""
        return self._budget.is_cut_short

    def weighted_best_secs(self) -> float | None:
        """Return the model's time by its kernels, or None while a default is not measured yet."""
        return self._scheduler.weighted_best_secs()

    def unsearched(self) -> dict[str, str]:
        """Say of tasks without trials, by their ids, why they have none."""
        return {
            task_id: f"no candidates: {state.message}" if state.exhausted else _NOT_REACHED
            for task_id, state in self.tasks.items()
            if not state.ended
        }

    # --- events --------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what to do about it, in order."""
        out: list[Instruction] = []
        match event:
            case WorkerJoined(worker_id, role, lane, device, faults_alone):
                self._pool.join(Worker(worker_id, role, lane, device or worker_id, faults_alone))
            case WorkerLost(worker_id, message):
                self._lose(worker_id, message, out)
            case Proposed():
                self._proposed(event, out)
            case BuildsEnded():
                self._builds_ended(event, out)
            case MeasurementsEnded():
                self._measurements_ended(event, out)
            case BaselineChecked():
                self._baseline_checked(event, out)
            case Tick(elapsed_secs):
                self._budget.elapsed_secs = elapsed_secs
                if self._checks.scan(elapsed_secs, self.tasks.values()):
                    for worker in self._pool.all_free("slice"):
                        self._check(worker, out)
            case StopRequested(reason):
                self._budget.stop(reason)
        self._assign(out)
        return out

    def _proposed(self, event: Proposed, out: list[Instruction]) -> None:
        asked = self._release(event.worker_id, Propose)
        assert isinstance(asked, Propose)
        state = self.tasks[event.task_id]
        source = state.sources[asked.source]
        source.exhausted = source.exhausted or event.exhausted
        source.message = event.message or source.message
        self._count_proposing(state, source, -1)
        state.proposed(source, asked.count)
        fresh = tuple(c for c in event.candidates if self._open(c))
        self._training_rows[source.name].opened(fresh, event)
        if fresh:
            out.append(StoreProposed(fresh))
        self._unbuilt.add(self._not_known(fresh, out), event.worker_id)

    def _builds_ended(self, event: BuildsEnded, out: list[Instruction]) -> None:
        self._release(event.worker_id, BuildThem)
        if event.worker_id == self._checks.builder:
            self._checks.built(event.results[0][1])
            return
        builds = tuple(r for _, r in event.results if isinstance(r, Build))
        failures = tuple((c, r) for c, r in event.results if isinstance(r, Failure))
        self._take_builds(builds, out)
        if failures:
            self._store_results(failures, out)

    def _not_known(
        self, candidates: Sequence[Candidate], out: list[Instruction]
    ) -> list[Candidate]:
        """Take the builds of candidates that are known, and return the others."""
        found = [(c, self._known(c)) for c in candidates]
        self._take_builds(tuple(b for _, b in found if b is not None), out)
        return [c for c, b in found if b is None]

    def _take_builds(self, builds: tuple[Build, ...], out: list[Instruction]) -> None:
        if builds:
            out.append(StoreBuilt(builds))
        ready = [build for build in builds if not self._isolation.take(build)]
        # Defaults first: the gain of their tasks is a guess until they are measured.
        defaults = [b for b in ready if b.candidate.is_default]
        self._built.extendleft(reversed(defaults))
        self._built.extend(b for b in ready if not b.candidate.is_default)

    def _measurements_ended(self, event: MeasurementsEnded, out: list[Instruction]) -> None:
        work = self._release(event.worker_id, Measure)
        assert isinstance(work, Measure)
        for build, (candidate, result) in zip(work.builds, event.results, strict=True):
            self._checks.offer(build, result, self.tasks[candidate.task_id].task.weight)
        self._store_results(event.results, out)
        self._check(self.workers[event.worker_id], out, patience=2.0 if self._built else 1.0)

    def _baseline_checked(self, event: BaselineChecked, out: list[Instruction]) -> None:
        work = self._release(event.worker_id, CheckBaseline)
        assert isinstance(work, CheckBaseline)
        self._checks.ended(event, self._budget.elapsed_secs)
        if isinstance(event.result, Measurement):
            task_id = work.build.candidate.task_id
            out.append(StoreBaselineCheck(task_id, event.result, event.busy_secs))

    def _check(self, worker: Worker, out: list[Instruction], *, patience: float = 1.0) -> None:
        """Run the baseline in a slice that is free, if it is due and the search goes on."""
        build = self._checks.build
        if (
            build is None
            or self.finished
            or not self._pool.is_free(worker)
            or not self._checks.is_due(
                worker.worker_id, self._budget.elapsed_secs, patience=patience
            )
            or self._budget.cut_short()
            or self._budget.satisfied()
        ):
            return
        neighbours = self._pool.busy_on(worker.device)
        self._begin(worker, CheckBaseline(worker.worker_id, build, neighbours), out)

    def _store_results(
        self,
        results: Sequence[tuple[Candidate, Measurement | Failure]],
        out: list[Instruction],
    ) -> None:
        stored: list[tuple[Candidate, Measurement | Failure]] = []
        for candidate, result in results:
            if isinstance(result, Failure) and not result.kind.ends_trial:
                ended = self._isolation.lose(candidate.candidate_id, result)
                if ended is None:
                    self._unbuilt.add([candidate])
                    stored.append((candidate, result))
                    continue
                result = ended
            self._end(candidate, result)
            stored.append((candidate, result))
        out.append(StoreEnded(tuple(stored)))

    def _lose(self, worker_id: str, message: str, out: list[Instruction]) -> None:
        worker = self.workers[worker_id]
        work = worker.work
        self._pool.leave(worker)
        self._unbuilt.disown(worker_id)
        match work:
            case Propose(task=task, source=source):
                state = self.tasks[task.task_id]
                self._count_proposing(state, state.sources[source], -1)
                state.sources[source].lose_proposal(message)
            case BuildThem() if worker_id == self._checks.builder:
                self._checks.built(None)
            case BuildThem(candidates=candidates):
                self._requeue(candidates, Stage.BUILD, message, out)
            case Measure(builds=builds):
                self._requeue([b.candidate for b in builds], Stage.RUN, message, out)

    def _requeue(
        self, candidates: Sequence[Candidate], stage: Stage, message: str, out: list[Instruction]
    ) -> None:
        lost = Failure(stage, Kind.COLLATERAL, f"its worker was lost: {message}")
        self._store_results([(c, lost) for c in candidates], out)

    # --- every change of a task passes here, so that sums need not be taken over all tasks -----

    def _open(self, candidate: Candidate) -> bool:
        """Mark a trial as under way; False where it is or was already."""
        state = self.tasks[candidate.task_id]
        is_fresh = state.opened(candidate)
        if is_fresh and not candidate.is_default:
            self._budget.open()
        self._scheduler.changed(state)
        return is_fresh

    def _end(self, candidate: Candidate, result: Measurement | Failure) -> None:
        state = self.tasks[candidate.task_id]
        state.end(candidate, result)
        self._isolation.clear(candidate.candidate_id)
        if rows := self._training_rows.get(candidate.source):
            rows.ended(candidate, result)
        self._scheduler.changed(state)
        if not candidate.is_default:
            self._budget.end(result)

    def _count_proposing(self, state: TaskState, source: SourceState, change: int) -> None:
        source.proposing += change
        self._proposing += change
        self._scheduler.changed(state)

    # --- decisions -----------------------------------------------------------------------------

    def _assign(self, out: list[Instruction]) -> None:
        if self.finished:
            return
        cut_short = self._budget.cut_short()
        if cut_short:
            self._unbuilt.clear()
            self._hurry(cut_short, out)
        while chosen := self._isolation.next():
            lone, build = chosen
            self._measure(lone, (build,), out, is_alone=True)
        while self._built and (worker := self._pool.free("slice")):
            self._measure(worker, self._next_built(), out)
        satisfied = self._budget.satisfied()
        while worker := self._pool.free("tuner"):
            if (baseline := self._checks.wanted) and self._unbuilt and not self._checks.builder:
                self._checks.builder = worker.worker_id
                self._begin(worker, BuildThem(worker.worker_id, (baseline,)), out)
            elif self._unbuilt and len(self._built) < self._build_ahead():
                self._build(worker, out)
            elif cut_short or satisfied or not self._propose(worker, out):
                break  # what keeps one tuner from proposing keeps them all
        if self._pool.is_idle and not (self._built or self._isolation or self._unbuilt):
            self.finished = cut_short or satisfied or self._budget.exhausted()
            if self.finished:
                out.append(Finish(self.finished))

    def _hurry(self, reason: str, out: list[Instruction]) -> None:
        """Wait no longer than a little for tuners: what they make is left, and one may hang."""
        if not self._has_hurried and self._pool.busy("tuner"):
            out.append(Hurry(reason))
        self._has_hurried = True

    def _next_built(self) -> tuple[Build, ...]:
        share = math.ceil(len(self._built) / self._count("slice"))
        waiting = (b.candidate for b in self._built)
        count = self._isolation.together(waiting, min(MEASURE_CHUNK, share))
        return tuple(self._built.popleft() for _ in range(count))

    def _measure(
        self,
        worker: Worker,
        builds: tuple[Build, ...],
        out: list[Instruction],
        *,
        is_alone: bool = False,
    ) -> None:
        bests = tuple(self.tasks[b.candidate.task_id].known_secs for b in builds)
        neighbours = self._pool.busy_on(worker.device)
        self._begin(worker, Measure(worker.worker_id, builds, neighbours, bests, is_alone), out)

    def _build(self, worker: Worker, out: list[Instruction]) -> None:
        share = math.ceil(len(self._unbuilt) / self._count("tuner"))
        waiting = self._unbuilt.queue_for(worker.worker_id)
        count = self._isolation.together(waiting, min(BUILD_CHUNK, share))
        chosen = self._unbuilt.take(worker.worker_id, count)
        self._begin(worker, BuildThem(worker.worker_id, chosen), out)

    def _propose(self, worker: Worker, out: list[Instruction]) -> bool:
        """Have a tuner propose; False where nothing more is wanted, of no tuner."""
        if len(self._unbuilt) >= BATCH * self._count("tuner"):
            return False
        count = self._budget.room(self._proposing)
        state = self._scheduler.most_to_gain(worker.islands) if count > 0 else None
        source = None if state is None else state.next_source()
        if state is None or source is None:
            return False
        count = min(count, source.next_count, state.room(BATCH))
        island = worker.islands.setdefault(state.task.task_id, {})
        results = source.results.since(island.get(source.name, 0))
        island[source.name] = source.results.count
        of_source = self._training_rows[source.name]
        rows = of_source.since(worker.training_rows.get(source.name, 0))
        worker.training_rows[source.name] = of_source.count
        self._count_proposing(state, source, 1)
        under_way = tuple(sorted(source.open))
        work = Propose(worker.worker_id, state.task, count, results, under_way, rows, source.name)
        self._begin(worker, work, out)
        return True

    def _begin(self, worker: Worker, work: Work, out: list[Instruction]) -> None:
        self._pool.begin(worker, work)
        out.append(work)

    def _build_ahead(self) -> int:
        return max(4, 4 * self._count("slice"))

    def _release(self, worker_id: str, expected: type[Work]) -> Work:
        worker = self.workers[worker_id]
        work = worker.work
        if not isinstance(work, expected):
            raise ValueError(f"{worker_id} ended {expected.__name__}, but works on {work}")
        self._pool.end(worker)
        return work

    def _count(self, role: str) -> int:
        return max(1, self._pool.count(role))

    def _work(self, task_id: str) -> float:
        task = self.tasks[task_id].task
        return task.weight * max(task.flops, 1.0)
