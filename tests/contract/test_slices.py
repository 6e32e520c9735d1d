"""The contract of slices, kept by every member that is usable here."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.lib.build_fixtures import (
    built,
    task_of,
)
from tests.lib.slice_fixtures import (  # noqa: F401  fixtures
    builds_for,
    kind,
    measured,
    pct_of,
    spec,
    target_of,
)
from tunerd.builder.build import build_candidate
from tunerd.errors import HostError
from tunerd.slices import member, plan
from tunerd.slices.base import Slice
from tunerd.slices.cpu import CpuSlice
from tunerd.system import host
from tunerd.testing import SliceContract
from tunerd.testing.slices import QUICK
from tunerd.vocabulary import (
    Build,
    Measurement,
    SliceRequest,
    SliceSpec,
)

# --- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "simulated", "mps", "whole"])
def test_a_kind_says_whether_it_is_usable_here_and_why(name: str) -> None:
    usable = member(name).usability()
    assert usable.why
    if not usable.ok:
        planned = plan(SliceRequest(name, 40 if name == "mps" else 100))
        assert planned.slices == ()
        assert planned.problem


class TestSlices(SliceContract):
    @pytest.fixture
    def member(self, kind: str) -> type[Slice]:
        return member(kind)

    @pytest.fixture
    def pct(self, kind: str) -> int:
        return pct_of(kind)


# --- cpu ---------------------------------------------------------------------------------------


def affinities(pid: int) -> list[frozenset[int]]:
    """Return the cores of each thread of a process."""
    threads = [int(folder.name) for folder in Path(f"/proc/{pid}/task").iterdir()]
    return [frozenset(os.sched_getaffinity(thread)) for thread in threads]


@pytest.mark.skipif(host.facts().usable_cores < 2, reason="two slices need two cores")
def test_two_cpu_slices_keep_to_their_own_cores() -> None:
    specs = plan(SliceRequest("cpu", 50)).slices
    with CpuSlice(specs[0]) as first, CpuSlice(specs[1]) as second:
        pids = [first.prove().runner_pid, second.prove().runner_pid]
        wide = [wide_kernel(spec) for spec in specs]
        results: list[Any] = []
        at_once = [
            threading.Thread(target=lambda s=s, w=w: results.extend(s.launch().measure([w], QUICK)))
            for s, w in zip((first, second), wide, strict=True)
        ]
        for thread in at_once:
            thread.start()
        for thread in at_once:
            thread.join()
        assert all(isinstance(r, Measurement) for r in results)
        for spec, pid in zip(specs, pids, strict=True):
            assert all(cores <= frozenset(spec.cores) for cores in affinities(pid))


def test_a_slice_of_all_cores_has_a_thread_on_each() -> None:
    (spec,) = plan(SliceRequest("cpu", 100)).slices
    with CpuSlice(spec) as made:
        pid = made.prove().runner_pid
        (result,) = made.launch().measure([wide_kernel(spec)], QUICK)
        assert isinstance(result, Measurement)
        own = [cores for cores in affinities(pid) if len(cores) == 1]
        assert frozenset().union(*own, *affinities(pid)) == frozenset(spec.cores)


def wide_kernel(spec: SliceSpec) -> Build:
    """Build a kernel that uses every thread of its runtime."""
    from tvm import te

    from tests.lib.build_fixtures import candidate_of, new_schedule

    data = te.placeholder((4096, 64), name="data")
    twice = te.compute((4096, 64), lambda i, j: data[i, j] * 2.0, name="twice")
    task = task_of([data, twice], target_of(spec))
    schedule = new_schedule(task)
    schedule.parallel(schedule.get_loops(schedule.get_sblock("twice"))[0])
    return built(build_candidate(task, candidate_of(task, schedule)))


def test_a_share_below_one_core_says_what_is_enough() -> None:
    planned = CpuSlice.plan(SliceRequest("cpu", 1)) if host.facts().usable_cores < 100 else None
    if planned is None:
        pytest.skip("1% of this machine is a core")
    assert planned.slices == ()
    assert f"give at least {pct_of('cpu')}%" in planned.problem


def test_cores_that_are_not_there_are_refused() -> None:
    spec = dataclasses.replace(plan(SliceRequest("cpu", 100)).slices[0], cores=(0, 4095))
    with CpuSlice(spec) as made, pytest.raises(HostError, match=r"asked for the cores \[0, 4095\]"):
        made.prove()
