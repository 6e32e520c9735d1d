"""Models of several sizes, and the artifact of all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from tests.lib.artifact_fixtures import CORES, LLVM
from tests.lib.models import floats, load_model, model
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.packing import pack_sizes
from tunerd.frontend.padding import axes_of
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.vocabulary import TargetSpec

BATCHES = ({"batch": 1}, {"batch": 4})


def products(seed: int = 0) -> onnx.ModelProto:
    """Return a model whose rows do not see each other: relu(x @ w + b)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    weights = {"w": floats(6, 5, seed=seed), "b": floats(5)}
    return model(nodes, inputs={"x": ("batch", 6)}, outputs={"y": ("batch", 5)}, weights=weights)


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "net.onnx"
    onnx.save(proto, path)
    return path


def compiled(
    path: Path,
    sizes: dict[str, int],
    folder: Path,
    *,
    pct: int = 50,
    target: TargetSpec = LLVM,
) -> Path:
    """Compile a model with its default schedules for one size, for a core or two."""
    found = load_model(path, dims=sizes)
    lowered = lower(found, target)
    tasks = extract_tasks(lowered, target)
    proof = CORES if pct == 50 else type(CORES)("cpu-0-0", "", 2, 2, "affinity", True)
    return compile_artifact(
        lowered, tasks, {}, target, folder, model=found, pct=pct, proofs=(proof,)
    )


def packed(
    proto: onnx.ModelProto,
    sizes: tuple[dict[str, int], ...],
    place: Path,
    *,
    target: TargetSpec = LLVM,
) -> Path:
    """Compile a model for several sizes, into the one artifact whose folder is returned."""
    path = saved(proto, place)
    sources = [
        (each, compiled(path, each, place / str(n), target=target)) for n, each in enumerate(sizes)
    ]
    pack_sizes(sources, axes_of(path, sizes, shapes={}, batch=None), place / "artifact")
    return place / "artifact"


def by_hand(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return what `products` computes."""
    return np.maximum(x @ floats(6, 5, seed=seed) + floats(5), 0)
