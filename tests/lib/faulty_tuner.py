"""Importing this makes tuners build kernels that fault for the candidates of their search.

The environment's FAULTY_ONE_IN says for which, by their hashes; without it nothing is changed.
Default schedules stay as they are. scripts/lab/faults/fault_after_fault.py has it
imported in each process of a run.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.lib.build_fixtures import FAULTS, doubling, faulty_compiler, suicide
from tunerd.cluster.tuner import Tuner
from tunerd.vocabulary import Build, Candidate, Failure, TargetSpec, Task

ONE_IN = "FAULTY_ONE_IN"
KIND = "FAULTY_KIND"

build_as_it_is, warm_up_as_it_is = Tuner._build, Tuner.warm_up


def is_faulty(candidate: Candidate, one_in: int) -> bool:
    return not candidate.is_default and int(candidate.candidate_id[:8], 16) % one_in == 0


@functools.cache
def faulty(target: TargetSpec) -> Build:
    """Build a kernel with the fault that FAULTY_KIND names, on cores one that ends its process."""
    if not target.is_cuda:
        return suicide(target, signal.SIGSEGV)
    with faulty_compiler(FAULTS[os.environ[KIND]]):
        return doubling(target, "fault")


def warm_up(self: Tuner, tasks: Sequence[Task], *more: Any, **options: Any) -> float:
    for task in tasks[:1]:
        faulty(task.target)  # while nothing else is built, which the faulty compiler would meet
    return warm_up_as_it_is(self, tasks, *more, **options)


def build_faulty(self: Tuner, candidate: Candidate) -> Build | Failure:
    if not is_faulty(candidate, int(os.environ[ONE_IN])):
        return build_as_it_is(self, candidate)
    return replace(faulty(self._tasks[candidate.task_id].target), candidate=candidate)


if ONE_IN in os.environ:
    Tuner._build = build_faulty  # type: ignore[method-assign]
    Tuner.warm_up = warm_up  # type: ignore[method-assign]
