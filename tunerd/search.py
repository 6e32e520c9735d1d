"""Task -> Candidates: ask/tell over MetaSchedule's evolutionary search.

An *island* is one search of one task in one process. It keeps TVM's search strategy and the traces
measured so far; all islands of a process share one XGBoost cost model, so that what one task
taught helps the next (Chen et al., arXiv 1805.08166). Several islands of a task may be at work in
different processes: each is told the others' results with its next request. A fresh island that is
told an earlier run's results goes on where that run stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tunerd.vocabulary import Candidate, Origin, Task

if TYPE_CHECKING:
    from tvm.ir import IRModule

log = logging.getLogger(__name__)

# MetaSchedule's defaults (512, 4, 50 and 5) took 130 s on two cores for one batch of a CUDA conv2d;
# these take 13 core-seconds. Of random CUDA schedules 1 to 9% pass the limits of a block, at 15 to
# 36 ms each, so a third of the time goes into INITIAL, the fresh ones of a batch, and a search
# that may fail only five rounds of a small population gives up on the hardest tasks.
POPULATION = 64
GENERATIONS = 4
INITIAL = 8
MAX_FAILED_ROUNDS = 50
BATCH = 16

# Of other islands' results, the best few become parents and some more train the cost model: each
# costs a trace application, 20 to 100 ms.
_REPLAYED_BEST = 12
_REPLAYED_OTHERS = 4
_EMPTY_ROUNDS = 3  # after which a task has nothing more to propose


@dataclass(frozen=True)
class Told:
    """One result, as a search learns it: seconds of a call, or None where the trial failed."""

    candidate: Candidate
    run_secs: float | None


@dataclass(frozen=True)
class Proposal:
    """What an island answers. No candidates and `exhausted`: it has nothing more to propose."""

    candidates: tuple[Candidate, ...]
    exhausted: bool
    message: str
    search_secs: float


@dataclass
class _Island:
    context: Any
    database: Any
    workload: Any
    known: set[str] = field(default_factory=set)  # candidate ids proposed or told
    open: dict[str, Any] = field(default_factory=dict)  # proposed here, result not told yet


def candidate_id(task_id: str, trace_json: str) -> str:
    return hashlib.sha256(f"{task_id}\n{trace_json}".encode()).hexdigest()[:16]


def default_candidate(task: Task) -> Candidate:
    """Return the task's default schedule as a candidate."""
    return Candidate(task.task_id, candidate_id(task.task_id, ""), Origin.DEFAULT)


