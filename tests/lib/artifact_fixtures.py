"""Small models, lowered as for an artifact, with a hand-made winner for one task."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tunerd.artifacts.compile import compile_artifact
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.vocabulary import METASCHEDULE, Candidate, CapProof, Model, TargetSpec, Task, TensorSpec

LLVM = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 1}))
CUDA = TargetSpec(
    "cuda",
    json.dumps(
        {
            "kind": "cuda",
            "arch": "sm_90",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        }
    ),
)
CORES = CapProof("cpu-0-0", "", 1, 2, "affinity", True)


def tiny_convnet(seed: int = 0) -> Model:
    """Two inputs, two outputs; convolution, pooling and a matrix product. `seed` of the weights."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(size=(8, 3, 3, 3)),
        "b1": rng.normal(size=(8,)),
        "w2": rng.normal(size=(8, 10)),
        "b2": rng.normal(size=(10,)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["features"]),
        helper.make_node("GlobalAveragePool", ["features"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w2"], ["product"]),
        helper.make_node("Add", ["product", "b2"], ["biased"]),
        helper.make_node("Add", ["biased", "offset"], ["scores"]),
    ]
    return model_of(
        nodes,
        weights,
        inputs={"x": (2, 3, 8, 8), "offset": (2, 10)},
        outputs={"scores": (2, 10), "features": (2, 8, 8, 8)},
    )


def model_of(
    nodes: list[onnx.NodeProto],
    weights: Mapping[str, np.ndarray],
    *,
    inputs: Mapping[str, tuple[int, ...]],
    outputs: Mapping[str, tuple[int, ...]],
) -> Model:
    """Return a float32 model of these nodes."""

    def values(shapes: Mapping[str, tuple[int, ...]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]

    def specs(shapes: Mapping[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(n, s, "float32") for n, s in shapes.items())

    initializers = [numpy_helper.from_array(w.astype("float32"), n) for n, w in weights.items()]
    graph = helper.make_graph(nodes, "tiny", values(inputs), values(outputs), initializers)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(proto)
    digest = hashlib.sha256(proto.SerializeToString()).hexdigest()
    return Model("tiny", digest, specs(inputs), specs(outputs), OnnxGraph(proto))


def candidate_of(task: Task, trace: Any) -> Candidate:
    """Return the candidate that a search would have made of a trace."""
    text = json.dumps(trace.as_json(), separators=(",", ":"), default=lambda imm: int(imm.value))
    digest = hashlib.sha256((task.task_id + text).encode()).hexdigest()[:16]
    return Candidate(task.task_id, digest, METASCHEDULE, text)


def matmul_winner(tasks: tuple[Task, ...]) -> Candidate:
    """Schedule the task of the matrix product by hand: a split, a new order, a vectorized loop."""
    import tvm

    (task,) = (t for t in tasks if "matmul" in t.name)
    sch = tvm.s_tir.Schedule(tvm.ir.load_json(task.mod_json))
    block = sch.get_sblock("matmul", "main")
    row, column, inner = sch.get_loops(block)
    outer, lane = sch.split(column, factors=[None, 5])
    sch.reorder(row, outer, inner, lane)
    sch.vectorize(lane)
    return candidate_of(task, sch.trace)


def tiny_artifact(
    folder: Path,
    *,
    tuned: bool = True,
    proof: CapProof = CORES,
    pct: int = 50,
    seed: int = 0,
    precision: str = "",
) -> Model:
    """Compile the tiny model for llvm into `folder` and return the model."""
    model = dataclasses.replace(tiny_convnet(seed), precision=precision)
    lowered = lower(model, LLVM)
    tasks = extract_tasks(lowered, LLVM, precision=precision)
    winner = matmul_winner(tasks)
    compile_artifact(
        lowered,
        tasks,
        {winner.task_id: winner} if tuned else {},
        LLVM,
        folder,
        model=model,
        pct=pct,
        proofs=(proof,),
    )
    return model
