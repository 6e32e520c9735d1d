"""What every source of candidates promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import CandidateSource, LoweredKernel, SearchSettings, module_of
from tunerd.system.targets import cuda_target
from tunerd.testing.kernels import built, matmul_task
from tunerd.vocabulary import (
    Arrays,
    Build,
    Candidate,
    Failure,
    Kind,
    Result,
    Stage,
    TargetSpec,
    Task,
    TransferredResults,
    default_candidate,
)

SETTINGS = SearchSettings(seed=5, threads=1)


def proposed(source: CandidateSource, of: Task) -> tuple[Candidate, ...]:
    """Return the first four candidates that a new search proposes."""
    return source.search(SETTINGS).propose(of, 4).candidates


def random_inputs(task: Task) -> Arrays:
    """Return random values of a task's arguments but its output, the same in each call."""
    rng = np.random.default_rng(0)
    return {
        spec.name: rng.standard_normal(spec.shape).astype(spec.dtype) for spec in task.args[:-1]
    }


def for_gpu(task: Task, target: TargetSpec) -> Task:
    """Return a task as a GPU has it."""
    return replace(task, target=target, precision="tf32")


def ran(build: Build, of: Task, folder: Path) -> Any:
    """Run a build for this machine's CPU here; weights go in the layout that it takes."""
    path = folder / "kernel.so"
    path.write_bytes(build.library)
    tvm = load_tvm()
    arrays = list(random_inputs(of).values())
    for argument, layout in build.layouts:
        arrays[argument] = layout.of(arrays[argument])
    output = tvm.runtime.empty(of.args[-1].shape, of.args[-1].dtype)
    inputs = map(tvm.runtime.tensor, arrays)
    tvm.runtime.load_module(str(path))["main"](*inputs, output)
    return output.numpy()


def ran_in_plain_loops(task: Task, folder: Path) -> Any:
    """Run a task without any schedule for this machine's CPU here."""
    plain = LoweredKernel(module_of(task))
    return ran(built(build_candidate(task, default_candidate(task), lowered=plain)), task, folder)


class SourceContract:
    """Derive from it, with a fixture `source`: a member of `registry.SOURCES`.

    One that is only tried out is put there by `monkeypatch.setitem`. Where a source takes no
    product of matrices, on a CPU or on a GPU, a fixture `task` gives it something that it takes.
    """

    @pytest.fixture
    def source(self) -> CandidateSource:
        raise NotImplementedError

    @pytest.fixture
    def task(self, source: CandidateSource) -> Task:
        """Return a product that the source takes: of this machine's CPU, or else of a GPU."""
        load_tvm()
        on_cpu = matmul_task()
        return on_cpu if source.takes(on_cpu) is None else for_gpu(on_cpu, cuda_target("9.0"))

    @pytest.fixture
    def runs_here(self, task: Task) -> bool:
        """Say whether this machine's CPU runs the task."""
        return not task.target.is_cuda

    def test_a_source_is_known_by_its_own_name(self, source: CandidateSource) -> None:
        assert registry.SOURCES[source.name] is source

    def test_a_source_takes_a_task_or_says_why_not(
        self, source: CandidateSource, task: Task
    ) -> None:
        reason = source.takes(task)
        assert reason is None or reason

    def test_a_source_proposes_distinct_candidates_of_its_own(
        self, source: CandidateSource, task: Task
    ) -> None:
        found = proposed(source, task)
        assert found
        assert len({c.candidate_id for c in found}) == len({c.recipe for c in found}) == len(found)
        for candidate in found:
            assert (candidate.task_id, candidate.source) == (task.task_id, source.name)
            recipe = candidate.recipe
            assert candidate == Candidate.of_recipe(task.task_id, recipe, source=source.name)

    def test_equal_seeds_propose_the_same(self, source: CandidateSource, task: Task) -> None:
        assert proposed(source, task) == proposed(source, task)

    def test_candidates_build_and_compute_what_the_default_computes(
        self, source: CandidateSource, task: Task, runs_here: bool, tmp_path: Path
    ) -> None:
        """For another machine or a GPU they are only built."""
        if not runs_here:
            assert [built(build_candidate(task, c)) for c in proposed(source, task)[:2]]
            return
        reference = ran_in_plain_loops(task, tmp_path)
        for number, candidate in enumerate(proposed(source, task)[:2]):
            folder = tmp_path / str(number)
            folder.mkdir()
            output = ran(built(build_candidate(task, candidate)), task, folder)
            np.testing.assert_allclose(output, reference, rtol=1e-4, atol=1e-4)

    def test_a_kernel_at_hand_builds_to_what_its_recipe_builds_to(
        self, source: CandidateSource, task: Task
    ) -> None:
        search = source.search(SETTINGS)
        (candidate,) = search.propose(task, 1).candidates
        at_hand = search.lowered(candidate)
        by_recipe = built(build_candidate(task, candidate))
        again = built(build_candidate(task, candidate, lowered=at_hand))
        assert again.library == by_recipe.library

    def test_a_source_goes_on_after_a_fresh_start_that_is_told_earlier_results(
        self, source: CandidateSource, task: Task
    ) -> None:
        first = proposed(source, task)
        results = [Result(c, 1e-3 / (i + 1)) for i, c in enumerate(first[1:])]
        results.append(Result(first[0], None))
        again = source.search(SETTINGS).propose(task, 4, results=results)
        assert not {c.candidate_id for c in again.candidates} & {c.candidate_id for c in first}
        assert again.candidates or again.exhausted
        assert again.candidates or again.message

    def test_candidates_under_way_elsewhere_are_not_proposed(
        self, source: CandidateSource, task: Task
    ) -> None:
        ids = [c.candidate_id for c in proposed(source, task)]
        again = source.search(SETTINGS).propose(task, 4, exclude=ids)
        assert not {c.candidate_id for c in again.candidates} & set(ids)

    def test_what_other_runs_measured_is_taken_in(
        self, source: CandidateSource, task: Task
    ) -> None:
        recipes = tuple((c.recipe, 1e-3) for c in proposed(source, task))
        search = source.search(SETTINGS)
        odd = TransferredResults(2, task, (("{", 1e-3),), source=source.name)
        past = TransferredResults(1, task, recipes, source=source.name)
        search.learn([past, odd], {task.task_id: task})
        assert search.propose(task, 2).candidates

    @pytest.mark.parametrize("recipe", ["{", "[1]", "of another source", '[["no"],[]]'])
    def test_a_foreign_recipe_is_a_failure_of_the_build(
        self, source: CandidateSource, task: Task, recipe: str
    ) -> None:
        candidate = Candidate.of_recipe(task.task_id, recipe, source=source.name)
        failure = build_candidate(task, candidate)
        assert isinstance(failure, Failure)
        assert (failure.stage, failure.kind) == (Stage.BUILD, Kind.COMPILE)
