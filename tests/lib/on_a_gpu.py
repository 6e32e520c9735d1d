"""Kernels on this machine's GPU, in processes of their own: nothing of a test stays on it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tests.lib.build_fixtures import built
from tunerd.builder.build import build_candidate
from tunerd.vocabulary import Candidate, Task, default_candidate

_BUILDERS = 8  # threads: to compile takes most of the time, and releases the interpreter
_P = ParamSpec("_P")
_T = TypeVar("_T")


def in_own_process(work: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
    """Return what a function of a module returns in a new process, or raise what it raises."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *given, **named).result()


def disagreements(cases: Sequence[tuple[Task, Sequence[Candidate]]]) -> list[str]:
    """Say how candidates differ from the default of their task on this process's GPU."""
    from tunerd.runner.agreement import disagreement
    from tunerd.runner.cuda_device import CudaDevice

    device, found = CudaDevice(), []
    with ThreadPoolExecutor(_BUILDERS) as pool:
        building = [
            (task, c, pool.submit(build_candidate, task, c))
            for task, candidates in cases
            for c in (default_candidate(task), *candidates)
        ]
        for task, candidate, future in building:
            build = built(future.result())
            if candidate.is_default:
                reference = build
            elif failure := disagreement(device, reference, build):
                found.append(f"{task.name}, {candidate.recipe}: {failure.message}")
    return found
