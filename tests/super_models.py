"""Artifacts that serve several tenants, and those of each tenant alone, for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from artifact_fixtures import CORES, LLVM, tiny_convnet
from models import example_models, load_model

from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.packing import pack_tenants
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.vocabulary import CapProof, Model

CONVNET, ENCODER = "convnet", "encoder"


def tenant(kind: str, seed: int, folder: Path) -> Model:
    """Return a small model; those of one kind differ in their weights alone."""
    if kind == CONVNET:
        return tiny_convnet(seed)
    proto = example_models().transformer_encoder(layers=1, hidden=16, heads=2, tokens=6, seed=seed)
    onnx.save(proto, path := folder / f"{kind}-{seed}.onnx")
    return load_model(path)


def artifact_of(
    model: Model, folder: Path, *, tenants: int | None = None, proof: CapProof = CORES
) -> Path:
    """Compile a model with its default schedules."""
    lowered = lower(model, LLVM)
    tasks = extract_tasks(lowered, LLVM)
    return compile_artifact(
        lowered, tasks, {}, LLVM, folder, model=model, pct=50, proofs=(proof,), tenants=tenants
    )


def super_artifact(
    model: Model, folder: Path, counts: Sequence[int] = (1, 2, 4), *, proof: CapProof = CORES
) -> Path:
    """Compile a model for several numbers of tenants, into one artifact."""
    sources = [
        artifact_of(model, folder.with_name(f"{folder.name}-{count}"), tenants=count, proof=proof)
        for count in counts
    ]
    pack_tenants(sources, folder)
    return folder
