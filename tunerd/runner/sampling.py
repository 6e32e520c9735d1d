"""Build -> Measurement: time kernels and models, inside a slice's runner.

A sample is the mean of as many calls in a row as fill the profile's `min_sample_secs`. On a GPU
those calls are CUDA graphs, so that a kernel of a few microseconds is not timed by its launches.
What the last-level cache holds of a kernel's weights is up to the profile: see `profiles`.
Activations stay where they are, as the kernel before would have left them.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tunerd.artifacts.device import use_threads
from tunerd.libraries import calls
from tunerd.runner.arguments import Arguments, timed_inputs
from tunerd.runner.profiles import range_of
from tunerd.system import amx
from tunerd.vocabulary import Build, Failure, Kind, Profile, Stage

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000
DEAD = "; its context is dead"  # ends the message of a failure after which a device answers nothing
_USUAL_CACHE_BYTES = 64 << 20  # of a CPU that does not tell its last-level cache
FIRST_GPU = 0  # the one that a runner works on, as its process numbers them
# One call that takes this long needs no second one to be told from its rivals.
_SLOW_CALL_SECS = 2.0
# What takes so long and so many times as long as a rival needs two samples to be told from it, and
# a default in the search one: a model's default schedules may take a CPU a minute.
_FAR_SECS, _FAR_OVER, _FAR_AFTER = 0.02, 10.0, 2
_FIRST_CALLS = 2  # of what is made ready, about


class Timed(Protocol):
    """Something that can be sampled: one kernel or one model, ready to run."""

    calls: int

    def sample(self) -> float:
        """Return the mean seconds of a call over `calls` calls in a row."""


class Device(ABC):
    """Where kernels are loaded and timed. Owns the buffers that they share."""

    tvm_name: str

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what this process sees of the device, for the proof of the cap."""

    @abstractmethod
    def loaded(self, path: Path) -> Callable[[Sequence[np.ndarray[Any, Any]]], list[Any]]:
        """Load a library. What it returns runs it once and returns its arguments as it left them.

        The arrays that it is given stay as they are.
        """

    @abstractmethod
    def prepare(self, build: Build, path: Path, profile: Profile) -> Timed:
        """Load a library and run it once."""

    @abstractmethod
    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a copy of an array on the device."""

    def is_alive(self) -> bool:
        """Say whether the device still answers, once what was begun on it has ended.

        After some errors a CUDA context does not: all further work returns the same error, and the
        process must be started again (CUDA driver API, CUresult).
        """
        import tvm

        try:
            tvm.device(self.tvm_name).sync()
        except Exception as error:
            log.warning("the device answers nothing any more: %s", error)
            return False
        return True


Samples = tuple[int, list[float]]  # calls per sample, mean seconds of a call in each sample


def measure(
    device: Device, build: Build, profile: Profile, *, rival_secs: float = math.inf
) -> Samples | Failure:
    """Return the samples of one build, or why there are none; few where a rival is far faster."""
    with tempfile.TemporaryDirectory(prefix="tunerd-load-") as folder:
        timed = _prepared(device, build, Path(folder), profile)
        if isinstance(timed, Failure):
            return timed
        slow_secs = _FAR_SECS if build.candidate.is_default else _SLOW_CALL_SECS
        return _sampled(device, timed, profile, rival_secs, slow_secs)


def compare(
    device: Device, builds: Sequence[Build], *, profile: Profile, goes_on: Callable[[], None]
) -> list[Samples | Failure]:
    """Return calls per sample and samples of each build, taken in turns.

    In turns, because clocks and neighbours change over seconds: what disturbs one disturbs all.

    Args:
        goes_on: is called after each build that was loaded and after each sample.
    """
    with tempfile.TemporaryDirectory(prefix="tunerd-load-") as folder:
        ready = []
        for i, build in enumerate(builds):
            ready.append(_prepared(device, build, _subfolder(folder, i), profile))
            goes_on()
        return interleaved(device, ready, profile=profile, goes_on=goes_on)


def interleaved(
    device: Device,
    ready: Sequence[Timed | Failure],
    *,
    profile: Profile,
    goes_on: Callable[[], None],
) -> list[Samples | Failure]:
    """Sample everything that is ready in turns, until the profile's samples or time are spent.

    Args:
        goes_on: is called after each sample.
    """
    results: list[Samples | Failure] = [
        entry if isinstance(entry, Failure) else (entry.calls, []) for entry in ready
    ]
    budget_secs = profile.max_total_secs * max(1, len(ready))
    started = time.perf_counter()
    for taken in range(profile.max_samples):
        if taken >= profile.min_samples and time.perf_counter() - started > budget_secs:
            break
        for i, entry in enumerate(ready):
            result = results[i]
            if isinstance(entry, Failure) or isinstance(result, Failure):
                continue
            rivals = [r[1] for r in results if not isinstance(r, Failure)]
            slowest = [max(r) for r in rivals if len(r) >= profile.hopeless_after]
            if _is_hopeless(result[1], min(slowest, default=math.inf), profile):
                continue
            if _is_far(result[1], [r for r in rivals if len(r) >= _FAR_AFTER]):
                continue
            try:
                result[1].append(entry.sample())
            except Exception as error:
                results[i] = failure_on(device, Stage.RUN, error)
            goes_on()
    return results


def expected_secs(call_secs: Sequence[float], profile: Profile) -> float:
    """Return about how long `compare` takes of builds, less loading them, by what a call takes.

    >>> expected_secs([0.5, 0.01], Profile("any", min_samples=10, max_samples=10))
    2.12
    """
    far_secs = max(_FAR_SECS, _FAR_OVER * min(call_secs))
    samples = [max(secs, profile.min_sample_secs) for secs in call_secs]
    once = _FIRST_CALLS * sum(call_secs) + _FAR_AFTER * sum(s for s in samples if s > far_secs)
    turn = sum(s for s in samples if s <= far_secs)
    most = math.floor(profile.max_total_secs * len(call_secs) / turn)
    return once + turn * max(profile.min_samples, min(profile.max_samples, most))


def _is_hopeless(samples: Sequence[float], rival_secs: float, profile: Profile) -> bool:
    """Whether more samples cannot matter: all are so much slower than a rival."""
    slowest = profile.hopeless_over * rival_secs
    return len(samples) >= profile.hopeless_after and min(samples) > slowest


def _is_far(samples: Sequence[float], rivals: Sequence[Sequence[float]]) -> bool:
    """Whether more samples take long, and cannot matter."""
    slowest = min(map(max, rivals), default=math.inf)
    return len(samples) >= _FAR_AFTER and min(samples) > max(_FAR_SECS, _FAR_OVER * slowest)


def failure(stage: Stage, error: BaseException) -> Failure:
    """Say what kind of failure an exception of TVM or CUDA is, as far as its text tells."""
    message = f"{type(error).__name__}: {error}".strip()
    lowered = message.lower()
    if "out of memory" in lowered or "out_of_memory" in lowered or isinstance(error, MemoryError):
        kind = Kind.OUT_OF_MEMORY
    else:
        kind = Kind.CRASH
    return Failure(stage, kind, message[-MAX_MESSAGE_CHARS:])


def failure_on(device: Device, stage: Stage, error: BaseException) -> Failure:
    """Say what kind of failure an exception is that came up just now on a device."""
    return as_left(device, failure(stage, error))


def as_left(device: Device, failed: Failure) -> Failure:
    """Return a failure by how it left its device: a crash is what left one that does not answer."""
    if not device.is_alive():
        message = f"{failed.message}{DEAD}"[-MAX_MESSAGE_CHARS:]
        return Failure(failed.stage, Kind.CRASH, message)
    return replace(failed, kind=Kind.REFUSED) if failed.kind is Kind.CRASH else failed


def calls_per_sample(call_secs: float, profile: Profile, limit: int) -> int:
    """Return how many calls in a row fill one sample, at least one."""
    return max(1, min(limit, math.ceil(profile.min_sample_secs / max(call_secs, 1e-7))))


def _subfolder(folder: str, index: int) -> Path:
    path = Path(folder, str(index))
    path.mkdir()
    return path


def _prepared(device: Device, build: Build, folder: Path, profile: Profile) -> Timed | Failure:
    path = folder / "kernel.so"
    path.write_bytes(build.library)
    try:
        calls.provide(build.calls, FIRST_GPU)
        return device.prepare(build, path, profile)
    except Exception as error:
        return failure_on(device, Stage.LOAD, error)


def _sampled(
    device: Device, timed: Timed, profile: Profile, rival_secs: float, slow_secs: float
) -> Samples | Failure:
    samples: list[float] = []
    started = time.perf_counter()
    try:
        while len(samples) < profile.max_samples:
            samples.append(timed.sample())
            spent = time.perf_counter() - started
            enough = len(samples) >= profile.min_samples and spent > profile.max_total_secs
            slow = samples[-1] > slow_secs or _is_hopeless(samples, rival_secs, profile)
            if enough or slow:
                break
    except Exception as error:
        return failure_on(device, Stage.RUN, error)
    return timed.calls, samples


# --- kernels -----------------------------------------------------------------------------------


class _Loop:
    """Calls in a row, timed by the host's clock."""

    def __init__(
        self, call: Callable[[int], None], profile: Profile, *, before: Callable[[], None]
    ) -> None:
        """Time calls, so many in a row; what comes before each sample is not timed."""
        self._call, self._before, self.calls = call, before, 1
        once = self.sample()
        if once < _FAR_SECS:  # else what the first call pays for cold caches is nothing to it
            once = self.sample()
        if once < profile.min_sample_secs:
            once = self.sample()
        self.calls = calls_per_sample(once, profile, 100_000)

    def sample(self) -> float:
        self._before()
        started = time.perf_counter()
        self._call(self.calls)
        return (time.perf_counter() - started) / self.calls


