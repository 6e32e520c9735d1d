"""A world for the coordinator: hand-made tasks, and workers that answer what they were told to."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from tunerd.coordinator.coordinator import Coordinator
from tunerd.coordinator.events import (
    BaselineChecked,
    BuildsEnded,
    BuildThem,
    CheckBaseline,
    Event,
    Finish,
    Instruction,
    Measure,
    MeasurementsEnded,
    Propose,
    Proposed,
    StoreEnded,
    StoreProposed,
    WorkerJoined,
    WorkerLost,
)
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Stage,
    TargetSpec,
    Task,
    candidate_id,
    default_candidate,
)


def task(name: str, *, weight: int = 1, flops: float = 1e9) -> Task:
    return Task(
        task_id=hashlib.sha256(name.encode()).hexdigest()[:12],
        name=name,
        weight=weight,
        flops=flops,
        args=(),
        weight_args=(),
        target=TargetSpec("llvm", "{}"),
        mod_json="",
    )


CONV = task("conv", weight=4)
DENSE = task("dense", weight=1, flops=1e8)


def candidate(of: Task, number: int) -> Candidate:
    trace = str(number)
    return Candidate(of.task_id, candidate_id(of.task_id, trace), METASCHEDULE, trace)


def candidates(of: Task, numbers: Iterable[int]) -> tuple[Candidate, ...]:
    return tuple(candidate(of, n) for n in numbers)


def build(of: Candidate) -> Build:
    return Build(of, b"", "", 0.1, (), (), "llvm")


def measured(secs: float) -> Measurement:
    return Measurement((secs,), 1, "search-v1", "slice", 1)


def failed(stage: Stage = Stage.RUN, kind: Kind = Kind.CRASH, message: str = "it fell") -> Failure:
    return Failure(stage, kind, message)


COLLATERAL = failed(kind=Kind.COLLATERAL, message="a fault in a neighbour")


_T = TypeVar("_T")


def of_type(kind: type[_T], instructions: list[Instruction]) -> list[_T]:
    return [i for i in instructions if isinstance(i, kind)]


def started(coordinator: Coordinator, *, tuners: int = 1, slices: int = 1) -> list[Instruction]:
    """Let workers join a run whose defaults took 1 ms each; return what they are told."""
    defaults = [default_candidate(s.task) for s in coordinator.tasks.values()]
    coordinator.restore([(c, measured(1e-3)) for c in defaults], [])
    coordinator.start(defaults)
    out: list[Instruction] = []
    for i in range(slices):
        out += coordinator.handle(WorkerJoined(f"slice-{i}", "slice"))
    for i in range(tuners):
        out += coordinator.handle(WorkerJoined(f"tuner-{i}", "tuner"))
    return out


def measuring(
    coordinator: Coordinator, of: Task, count: int = 3, *, is_exhausted: bool = True
) -> Measure:
    """Propose, build and begin to measure candidates of a task; `is_exhausted`: its last."""
    fresh = candidates(of, range(count))
    coordinator.handle(Proposed("tuner-0", of.task_id, fresh, is_exhausted))
    out = coordinator.handle(BuildsEnded("tuner-0", tuple((c, build(c)) for c in fresh)))
    (work,) = of_type(Measure, out)
    return work


@dataclass
class World:
    """Carries out instructions at random, loses workers, and keeps what a store would keep."""

    coordinator: Coordinator
    rng: random.Random
    space: int = 60  # candidates of each task; less than what a run may ask for
    fault_rate: float = 0.0
    log: list[Instruction] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    proposed: list[Candidate] = field(default_factory=list)
    built: Counter[str] = field(default_factory=Counter)
    working: dict[str, Instruction] = field(default_factory=dict)
    cursor: Counter[str] = field(default_factory=Counter)  # by task
    taught: dict[str, set[str]] = field(default_factory=dict)  # examples by tuner
    finished: str = ""

    def take(self, instructions: list[Instruction]) -> None:
        self.log += instructions
        for instruction in instructions:
            match instruction:
                case StoreProposed(found):
                    self.proposed += found
                case StoreEnded(results):
                    for candidate, result in results:
                        if not isinstance(result, Failure) or result.kind.ends_trial:
                            self.ends[candidate.candidate_id] += 1
                case Propose() | BuildThem() | Measure() | CheckBaseline():
                    assert instruction.worker_id not in self.working, "it has work already"
                    self.working[instruction.worker_id] = instruction
                    if isinstance(instruction, Propose):
                        self._check_examples(instruction)
                    self._check_lanes()
                    self._check_devices()
                case Finish(reason):
                    self.finished = reason

    def join(
        self, worker_id: str, role: str, lane: str | None = None, device: str | None = None
    ) -> None:
        self.take(self.coordinator.handle(WorkerJoined(worker_id, role, lane, device)))

    def _check_examples(self, work: Propose) -> None:
        """They are of trials that have ended, each with its own features, and told once."""
        taught = self.taught.setdefault(work.worker_id, set())
        for example in work.rows:
            assert self.ends[example.candidate_id] == 1
            assert example.features == example.candidate_id.encode()
            assert example.candidate_id not in taught
            taught.add(example.candidate_id)

    def lose(self, worker_id: str) -> None:
        self.taught.pop(worker_id, None)
        self.working.pop(worker_id, None)
        self.take(self.coordinator.handle(WorkerLost(worker_id, "it was killed")))

    def step(self) -> None:
        """End the work of one worker, whichever."""
        worker_id = self.rng.choice(sorted(self.working))
        self.take(self.coordinator.handle(self._end_of(self.working.pop(worker_id))))

    def run(self, most: int = 100_000) -> None:
        for _ in range(most):
            if self.finished or not self.working:
                return
            self.step()
        raise AssertionError("the run does not end")

    def _end_of(self, work: Instruction) -> Event:
        match work:
            case Propose(worker_id, of, count, told, exclude):
                # Some of what is proposed is known already, as with several islands.
                first = max(0, self.cursor[of.task_id] - self.rng.randint(0, 3))
                last = min(self.space, first + self.rng.randint(0, count))
                self.cursor[of.task_id] = max(last, self.cursor[of.task_id])
                found = candidates(of, range(first, last))
                known = {t.candidate.candidate_id for t in told} | set(exclude)
                fresh = tuple(c for c in found if c.candidate_id not in known)
                features = tuple(c.candidate_id.encode() for c in fresh)
                return Proposed(worker_id, of.task_id, fresh, last == self.space, "", features)
            case BuildThem(worker_id, todo):
                self.built.update(c.candidate_id for c in todo)
                return BuildsEnded(worker_id, tuple((c, self._built(c)) for c in todo))
            case Measure(worker_id, builds):
                ended = tuple((b.candidate, self._measured(b.candidate)) for b in builds)
                return MeasurementsEnded(worker_id, ended)
            case CheckBaseline(worker_id, of, _):
                return BaselineChecked(worker_id, self._measured(of.candidate), 0.01)
        raise AssertionError(work)

    def _built(self, of: Candidate) -> Build | Failure:
        if self.rng.random() < self.fault_rate:
            return failed(Stage.BUILD, Kind.COMPILE)
        return build(of)

    def _measured(self, of: Candidate) -> Measurement | Failure:
        if self.rng.random() < self.fault_rate:
            return self.rng.choice([failed(), COLLATERAL, failed(kind=Kind.TIMEOUT)])
        return measured(self.rng.uniform(1e-4, 2e-3))

    def _check_devices(self) -> None:
        workers = self.coordinator.workers
        by_device: dict[str, list[Instruction]] = {}
        for worker_id, work in self.working.items():
            if workers[worker_id].role == "slice":
                by_device.setdefault(workers[worker_id].device, []).append(work)
        for works in by_device.values():
            alone = [w for w in works if isinstance(w, Measure) and w.is_alone]
            assert not alone or len(works) == 1, "it is not alone on its device"

    def _check_lanes(self) -> None:
        workers = self.coordinator.workers
        lanes = Counter(workers[w].lane for w in self.working if workers[w].lane is not None)
        assert not lanes or max(lanes.values()) == 1, "two workers of a lane at once"
