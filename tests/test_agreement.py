"""Builds that compute the same, and builds that do not, in a slice of this machine's cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from build_fixtures import (
    built,
    candidate_of,
    default_of,
    matmul_task,
    tiled_matmul,
)

from tunerd import host
from tunerd.build import build_candidate
from tunerd.search import Searcher
from tunerd.slices import member
from tunerd.slices.base import Slice
from tunerd.slices.cpu import CpuSlice
from tunerd.vocabulary import Build, Kind, Stage, Task


@pytest.fixture(scope="module")
def cores() -> Iterator[Slice]:
    pct = -(-100 // host.facts().usable_cores)
    spec = CpuSlice.plan(pct).slices[0]
    with member("cpu")(spec) as started:
        started.start()
        yield started


def default_build(task: Task) -> Build:
    return built(build_candidate(task, default_of(task)))


def planted(library_of: Task, instead_of: Task) -> Build:
    """A build of one task with the library of another that takes the same arguments."""
    return replace(
        default_build(library_of), candidate=candidate_of(instead_of, tiled_matmul(instead_of))
    )


def test_two_schedules_of_one_task_agree(cores: Slice) -> None:
    task = matmul_task()
    other = built(build_candidate(task, candidate_of(task, tiled_matmul(task))))
    assert cores.agree(default_build(task), other) is None


def test_a_library_that_computes_something_else_is_a_wrong_answer(cores: Slice) -> None:
    task = matmul_task()
    failure = cores.agree(default_build(task), planted(matmul_task(after="negative"), task))
    assert failure is not None
    assert (failure.stage, failure.kind) == (Stage.VERIFY, Kind.WRONG_ANSWER)
    assert "1536 of 1536 elements" in failure.message


def test_a_library_that_does_not_load_is_a_failure_after_which_the_slice_works_on(
    cores: Slice,
) -> None:
    build = default_build(matmul_task())
    failure = cores.agree(build, replace(build, library=build.library[:100]))
    assert failure is not None
    assert failure.stage is Stage.VERIFY
    assert cores.agree(build, build) is None


def rewritten(task: Task) -> Build:
    """A build that takes its weights in a layout of its own."""
    proposed = Searcher(seed=0, threads=1).propose(task, 8).candidates
    builds = (built(build_candidate(task, c)) for c in proposed)
    return next(b for b in builds if b.args[1].shape != task.args[1].shape)


def test_a_schedule_with_its_own_layout_of_the_weights_agrees(cores: Slice) -> None:
    task = matmul_task(weights=(1,))
    assert cores.agree(default_build(task), rewritten(task)) is None


def test_a_wrong_schedule_is_found_with_its_own_layout_of_the_weights_too(cores: Slice) -> None:
    task, wrong = matmul_task(weights=(1,)), matmul_task(weights=(1,), after="negative")
    failure = cores.agree(default_build(task), rewritten(wrong))
    assert failure is not None
    assert failure.kind is Kind.WRONG_ANSWER
