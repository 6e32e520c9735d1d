"""MetaSchedule on tensor cores: which tasks get such sketches, and that their kernels compile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.lib.artifact_fixtures import CUDA, model_of
from tests.lib.build_fixtures import built
from tests.lib.on_a_gpu import in_own_process
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.manifest import read_manifest
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings, module_of
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.candidates.metaschedule.space import DesignSpace, design_space
from tunerd.candidates.metaschedule.tensor_cores import MARK
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.slices import plan
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Model,
    Proposal,
    Result,
    SliceRequest,
    TargetSpec,
    Task,
    default_candidate,
)

SETTINGS = SearchSettings(seed=5, threads=1)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_with_products()


def model_with_products() -> Model:
    """A stem of 3 channels, a depthwise and a strided convolution with padding, two products."""
    load_tvm()
    rng = np.random.default_rng(0)
    shapes = {
        "stem": (32, 3, 7, 7),
        "depthwise": (32, 1, 3, 3),
        "strided": (64, 32, 3, 3),
        "bias": (64,),
        "product": (64, 200),
        "column": (200, 1),
    }
    nodes = [
        helper.make_node("Conv", ["x", "stem"], ["a"], strides=[2, 2], pads=[3, 3, 3, 3]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "depthwise"], ["c"], pads=[1, 1, 1, 1], group=32),
        helper.make_node("Conv", ["c", "strided", "bias"], ["d"], strides=[2, 2], pads=[1] * 4),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Transpose", ["e"], ["f"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["f", "product"], ["g"]),
        helper.make_node("Sigmoid", ["g"], ["h"]),
        helper.make_node("MatMul", ["h", "column"], ["y"]),
    ]
    weights = {name: rng.normal(size=shape) / 8 for name, shape in shapes.items()}
    return model_of(nodes, weights, inputs={"x": (1, 3, 64, 64)}, outputs={"y": (1, 16, 16, 1)})


def lowered_in(model: Model, precision: str) -> tuple[Lowered, dict[str, Task]]:
    """Lower a model for a GPU; tasks by a name of what they multiply."""
    lowered = lower(replace(model, precision=precision), CUDA)
    tasks = extract_tasks(lowered, CUDA, precision=precision)
    return lowered, {_named(task): task for task in tasks}


def _named(task: Task) -> str:
    shapes = {
        (7, 7, 3, 32): "stem",
        (3, 3, 1, 32): "depthwise",
        (3, 3, 32, 64): "strided",
        (64, 200): "product",
        (200, 1): "column",
    }
    return next((shapes[a.shape] for a in task.args if a.shape in shapes), task.name)


def is_tensorized(space: DesignSpace) -> bool:
    kinds = {sketch.is_tensorized for sketch in space.design.sketches}
    assert len(kinds) == 1
    return kinds.pop()


def proposal(task: Task, count: int = 2) -> tuple[Proposal, Searcher]:
    search = registry.SOURCES[METASCHEDULE].search(SETTINGS)
    assert isinstance(search, Searcher)
    return search.propose(task, count), search


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["stem", "strided", "product"])
def test_products_of_16_bits_get_sketches_on_tensor_cores_that_compile(
    model: Model, precision: str, name: str
) -> None:
    task = lowered_in(model, precision)[1][name]
    found, search = proposal(task)
    assert len(found.candidates) == 2
    for candidate in found.candidates:
        assert MARK in candidate.recipe
        assert built(build_candidate(task, candidate, lowered=search.lowered(candidate)))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sums_are_in_fp32(model: Model, precision: str) -> None:
    task = lowered_in(model, precision)[1]["strided"]
    (candidate,) = proposal(task, 1)[0].candidates
    text = registry.lower(task, candidate).mod.script()
    assert "wmma.accumulator" in text
    sums = [line for line in text.splitlines() if 'scope="wmma.accumulator"' in line]
    assert sums
    assert not any("float16" in line for line in sums)
    intrinsics = [
        str(of) for kind, _, of, _ in json.loads(candidate.recipe)[0] if kind == "Tensorize"
    ]
    assert any("f16f32" in name for name in intrinsics)


def test_a_recipe_builds_to_what_was_at_hand_and_teaches_its_sketch(model: Model) -> None:
    task = lowered_in(model, "fp16")[1]["strided"]
    found, search = proposal(task)
    first, second = found.candidates
    at_hand = built(build_candidate(task, first, lowered=search.lowered(first)))
    assert built(build_candidate(task, first)).library == at_hand.library
    space = design_space(task)
    sketches = [space.design.find(json.loads(c.recipe)) for c in found.candidates]
    assert None not in sketches
    again = search.propose(task, 2, results=[Result(first, 1e-4), Result(second, None)])
    assert len(again.candidates) == 2
    assert all(MARK in c.recipe for c in again.candidates)


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("fp16", "depthwise"),  # no sum over channels
        ("fp16", "column"),  # one column, padded to 16
        ("tf32", "product"),  # TVM has no such intrinsic
        ("fp32", "product"),
    ],
)
def test_other_tasks_keep_the_sketches_that_they_have(
    model: Model, precision: str, name: str
) -> None:
    space = design_space(lowered_in(model, precision)[1][name])
    assert not is_tensorized(space)
    assert {type(p).__name__ for p in space.postprocs}.isdisjoint({"RewriteTensorize"})


@pytest.mark.parametrize(
    ("precision", "capability", "expected"),
    [("fp16", "6.1", False), ("fp16", "7.0", True), ("bf16", "7.5", False), ("bf16", "8.0", True)],
)
def test_a_gpu_without_such_instructions_gets_none(
    model: Model, precision: str, capability: str, expected: bool
) -> None:
    task = lowered_in(model, precision)[1]["product"]
    task = replace(task, target=cuda_target(capability))
    assert is_tensorized(design_space(task)) == expected


def test_a_padded_input_is_kept_in_16_bits(model: Model) -> None:
    task = lowered_in(model, "fp16")[1]["strided"]
    (candidate,) = proposal(task, 1)[0].candidates
    steps = [kind for kind, *_ in json.loads(candidate.recipe)[0]]
    assert steps.count("UnsafeSetDType") == 1
    before = module_of(task).script()
    registry.lower(task, candidate)
    assert module_of(task).script() == before  # it is shared


def disagreements(precision: str, target: TargetSpec) -> list[str]:
    """Say how kernels on tensor cores differ from the default on this process's GPU."""
    from tunerd.runner.agreement import disagreement
    from tunerd.runner.cuda_device import CudaDevice

    _, tasks = lowered_in(model_with_products(), precision)
    device, found = CudaDevice(), []
    for name in ("stem", "strided", "product"):
        task = replace(tasks[name], target=target)
        reference = built(build_candidate(task, default_candidate(task)))
        for candidate in proposal(task, 4)[0].candidates:
            build = build_candidate(task, candidate)
            if isinstance(build, Build):  # one in ten does not compile
                failure = disagreement(device, reference, build)
                found += [f"{name}: {failure.message}"] if failure else []
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_tensor_cores_compute_what_the_default_computes(precision: str) -> None:
    target = plan(SliceRequest("whole", 100)).target
    assert in_own_process(disagreements, precision, target) == []


@pytest.mark.slow
def test_an_artifact_holds_kernels_on_tensor_cores_beside_others(
    model: Model, tmp_path: Path
) -> None:
    lowered, tasks = lowered_in(model, "fp16")
    winners: dict[str, Candidate] = {}
    for name in ("strided", "product", "depthwise"):
        (candidate,) = proposal(tasks[name], 1)[0].candidates
        winners[tasks[name].task_id] = candidate
    folder = compile_artifact(
        lowered, tuple(tasks.values()), winners, CUDA, tmp_path / "artifact", model=model, pct=40
    )
    entries = {t["task_id"]: t["candidate_id"] for t in read_manifest(folder)["tasks"]}
    assert {k: v for k, v in entries.items() if v} == {
        task_id: c.candidate_id for task_id, c in winners.items()
    }
