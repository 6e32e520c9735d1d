"""What runs in Ray's processes, a tuner or a slice each, and how their calls end. No Ray here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunerd.errors import TunerdError
from tunerd.runner.base import UNKNOWN, Company, Runner, TorchModule
from tunerd.runner.load import Load, Repeats
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
class WorkerReply:
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
    ) -> WorkerReply:
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

    def prepare(self, target: TargetSpec, precision: str) -> None:
        self._tuner.prepare(target, precision)

    def warm_up(
        self,
        tasks: tuple[Task, ...],
        transferred: tuple[TransferredResults, ...],
        sms: int | None,
        libraries: tuple[str, ...],
    ) -> float:
        return self._tuner.warm_up(tasks, transferred, sms, libraries)

    def propose(
        self, task_id: str, source: str, count: int, results: Any, exclude: Any, rows: Any
    ) -> Timed:
        return _timed(
            lambda: self._tuner.propose(task_id, source, count, results, exclude, rows),
            in_process=True,
        )

    def build(self, candidates: tuple[Candidate, ...]) -> Timed:
        return _timed(lambda: self._tuner.build(candidates), in_process=True)


class SliceActor:
    """A Slice and its Runner behind Ray. Makes no CUDA context: the runner's process does."""

    def __init__(self, scratch: str | None) -> None:
        keep_torch_from_tvm()
        _use_scratch(scratch)
        self._slice: Slice | None = None
        self._launched: Runner | None = None

    @property
    def _runner(self) -> Runner:
        assert self._launched is not None, "the slice was not started"
        return self._launched

    def start(self, spec: SliceSpec) -> CapProof:
        from tunerd.slices import member

        self._slice = member(spec.kind)(spec)
        self._launched = self._slice.launch()
        return self._slice.prove()

    def sees(self, path: str) -> bool:
        return os.path.exists(path)

    def measure(
        self,
        builds: tuple[Build, ...],
        profile: Profile,
        best_secs: tuple[float | None, ...] = (),
        company: Company = UNKNOWN,
    ) -> Timed:
        return _timed(
            lambda: self._runner.measure(builds, profile, best_secs=best_secs, company=company),
            in_process=False,  # the runner's process does it
        )

    def compare(
        self, builds: tuple[Build, ...], profile: Profile, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        return self._runner.compare(builds, profile, company=company)

    def agree(self, reference: Build, build: Build, company: Company = UNKNOWN) -> Failure | None:
        return self._runner.agree(reference, build, company=company)

    def run_model(self, artifact: str, inputs: Arrays, alone: str = "") -> Arrays:
        return self._runner.run_model(artifact, inputs, alone=alone)

    def compare_models(
        self, artifacts: tuple[str, ...], profile: Profile
    ) -> list[Measurement | Failure]:
        return self._runner.compare_models(artifacts, profile)

    def prepare_pytorch(
        self, way: str, module: TorchModule, anew: bool, limit_secs: float
    ) -> str | Failure:
        return self._runner.prepare_pytorch(way, module, anew=anew, limit_secs=limit_secs)

    def compare_with_pytorch(
        self, artifact: str, ways: tuple[str, ...], profile: Profile
    ) -> list[Measurement | Failure]:
        return self._runner.compare_with_pytorch(artifact, ways, profile)

    def load(self, load: Load) -> float | Failure:
        return self._runner.load(load)

    def repeat(self, start_at: float, stop_at: float | None) -> None:
        self._runner.repeat(start_at, stop_at)

    def stop(self) -> Repeats | Failure:
        return self._runner.stop()

    def conditions(self) -> Conditions:
        assert self._slice is not None, "the slice was not started"
        return self._slice.conditions(idle=True)

    def close(self) -> None:
        if self._slice is not None:
            self._slice.close()


def _use_scratch(folder: str | None) -> None:
    """Have this process and its children put temporary files where they end with the cluster."""
    if folder is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
