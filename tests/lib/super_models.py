"""Artifacts that serve several tenants, and those of each tenant alone, for CPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

import tunerd
from tests.lib.artifact_fixtures import CORES, LLVM, model_of, tiny_convnet
from tests.lib.models import example_models, load_model
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.packing import pack_tenants
from tunerd.artifacts.super_model import SuperModel
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.runs.finals.verify import verify
from tunerd.vocabulary import Candidate, CapProof, Model, TargetSpec, Task
from tunerd.vocabulary.verdict import Verdict

CONVNET, ENCODER = "convnet", "encoder"


def tenant(kind: str, seed: int, folder: Path) -> Model:
    """Return a small model; those of one kind differ in their weights alone."""
    if kind == CONVNET:
        return tiny_convnet(seed)
    proto = example_models().transformer_encoder(layers=1, hidden=16, heads=2, tokens=6, seed=seed)
    onnx.save(proto, path := folder / f"{kind}-{seed}.onnx")
    return load_model(path)


def artifact_of(
    model: Model,
    folder: Path,
    *,
    tenants: int | None = None,
    proof: CapProof = CORES,
    target: TargetSpec = LLVM,
    winner_of: Callable[[Task], Candidate | None] = lambda task: None,
) -> Path:
    """Compile a model, with its default schedules where a task has no winner."""
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target, precision=model.precision)
    if tenants and tenants > 1:
        tasks = tuple(task.for_tenants(tenants) for task in tasks)
    winners = {task.task_id: found for task in tasks if (found := winner_of(task))}
    return compile_artifact(
        lowered, tasks, winners, target, folder,
        model=model, pct=50, proofs=(proof,), tenants=tenants,
    )  # fmt: skip


def super_artifact(
    model: Model, folder: Path, counts: Sequence[int] = (1, 2, 4), **compiled: Any
) -> Path:
    """Compile a model for several numbers of tenants, into one artifact."""
    sources = [
        artifact_of(model, folder.with_name(f"{folder.name}-{count}"), tenants=count, **compiled)
        for count in counts
    ]
    pack_tenants(sources, folder)
    return folder


def two_convolutions(first: np.ndarray, second: np.ndarray) -> Model:
    """Return a model of two convolutions of a 6x6 image, by filters of shape [out, in, k, k]."""
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], pads=[first.shape[2] // 2] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["y"], pads=[second.shape[2] // 2] * 4),
    ]
    return model_of(
        nodes,
        {"first": first, "second": second},
        inputs={"x": (1, first.shape[1], 6, 6)},
        outputs={"y": (1, second.shape[0], 6, 6)},
    )


def require_right_alone_and_beside(
    model: Model, folder: Path, target: TargetSpec, winner_of: Callable[[Task], Candidate | None],
    *, tolerance: float,
) -> dict[str, Any]:  # fmt: skip
    """Compile `two_convolutions` as one model, which has to be right; return its manifest.

    Its weights have to serve in a launch of several, too, where they lie as the model has them.
    """
    alone = artifact_of(model, folder / "a", target=target, winner_of=winner_of)
    session = tunerd.load(alone)
    found = verify(lambda inputs: dict(session(*inputs.values())), model)
    assert found.verdict is Verdict.RIGHT, found.message
    several = tunerd.load(super_artifact(model, folder / "several", (1, 2), target=target))
    assert isinstance(several, SuperModel)
    several.add("b", alone)
    (spec,) = model.inputs
    x = np.random.default_rng(0).standard_normal(spec.shape).astype(np.float32)
    for outputs in several.run([(several.own, {"x": x}), ("b", {"x": x})]):
        np.testing.assert_allclose(outputs["y"], session(x)["y"], rtol=tolerance, atol=tolerance)
    manifest: dict[str, Any] = json.loads((alone / "manifest.json").read_text())
    return manifest
