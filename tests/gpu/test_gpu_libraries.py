"""cuBLASLt on a real GPU: its calls compute what the defaults do, alone, timed and in a model."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tunerd
from tests.contract.test_libraries import MATCHED, SOURCE, gpu_task, pointwise, tensors
from tests.lib.build_fixtures import built
from tunerd.artifacts.compile import compile_artifact
from tunerd.builder.build import build_candidate
from tunerd.candidates.libraries.recipe import Recipe
from tunerd.libraries import packages
from tunerd.runner.base import Runner
from tunerd.slices import plan
from tunerd.slices.whole import WholeSlice
from tunerd.vocabulary import (
    CUBLASLT,
    FP32,
    SEARCH,
    TF32,
    Build,
    Candidate,
    Measurement,
    SliceRequest,
    TargetSpec,
    Task,
    candidate_id,
    default_candidate,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def whole() -> Iterator[tuple[Runner, TargetSpec, int]]:
    """A runner on the first GPU, the target to compile for, and the GPU's SMs."""
    usable = WholeSlice.usability()
    lacking = packages.missing(CUBLASLT) if usable.ok else usable.why
    if lacking:
        pytest.skip(lacking)
    planned = plan(SliceRequest("whole", 100))
    with WholeSlice(planned.slices[0]) as measured:
        proof = measured.prove()
        yield measured.launch(), planned.target, proof.sm_count


def by_library(task: Task, rank: int, sms: int) -> Candidate:
    recipe = Recipe(rank, sms, "").text
    name = candidate_id(task.task_id, recipe, source=CUBLASLT)
    return Candidate(task.task_id, name, CUBLASLT, recipe)


def builds_of(task: Task, rank: int, sms: int) -> tuple[Build, Build]:
    """Build a task's default, and a call of the library."""
    default = build_candidate(task, default_candidate(task))
    return built(default), built(build_candidate(task, by_library(task, rank, sms)))


@pytest.mark.parametrize("precision", [FP32, TF32])
@pytest.mark.parametrize("name", MATCHED)
def test_a_call_computes_what_the_default_computes(
    whole: tuple[Runner, TargetSpec, int], name: str, precision: str
) -> None:
    runner, target, sms = whole
    task = replace(gpu_task(tensors(name), precision), target=target)
    default, call = builds_of(task, 0, sms)
    assert runner.agree(default, call) is None


def test_every_algorithm_computes_the_same_and_is_timed_in_graphs(
    whole: tuple[Runner, TargetSpec, int],
) -> None:
    runner, target, sms = whole
    for task in products(target):
        ends = []
        for rank in range(6):
            default, call = builds_of(task, rank, sms * 2 // 5)
            (result,) = runner.measure([call], SEARCH)
            ends.append(result)
            if isinstance(result, Measurement):
                assert result.median_secs > 0
                assert runner.agree(default, call) is None, (task.name, rank)
        assert any(isinstance(end, Measurement) for end in ends), ends


def test_a_rank_that_there_is_not_is_refused_and_the_runner_lives(
    whole: tuple[Runner, TargetSpec, int],
) -> None:
    runner, target, sms = whole
    task = replace(gpu_task(tensors("plain")), target=target)
    default, call = builds_of(task, 23, sms)
    (result,) = runner.measure([call], SEARCH)
    if not isinstance(result, Measurement):
        assert "and number 24 is asked for" in result.message
    (result,) = runner.measure([default], SEARCH)
    assert isinstance(result, Measurement)


def products(target: TargetSpec) -> list[Task]:
    """Return the kernels of a model in fp16 that cuBLASLt computes."""
    tasks = [replace(t, target=target) for t in pointwise().tasks]
    return [t for t in tasks if SOURCE.takes(t) is None]


def model_outputs(folder: str, target: TargetSpec, sms: int) -> list[np.ndarray]:
    """Return what a model computes with its defaults, by the library, and that in one graph."""
    found = pointwise()
    winners = {t.task_id: by_library(t, 0, sms) for t in products(target)}
    x = np.random.default_rng(0).standard_normal((1, 3, 14, 14)).astype(np.float32)
    outputs = []
    for name, chosen in (("default", {}), ("tuned", winners)):
        made = compile_artifact(
            found.lowered,
            found.tasks,
            chosen,
            target,
            Path(folder, name),
            model=found.model,
            pct=100,
        )
        model = tunerd.load(made)
        # Runs plainly, captures, and replays what was captured.
        outputs += [model(x)["y"] for _ in range(3)]
    captured = model.captured()
    captured.write({"x": x})
    captured.launch()
    return [*outputs, captured.read()["y"]]


def test_a_model_that_calls_the_library_computes_what_the_default_model_does(
    whole: tuple[Runner, TargetSpec, int], tmp_path: Path
) -> None:
    _, target, sms = whole
    spawning = multiprocessing.get_context("spawn")  # nothing of ours may stay on a GPU
    with ProcessPoolExecutor(1, spawning) as process:
        outputs = process.submit(model_outputs, str(tmp_path), target, sms).result()
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-2, atol=2e-2)
