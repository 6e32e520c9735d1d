"""Artifacts that serve several tenants, and those of each tenant alone, for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx

from tests.lib.artifact_fixtures import CORES, LLVM, tiny_convnet
from tests.lib.models import example_models, load_model
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.packing import pack_tenants
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.vocabulary import Candidate, CapProof, Model, TargetSpec, Task

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
