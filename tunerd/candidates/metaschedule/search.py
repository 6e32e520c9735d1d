"""Task -> Candidates: ask/tell over the sketches that MetaSchedule's rules make of a task.

The search evolves *choices*, rows of numbers (`design`), and a cost model scores them by what they
amount to. Only the best few are applied as traces. MetaSchedule's own search applies each trace
that it looks at, at 15 to 36 ms, and on CUDA 91 to 99% of random ones break a GPU's limits.

An *island* is the search of one task in one process. Several islands of a task may be at work in
different processes: each is told the others' results with its next request. A fresh island that is
told an earlier session's results goes on where that session stopped.

All islands of a process share one cost model, which learns from every result of the run, of any
task and process: with each request come *training rows*, some hundred bytes for each result that is
new. Results, "What one task teaches another", say what that is worth.

*Transferred results* are of other runs, at other shares or of other models. They teach the cost
model apart from this run's results. Where some are of the very task, its best are proposed first,
to be measured here, and fill up the parents of the evolution while few results are known. To read
those of a task takes its sketches, up to 0.1 s of a core: they are read when the task is searched
here, and others one by one, with each proposal. All of them at the start took whole short searches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.candidates.base import LoweredKernel, Search
from tunerd.candidates.cost_model import CostModel
from tunerd.candidates.metaschedule.design import Design, Limits
from tunerd.candidates.metaschedule.drawing import (
    Choice,
    by_chance,
    by_score,
    first_of_each,
    unlike,
)
from tunerd.candidates.metaschedule.gpu_estimate import Columns
from tunerd.candidates.metaschedule.knobs import UNDECIDED, Choices
from tunerd.candidates.metaschedule.space import DesignSpace, design_space
from tunerd.candidates.metaschedule.traces import SOFTWARE_PIPELINE
from tunerd.candidates.transferred import in_turn, most_first
from tunerd.vocabulary import (
    METASCHEDULE,
    Candidate,
    Proposal,
    Result,
    Task,
    TrainingRow,
    TransferredResults,
    candidate_id,
)

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule

log = logging.getLogger(__name__)

POPULATION = 512
GENERATIONS = 3

_PARENTS = 64  # of what was measured
_RANDOM_DRAWS = 8192  # of each sketch; 3 to 5% of a CUDA convolution's keep a GPU's limits
_EXPLORED = 0.1  # of a batch: drawn by chance instead of by score
_EXPLORED_AT_FIRST = 0.2  # while less than _KNOWN results of the task are known
_KNOWN = 32
_MAX_ALIKE = 2  # of a batch that differ in nothing but unrolling, vector widths or locations
_MAX_TRIES = 4  # traces applied for each candidate asked for
_EMPTY_ROUNDS = 3  # after which a task has nothing more to propose


@dataclass
class _Island:
    task: Task
    mod: Any
    design: Design
    limits: Limits
    postprocs: tuple[Any, ...]
    random: np.random.Generator
    known: set[str] = field(default_factory=set)  # candidate ids proposed or told
    tried: set[tuple[int, bytes]] = field(default_factory=set)  # choices applied or told
    measured: list[tuple[float, Choice]] = field(default_factory=list)  # seconds of a call
    open: dict[str, LoweredKernel] = field(default_factory=dict)  # proposed here, not told yet
    borrowed: Sequence[Choice] = ()  # of other runs, the best of each in turn
    first: Sequence[Choice] = ()  # of those, what is proposed before all else
    drawn: int = 0  # choices that kept the limits, the last time
    refusal: str = ""  # why the last choice was refused that could not be applied


class Searcher(Search):
    """All islands of one process. Not thread-safe."""

    def __init__(
        self, *, seed: int, threads: int, island_number: int = 0, sms: int | None = None
    ) -> None:
        """Search for a share of a GPU with so many SMs, where that is known."""
        self._seed = seed
        self._sms = sms
        self._island_number = island_number
        self._islands: dict[str, _Island] = {}
        self._empty_rounds: dict[str, int] = {}
        self._cost_model = CostModel(seed=_digest(seed, "", island_number), threads=threads)
        self._unread: dict[str, list[TransferredResults]] = {}  # by task
        self._tasks: dict[str, Task] = {}  # of this run, by their ids
        self._borrowed: dict[str, list[list[Choice]]] = {}  # by task and run, best first

    def learn(self, transferred: Sequence[TransferredResults], tasks: Mapping[str, Task]) -> None:
        """Take what other runs measured, to be read later; `tasks` are this run's, by their ids."""
        self._tasks |= tasks
        for past in transferred:
            self._unread.setdefault(past.task.task_id, []).append(past)

    def _read(self, task_id: str, space: DesignSpace | None = None) -> None:
        """Read what other runs measured of a task, whose sketches are in `space` if it has one."""
        for past in self._unread.pop(task_id, ()):
            try:
                space = space or design_space(self._tasks.get(task_id, past.task))
                measured = self._learn(past, space.at(past.sms))
            except Exception as error:  # of a store that something else wrote, or another TVM
                log.warning("%s teaches nothing: %s", past.key, error)
                continue
            self._borrowed.setdefault(task_id, []).append(measured)

    def _learn(self, past: TransferredResults, space: DesignSpace) -> list[Choice]:
        """Teach the cost model; return what was measured and keeps this target's limits."""
        of_sketch: dict[int, tuple[list[Choices], list[float | None]]] = {}
        measured: list[Choice] = []
        for recipe, run_secs in past.results:
            translated = space.design.translate(json.loads(recipe))
            if translated is None:
                continue
            sketch, row = translated
            rows, secs = of_sketch.setdefault(sketch.index, ([], []))
            rows.append(row)
            secs.append(run_secs)
            if run_secs is not None and space.allows(sketch, row):
                measured.append(Choice(sketch.index, row))
        for index, (rows, secs) in of_sketch.items():
            features = space.design.sketches[index].features(np.array(rows))
            for i, (own, run_secs) in enumerate(zip(features, secs, strict=True)):
                self._cost_model.tell(past.key, f"{past.key}/{index}/{i}", own, run_secs)
        return measured

    def propose(
        self,
        task: Task,
        count: int,
        *,
        results: Sequence[Result] = (),
        exclude: Collection[str] = (),
        rows: Sequence[TrainingRow] = (),
    ) -> Proposal:
        """Learn from what is told, then return at most `count` new candidates of `task`.

        Args:
            results: of the task that this island has not been told yet.
            exclude: ids of candidates that are under way elsewhere.
            rows: results of any task that this process has not been told yet.
        """
        started = time.perf_counter()
        candidates: tuple[Candidate, ...] = ()
        features: tuple[bytes, ...] = ()
        message = ""
        try:
            for row in rows:
                own = np.frombuffer(row.features, dtype=np.float32)
                self._cost_model.tell(row.task_id, row.candidate_id, own, row.run_secs)
            island = self._islands.get(task.task_id) or self._open(task)
            if self._unread:
                self._read(next(iter(self._unread)))
            self._tell(island, results)
            asked = self._ask(island, count, set(exclude))
            candidates = tuple(candidate for candidate, _ in asked)
            features = tuple(own.astype(np.float32).tobytes() for _, own in asked)
            message = "" if candidates else _why_nothing(island)
        except Exception as error:  # a task without a search space keeps its default
            message = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:500]}"
            log.warning("%s: no candidates: %s", task.name, message)
        empty = 0 if candidates else self._empty_rounds.get(task.task_id, 0) + 1
        self._empty_rounds[task.task_id] = empty
        return Proposal(
            candidates,
            empty >= _EMPTY_ROUNDS or task.task_id not in self._islands,
            message,
            time.perf_counter() - started,
            features,
        )

    def lowered(self, candidate: Candidate) -> LoweredKernel | None:
        """Return the kernel of a candidate proposed here and not told yet, else None."""
        island = self._islands.get(candidate.task_id)
        return island.open.get(candidate.candidate_id) if island else None

    # --- learning ------------------------------------------------------------------------------

    def _tell(self, island: _Island, results: Sequence[Result]) -> None:
        for item in results:
            candidate = item.candidate
            if candidate.is_default:
                continue
            island.known.add(candidate.candidate_id)
            island.open.pop(candidate.candidate_id, None)
            trace = json.loads(candidate.recipe)
            sketch = island.design.find(trace)
            if sketch is None:  # made by other rules: nothing to learn here
                continue
            choice = Choice(sketch.index, sketch.encode(trace))
            island.tried.add(choice.key)
            if item.run_secs is not None:
                island.measured.append((item.run_secs, choice))
            self._cost_model.tell(
                island.task.task_id,
                candidate.candidate_id,
                sketch.features(choice.row[None])[0],
                item.run_secs,
            )
        island.measured.sort(key=lambda m: m[0])

    # --- asking --------------------------------------------------------------------------------

    def _ask(
        self, island: _Island, count: int, exclude: set[str]
    ) -> list[tuple[Candidate, Columns]]:
        """Return new candidates with their features."""
        found: list[tuple[Candidate, Columns]] = []
        tries = _MAX_TRIES * count
        for choice in self._choices(island, count):
            if len(found) == count or tries == 0:
                break
            if choice.key in island.tried:
                continue
            if UNDECIDED not in choice.row:  # else TVM decides differently each time
                island.tried.add(choice.key)
            tries -= 1
            applied = _apply(island, choice)
            if applied is None:
                continue
            recipe, mod = applied
            name = candidate_id(island.task.task_id, recipe)
            if name in island.known or name in exclude:
                continue
            island.known.add(name)
            island.open[name] = LoweredKernel(mod)
            sketch = island.design.sketches[choice.sketch]
            row = sketch.encode(json.loads(recipe))  # with what TVM has decided
            candidate = Candidate(island.task.task_id, name, METASCHEDULE, recipe)
            found.append((candidate, sketch.features(row[None])[0]))
        return found

    def _choices(self, island: _Island, count: int) -> Iterator[Choice]:
        """Yield choices in the order in which they should be tried."""
        yield from island.first
        sampled = self._sample(island)
        island.drawn = sum(len(rows) for rows in sampled)
        chances = by_chance(island.design, sampled, island.random)
        if not self._cost_model.told():
            yield from chances
            return
        known = self._cost_model.told(island.task.task_id) + len(island.borrowed)
        explored = _EXPLORED if known >= _KNOWN else _EXPLORED_AT_FIRST
        evolved = self._evolve(island, sampled)
        best, rest = unlike(island.design, evolved, count, most_alike=_MAX_ALIKE)
        for choice in best:
            while island.random.random() < explored:
                chance = next(chances, None)
                if chance is None:
                    break
                yield chance
            yield choice
        yield from rest
        yield from chances

    def _sample(self, island: _Island) -> list[Choices]:
        """Draw choices that keep the limits, by sketch."""
        sampled = []
        for sketch in island.design.sketches:
            draws = _RANDOM_DRAWS if sketch.tiles_a_gpu else POPULATION
            rows = sketch.sample(draws, island.random)
            rows = rows[sketch.fits(rows, island.limits)]
            distinct = rows[first_of_each(rows)]
            sampled.append(distinct[: POPULATION // len(island.design.sketches)])
        return sampled

    def _evolve(self, island: _Island, sampled: Sequence[Choices]) -> list[Choice]:
        """Return choices by falling score: a few generations of what was measured and drawn."""
        parents = [choice for _, choice in island.measured[:_PARENTS]]
        parents += island.borrowed[: _PARENTS - len(parents)]
        everything: list[tuple[float, Choice]] = []
        for sketch, drawn in zip(island.design.sketches, sampled, strict=True):
            own = [c.row for c in parents if c.sketch == sketch.index]
            rows = np.vstack([drawn, *(row[None] for row in own)]) if own else drawn
            if not len(rows):
                continue
            scores = self._cost_model.predict(sketch.features(rows))
            for _ in range(GENERATIONS):
                picked = by_score(scores, POPULATION, island.random)
                children = sketch.mutate(rows[picked], island.random)
                mates = rows[by_score(scores, POPULATION, island.random)]
                crossed = island.random.random(len(children)) < 0.3
                children[crossed] = sketch.cross(children[crossed], mates[crossed], island.random)
                children = children[sketch.fits(children, island.limits)]
                if not len(children):
                    continue
                children_scores = self._cost_model.predict(sketch.features(children))
                rows = np.vstack([rows, children])
                scores = np.concatenate([scores, children_scores])
                distinct = first_of_each(rows)
                kept = distinct[np.argsort(-scores[distinct], kind="stable")[:POPULATION]]
                rows, scores = rows[kept], scores[kept]
            everything += [
                (float(score), Choice(sketch.index, row))
                for score, row in zip(scores, rows, strict=True)
            ]
        everything.sort(key=lambda e: -e[0])
        return [c for _, c in everything if c.key not in island.tried]

    def _open(self, task: Task) -> _Island:
        rand_state = _digest(self._seed, task.task_id, self._island_number)
        space = design_space(task, sms=self._sms, rand_state=rand_state)
        self._read(task.task_id, space)
        of_runs = self._borrowed.get(task.task_id, [])
        borrowed = in_turn(of_runs, key=lambda choice: choice.key)
        island = _Island(
            task=task,
            mod=space.mod,
            design=space.design,
            limits=space.limits,
            postprocs=space.postprocs,
            random=np.random.default_rng(rand_state),
            borrowed=borrowed,
            first=unlike(space.design, borrowed, most_first(len(of_runs)), most_alike=1)[0],
        )
        self._islands[task.task_id] = island
        return island


def _apply(island: _Island, choice: Choice) -> tuple[str, IRModule] | None:
    """Apply a choice; return its trace's JSON and the module, or None where it breaks a rule."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.postproc import VerifyGPUCode
    from tvm.s_tir.schedule import Trace

    sketch = island.design.sketches[choice.sketch]
    schedule = Schedule(
        island.mod,
        seed=int(island.random.integers(1, 2**31 - 1)),
        error_render_level="fast",
    )
    try:
        Trace.apply_json_to_schedule(sketch.decode(choice.row), schedule)
        schedule.enter_postproc()
        for postproc in island.postprocs:
            # It lowers the module, half of an application's time; Sketch.fits knows the answer.
            if sketch.tiles_a_gpu and isinstance(postproc, VerifyGPUCode):
                continue
            if not postproc.apply(schedule):
                island.refusal = f"TVM's {type(postproc).__name__}"
                return None
        if sketch.copies > 1 and sketch.block is not None:
            _unroll_late_inside(schedule, sketch.block.name)
    except Exception as error:  # TVM's ScheduleError, and what a rule did not think of
        island.refusal = str(error).strip().splitlines()[-1][:200]
        log.debug("%s: a choice cannot be applied: %s", island.task.name, error)
        return None
    trace = schedule.trace.as_json()
    text = json.dumps(trace, separators=(",", ":"), sort_keys=True, default=_number_of)
    return text, schedule.mod


def _number_of(value: Any) -> int | float:
    """Return the number that TVM's IntImm or FloatImm stands for."""
    number: int | float = value.value
    return number


def _why_nothing(island: _Island) -> str:
    if not island.known and not island.drawn:
        return "no choice keeps the device's limits"
    if not island.known and island.refusal:
        return f"no choice can be applied, the last for {island.refusal}"
    return "the search found nothing new"


def _unroll_late_inside(schedule: Schedule, block: str) -> None:
    """Let NVRTC unroll what a software pipeline computes."""
    loops = schedule.get_loops(schedule.get_sblock(f"{block}_update"))
    (pipeline,) = (
        i for i, x in enumerate(loops) if SOFTWARE_PIPELINE in schedule.get(x).annotations
    )
    schedule.annotate(loops[pipeline + 1], "pragma_unroll_explicit", 0)


def _digest(seed: int, task_id: str, island_number: int) -> int:
    """Return a number that TVM, NumPy and XGBoost take as a seed."""
    digest = hashlib.sha256(f"{seed}/{task_id}/{island_number}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % (2**31 - 2) + 1
