"""Libraries on a real GPU: calls compute what the defaults do, alone, timed and in a model."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.contract.test_cudnn import MATCHED as CONVOLVED
from tests.contract.test_cudnn import SOURCE as CONVOLUTIONS
from tests.contract.test_cudnn import by_plan, convolution, two_convolutions
from tests.lib.build_fixtures import built
from tests.lib.library_tasks import (
    MATCHED,
    SOURCE,
    default_and_tuned,
    gpu_task,
    pointwise,
    tensors,
)
from tunerd.builder.build import build_candidate
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.libraries.recipe import Recipe
from tunerd.frontend.kernels import Kernels
from tunerd.libraries import packages
from tunerd.libraries.cudnn_graphs import Configuration
from tunerd.runner.base import Runner
from tunerd.slices.base import Plan
from tunerd.slices.whole import WholeSlice
from tunerd.vocabulary import (
    CUBLASLT,
    CUDNN,
    FP16,
    FP32,
    SEARCH,
    TF32,
    Build,
    Candidate,
    Failure,
    Measurement,
    Stage,
    TargetSpec,
    Task,
    default_candidate,
)

pytestmark = pytest.mark.gpu


Whole = tuple[Runner, TargetSpec, int]


@pytest.fixture(scope="module")
def whole(whole_gpu: Plan) -> Iterator[Whole]:
    """A runner on the first GPU, the target to compile for, and the GPU's SMs."""
    with WholeSlice(whole_gpu.slices[0]) as measured:
        proof = measured.prove()
        yield measured.launch(), whole_gpu.target, proof.sm_count


@pytest.fixture
def for_cublaslt() -> None:
    if lacking := packages.missing(CUBLASLT):
        pytest.skip(lacking)


@pytest.fixture
def for_cudnn() -> None:
    if lacking := packages.missing(CUDNN):
        pytest.skip(lacking)


def by_library(task: Task, rank: int, sms: int) -> Candidate:
    recipe = Recipe(rank, sms, "").text
    return Candidate.of_recipe(task.task_id, recipe, source=CUBLASLT)


def builds_of(task: Task, rank: int, sms: int) -> tuple[Build, Build]:
    """Build a task's default, and a call of the library."""
    default = build_candidate(task, default_candidate(task))
    return built(default), built(build_candidate(task, by_library(task, rank, sms)))


@pytest.mark.usefixtures("for_cublaslt")
@pytest.mark.parametrize("precision", [FP32, TF32])
@pytest.mark.parametrize("name", MATCHED)
def test_a_call_computes_what_the_default_computes(whole: Whole, name: str, precision: str) -> None:
    runner, target, sms = whole
    task = replace(gpu_task(tensors(name), precision), target=target)
    default, call = builds_of(task, 0, sms)
    assert runner.agree(default, call) is None


@pytest.mark.usefixtures("for_cublaslt")
def test_every_algorithm_computes_the_same_and_is_timed_in_graphs(
    whole: Whole,
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


@pytest.mark.usefixtures("for_cublaslt")
def test_a_rank_that_there_is_not_is_refused_and_the_runner_lives(
    whole: Whole,
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


def model_outputs(
    folder: str, found: Kernels, winners: Mapping[str, Candidate], target: TargetSpec
) -> list[np.ndarray]:
    """Return what a model computes with its defaults, by a library, and that in one graph."""
    (given,) = found.model.inputs
    x = np.random.default_rng(0).standard_normal(given.shape).astype(np.float32)
    outputs = []
    for model in default_and_tuned(found, winners, folder=Path(folder), target=target, pct=100):
        # Runs plainly, captures, and replays what was captured.
        outputs += [model(x)["y"] for _ in range(3)]
    captured = model.captured()
    captured.write({"x": x})
    captured.launch()
    return [*outputs, captured.read()["y"]]


def outputs_of_products(folder: str, target: TargetSpec, sms: int) -> list[np.ndarray]:
    winners = {t.task_id: by_library(t, 0, sms) for t in products(target)}
    return model_outputs(folder, pointwise(), winners, target)


def outputs_of_convolutions(folder: str, target: TargetSpec, sms: int) -> list[np.ndarray]:
    found = two_convolutions(FP16)
    winners = {}
    for task in found.tasks:
        for candidate in plans(replace(task, target=target), sms, 1):
            winners[task.task_id] = candidate
    assert len(winners) >= 2
    return model_outputs(folder, found, winners, target)


@pytest.mark.parametrize("outputs_by", [outputs_of_products, outputs_of_convolutions])
@pytest.mark.usefixtures("for_cublaslt", "for_cudnn")
def test_a_model_that_calls_a_library_computes_what_the_default_model_does(
    whole: Whole, tmp_path: Path, outputs_by: Callable[[str, TargetSpec, int], list[np.ndarray]]
) -> None:
    _, target, sms = whole
    spawning = multiprocessing.get_context("spawn")  # nothing of ours may stay on a GPU
    with ProcessPoolExecutor(1, spawning) as process:
        outputs = process.submit(outputs_by, str(tmp_path), target, sms).result()
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-2, atol=2e-2)


# --- cuDNN -------------------------------------------------------------------------------------


def plans(task: Task, sms: int, count: int) -> Sequence[Candidate]:
    """Return the first plans that cuDNN names for a task, none for what it does not compute."""
    if CONVOLUTIONS.takes(task) is not None:
        return ()
    answer = CONVOLUTIONS.search(SearchSettings(seed=0, threads=1, sms=sms)).propose(task, count)
    assert answer.candidates or "names no more" in answer.message, answer.message
    return answer.candidates


@pytest.mark.usefixtures("for_cudnn")
@pytest.mark.parametrize("name", CONVOLVED)
def test_plans_of_cudnn_compute_what_the_default_computes(whole: Whole, name: str) -> None:
    """In fp32 and TF32. A plan may be refused where it is made again, and none may differ."""
    runner, target, sms = whole
    computed = 0
    for precision in (FP32, TF32):
        task = replace(convolution(name), target=target, precision=precision)
        default = built(build_candidate(task, default_candidate(task)))
        for candidate in plans(task, sms, 3):
            build = built(build_candidate(task, candidate))
            failed = runner.agree(default, build)
            assert failed is None or failed.stage is not Stage.VERIFY, (candidate.recipe, failed)
            computed += failed is None
    if name == "with ReLU":
        assert computed


@pytest.mark.usefixtures("for_cudnn")
def test_plans_of_cudnn_are_timed_in_graphs(whole: Whole) -> None:
    runner, target, sms = whole
    for task in two_convolutions(FP16).tasks:
        task = replace(task, target=target)
        builds = [built(build_candidate(task, c)) for c in plans(task, sms, 12)]
        if builds:
            ends = runner.measure(builds, SEARCH)
            assert any(isinstance(end, Measurement) for end in ends), ends


@pytest.mark.usefixtures("for_cudnn")
def test_a_plan_that_there_is_not_is_refused_and_the_runner_lives(whole: Whole) -> None:
    runner, target, _ = whole
    task = replace(convolution("with ReLU"), target=target)
    gone = by_plan(task, Configuration(9999, (), 0))
    (result,) = runner.measure([built(build_candidate(task, gone))], SEARCH)
    assert isinstance(result, Failure)
    assert "the plan by engine 9999 with knobs" in result.message
    default = built(build_candidate(task, default_candidate(task)))
    (result,) = runner.measure([default], SEARCH)
    assert isinstance(result, Measurement)
