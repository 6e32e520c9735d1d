"""What runs in Ray's processes, a tuner or a slice each, and how their calls end. No Ray here."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tunerd.errors import TunerdError
from tunerd.runner.work import Ran, Work
from tunerd.slices.base import Slice
from tunerd.system import clock
from tunerd.system.without_torch import keep_torch_from_tvm
from tunerd.vocabulary import (
    Arrays,
    Build,
    Candidate,
    CapProof,
    Conditions,
    Failure,
    Measurement,
    Profile,
    SliceSpec,
    TargetSpec,
    Task,
    TransferredResults,
)

_NICENESS = 10  # of tuners


@dataclass(frozen=True)
class Answer:
    """The end of one call: `value` or `error`, and when it started and ended (host clock)."""

    worker_id: str
    method: str  # "warm_up", "start", "propose", "build", "measure"; of a node "place", "survey"
    value: Any
    error: str
    started_at: float
    ended_at: float
    busy_secs: float | None = None  # in the worker; None where it was lost, or getting ready
    cpu_secs: float | None = None
    problem: TunerdError | None = None  # the error itself, where it was one for people

    @classmethod
    def of(
        cls,
        asked: tuple[str, str, float],
        value: Any,
        error: str,
        problem: TunerdError | None = None,
    ) -> Answer:
        """Return what ended just now of a call: worker, method, and when it was asked."""
        worker_id, method, started_at = asked
        ended_at = clock.now()
        if isinstance(value, Timed):
            busy_secs, cpu_secs = value.busy_secs, value.cpu_secs
            return cls(
                worker_id, method, value.value, error, started_at, ended_at, busy_secs, cpu_secs
            )
        return cls(worker_id, method, value, error, started_at, ended_at, problem=problem)


@dataclass(frozen=True)
class Timed:
    """What a worker's method returned, and how long it took there."""

    value: Any
    busy_secs: float
    cpu_secs: float | None  # of this process; None where another one does the work


def _timed(work: Callable[[], Any], *, in_process: bool) -> Timed:
    started, cpu_started = time.perf_counter(), time.process_time()
    value = work()
    busy_secs = time.perf_counter() - started
    return Timed(value, busy_secs, time.process_time() - cpu_started if in_process else None)


class TunerActor:
    """A Tuner behind Ray."""

    def __init__(
        self, seed: int, threads: int, number: int, cores: tuple[int, ...], scratch: str | None
    ) -> None:
        keep_torch_from_tvm()
        from tunerd.cluster.tuner import Tuner

        _use_scratch(scratch)
        if not cores:  # runners and the driver share its cores, and must not wait for one
            os.nice(_NICENESS)
        self._tuner = Tuner(seed=seed, threads=threads, island_number=number, cores=cores)

    def prepare(self, target: TargetSpec) -> None:
        self._tuner.prepare(target)

    def warm_up(
        self, tasks: tuple[Task, ...], transferred: tuple[TransferredResults, ...], sms: int | None
    ) -> float:
        return self._tuner.warm_up(tasks, transferred, sms)

    def propose(self, task_id: str, count: int, results: Any, exclude: Any, rows: Any) -> Timed:
        return _timed(
            lambda: self._tuner.propose(task_id, count, results, exclude, rows), in_process=True
        )

    def build(self, candidates: tuple[Candidate, ...]) -> Timed:
        return _timed(lambda: self._tuner.build(candidates), in_process=True)


class SliceActor:
    """A Slice behind Ray. Makes no CUDA context: its runner does."""

    def __init__(self, scratch: str | None) -> None:
        keep_torch_from_tvm()
        _use_scratch(scratch)
        self._started: Slice | None = None

    @property
    def _slice(self) -> Slice:
        if self._started is None:
            raise RuntimeError("the slice was not started")
        return self._started

    def start(self, spec: SliceSpec) -> CapProof:
        from tunerd.slices import member

        self._started = member(spec.kind)(spec)
        return self._started.start()

    def sees(self, path: str) -> bool:
        return os.path.exists(path)

    def measure(
        self,
        builds: tuple[Build, ...],
        profile: Profile,
        neighbours: int,
        best_secs: tuple[float | None, ...] = (),
        is_alone: bool = False,
    ) -> Timed:
        def measured() -> list[Measurement | Failure]:
            with self._told(is_alone) as one:
                results = one.measure(builds, profile, best_secs)
            return [r.beside(neighbours) if isinstance(r, Measurement) else r for r in results]

        return _timed(measured, in_process=False)  # the slice's runner does it

    def compare(
        self, builds: tuple[Build, ...], profile: Profile, is_alone: bool = False
    ) -> list[Measurement | Failure]:
        with self._told(is_alone) as one:
            return one.compare(builds, profile)

    def agree(self, reference: Build, build: Build, is_alone: bool = False) -> Failure | None:
        with self._told(is_alone) as one:
            return one.agree(reference, build)

    @contextlib.contextmanager
    def _told(self, is_alone: bool) -> Iterator[Slice]:
        """Yield the slice, told whether it works alone; of what is asked next nobody says so."""
        self._slice.is_alone = is_alone
        try:
            yield self._slice
        finally:
            self._slice.is_alone = False

    def run_model(self, artifact: str, inputs: Arrays) -> Arrays:
        return self._slice.run_model(artifact, inputs)

    def compare_models(
        self, artifacts: tuple[str, ...], profile: Profile
    ) -> list[Measurement | Failure]:
        return self._slice.compare_models(artifacts, profile)

    def ready(self, work: Work) -> float | Failure:
        return self._slice.ready(work)

    def begin(self, start_at: float, stop_at: float | None) -> None:
        self._slice.begin(start_at, stop_at)

    def end(self) -> Ran | Failure:
        return self._slice.end()

    def conditions(self) -> Conditions:
        return self._slice.conditions(idle=True)

    def close(self) -> None:
        if self._started is not None:
            self._started.close()


def _use_scratch(folder: str | None) -> None:
    """Have this process and its children put temporary files where they end with the cluster."""
    if folder is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