class Searcher:
    """All islands of one process. Not thread-safe: TVM's search uses `threads` of its own."""

    def __init__(self, *, seed: int, threads: int, island_number: int = 0) -> None:
        self._seed = seed
        self._threads = threads
        self._island_number = island_number
        self._islands: dict[str, _Island] = {}
        self._empty_rounds: dict[str, int] = {}
        self._cost_model: Any = None
        self._random: Any = None  # NumPy's state between proposals

    def propose(
        self,
        task: Task,
        count: int,
        *,
        told: Sequence[Told] = (),
        exclude: Collection[str] = (),
    ) -> Proposal:
        """Learn from `told`, then return at most `count` new candidates of `task`.

        Args:
            told: results of the task that this island has not been told yet.
            exclude: ids of candidates that are under way elsewhere.
        """
        started = time.perf_counter()
        candidates: tuple[Candidate, ...] = ()
        message = "the search found nothing new"
        try:
            with self._own_random():
                island = self._islands.get(task.task_id) or self._open(task)
                self._tell(island, told)
                candidates = self._ask(task, island, count, set(exclude))
        except Exception as error:  # a task without a search space keeps its default
            message = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:500]}"
            log.warning("%s: no candidates: %s", task.name, message)
        empty = 0 if candidates else self._empty_rounds.get(task.task_id, 0) + 1
        self._empty_rounds[task.task_id] = empty
        return Proposal(
            candidates,
            empty >= _EMPTY_ROUNDS or task.task_id not in self._islands,
            "" if candidates else message,
            time.perf_counter() - started,
        )

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Draw from this search's numbers: an XGBModel without data asks NumPy's global ones."""
        import numpy as np

        if self._random is None:
            digest = _digest(self._seed, "", self._island_number)
            self._random = np.random.RandomState(digest).get_state()
        before = np.random.get_state()
        np.random.set_state(self._random)
        try:
            yield
        finally:
            self._random = np.random.get_state()
            np.random.set_state(before)

    def scheduled(self, candidate: Candidate) -> IRModule | None:
        """Return the module of a candidate proposed here and not told yet, else None."""
        island = self._islands.get(candidate.task_id)
        found = island.open.get(candidate.candidate_id) if island else None
        return found.sch.mod if found is not None else None

    def _ask(
        self, task: Task, island: _Island, count: int, exclude: set[str]
    ) -> tuple[Candidate, ...]:
        found = island.context.generate_measure_candidates() or []
        if found:
            # The strategy counts what it was told; tunerd tells results later, in its own order.
            island.context.notify_runner_results(found, [_runner_result(None) for _ in found])
        fresh: list[Candidate] = []
        for measure in found:
            if len(fresh) == count:
                break
            trace_json = json.dumps(
                _plain(measure.sch.trace.as_json()), separators=(",", ":"), sort_keys=True
            )
            candidate = Candidate(
                task.task_id,
                candidate_id(task.task_id, trace_json),
                Origin.SEARCH,
                trace_json,
            )
            if candidate.candidate_id in island.known or candidate.candidate_id in exclude:
                continue
            island.known.add(candidate.candidate_id)
            island.open[candidate.candidate_id] = measure
            fresh.append(candidate)
        return tuple(fresh)

    def _tell(self, island: _Island, told: Sequence[Told]) -> None:
        from tvm.s_tir.meta_schedule.database import TuningRecord

        searched = [t for t in told if t.candidate.origin is Origin.SEARCH]
        foreign = [t for t in searched if t.candidate.candidate_id not in island.open]
        measured = sorted(
            (t for t in foreign if t.run_secs is not None), key=lambda t: t.run_secs or 0.0
        )
        replayed = measured[:_REPLAYED_BEST] + measured[_REPLAYED_BEST:][-_REPLAYED_OTHERS:]
        chosen = {t.candidate.candidate_id for t in replayed}
        measures, results = [], []
        for item in searched:
            candidate = item.candidate
            island.known.add(candidate.candidate_id)
            measure = island.open.pop(candidate.candidate_id, None)
            if measure is None and candidate.candidate_id in chosen:
                measure = _replay(island, candidate)
            if measure is None:
                continue
            measures.append(measure)
            results.append(_runner_result(item.run_secs))
            if item.run_secs is not None:
                record = TuningRecord(
                    measure.sch.trace, island.workload, [item.run_secs], island.context.target
                )
                island.database.commit_tuning_record(record)
        if measures:
            self._cost_model.update(island.context, measures, results)

    def _open(self, task: Task) -> _Island:
        import tvm
        from tvm.s_tir import meta_schedule as ms

        if self._cost_model is None:
            self._cost_model = ms.cost_model.XGBModel(
                num_warmup_samples=BATCH, num_tuning_cores=self._threads
            )
        target = tvm.target.Target(task.target.json)
        mod = tvm.ir.load_json(task.mod_json)
        rand_state = _digest(self._seed, task.task_id, self._island_number)
        rules = "cuda" if task.target.is_cuda else "llvm"
        context = _tune_context(
            mod,
            target,
            space=ms.space_generator.PostOrderApply(
                sch_rules=rules, postprocs=rules, mutator_probs=rules
            ),
            strategy=ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION,
                init_min_unmeasured=INITIAL,
                max_fail_count=MAX_FAILED_ROUNDS,
                genetic_num_iters=GENERATIONS,
            ),
            name=task.name,
            threads=self._threads,
            rand_state=rand_state,
        )
        database = ms.database.MemoryDatabase()
        workload = database.commit_workload(mod)
        island = _Island(context, database, workload)
        context.pre_tuning(1 << 30, BATCH, None, database, self._cost_model)
        self._islands[task.task_id] = island
        return island


def _digest(seed: int, task_id: str, island_number: int) -> int:
    """Return a number that TVM and NumPy take as a seed."""
    digest = hashlib.sha256(f"{seed}/{task_id}/{island_number}".encode())
    return int.from_bytes(digest.digest()[:4], "little") % (2**31 - 2) + 1


def _tune_context(
    mod: Any, target: Any, *, space: Any, strategy: Any, name: str, threads: int, rand_state: int
) -> Any:
    """Make a TuneContext as its own constructor does, without importing every tensor intrinsic.

    That import takes 10 to 20 s in each process, and fp32 schedules use none of them.
    """
    from tvm.s_tir.meta_schedule import TuneContext, _ffi_api
    from tvm.s_tir.meta_schedule.logging import get_logging_func

    context = TuneContext.__new__(TuneContext)
    context.__init_handle_by_constructor__(
        _ffi_api.TuneContext,
        mod,
        target,
        space,
        strategy,
        name,
        threads,
        rand_state,
        get_logging_func(_search_log),
    )
    _ffi_api.TuneContextInitialize(context)
    return context.clone()


_search_log = logging.getLogger("tunerd.search.tvm")
_search_log.setLevel(logging.ERROR)  # TVM tells every generation of every search


def _replay(island: _Island, candidate: Candidate) -> Any:
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(island.context.mod, error_render_level="fast")
    Trace.apply_json_to_schedule(json.loads(candidate.trace_json), schedule)
    return MeasureCandidate(schedule, ArgInfo.from_entry_func(island.context.mod))


def _runner_result(run_secs: float | None) -> Any:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    if run_secs is None:
        return RunnerResult(None, "failed")
    return RunnerResult([run_secs], None)


def _plain(value: Any) -> Any:
    """Return TVM's containers as Python's, so that json can write them."""
    if isinstance(value, bool | int | float | str) or value is None:
        if isinstance(value, bool):
            return bool(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        return str(value) if value is not None else None
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "value") and isinstance(value.value, int | float):
        return value.value
    return [_plain(v) for v in value]