class CpuDevice(Device):
    """The cores of this process; `cores` are set as its affinity before TVM is imported."""

    tvm_name = "cpu"

    def __init__(self, cores: Sequence[int]) -> None:
        import tvm

        self._tvm = tvm
        self._cores = frozenset(cores)
        self._configure = tvm.get_global_func("runtime.config_threadpool")
        amx.permitted()  # asked for before a kernel needs it
        self._next_copy = 0
        self._arguments = Arguments(tvm.runtime.empty, lambda: None, max_bytes=2 << 30)

    def facts(self) -> dict[str, Any]:
        import os

        from tunerd.system import host

        return {
            "device": host.facts().cpu_model,
            "sm_count": len(os.sched_getaffinity(0)),
            "cores": sorted(os.sched_getaffinity(0)),
        }

    def prepare(self, build: Build, path: Path, profile: Profile) -> Timed:
        kernel = self._tvm.runtime.load_module(str(path))["main"]
        range_bytes = range_of(profile, self._cache_bytes())
        sets = self._arguments.sets(build, range_bytes=range_bytes)

        def call(times: int) -> None:
            # Rivals share the copies: each goes on where the one before has stopped.
            first, self._next_copy = self._next_copy, self._next_copy + times
            for i in range(first, first + times):
                kernel(*sets[i % len(sets)])

        return _Loop(call, profile, before=self._use_threads)

    def loaded(self, path: Path) -> Callable[[Sequence[np.ndarray[Any, Any]]], list[Any]]:
        kernel = self._tvm.runtime.load_module(str(path))["main"]

        def call(arrays: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
            arguments = [self._tvm.runtime.tensor(array) for array in arrays]
            self._use_threads()
            kernel(*arguments)
            return [argument.numpy() for argument in arguments]

        return call

    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        return self._tvm.runtime.tensor(array)

    def _use_threads(self) -> None:
        """Have one thread on each core, also where a model has run on threads of its own."""
        use_threads(self._configure, len(self._cores), self._cores)

    def _cache_bytes(self) -> int:
        from tunerd.system import cores

        return cores.last_level_cache_bytes() or _USUAL_CACHE_BYTES


# --- models ------------------------------------------------------------------------------------


class TimedModel:
    """A loaded artifact on its sample or on seeded random inputs, which lie on the device."""

    def __init__(self, model: Any, profile: Profile) -> None:
        inputs = timed_inputs(model)
        self._model, self._inputs = model, inputs
        # The second call replays what the first one captured.
        _, once = (model.timed_calls(inputs, 1) for _ in range(2))
        if once < _FAR_SECS:
            once = model.timed_calls(inputs, 3) / 3
        self.calls = calls_per_sample(once, profile, 1000)

    def sample(self) -> float:
        secs: float = self._model.timed_calls(self._inputs, self.calls)
        return secs / self.calls
