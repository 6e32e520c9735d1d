"""A model and its tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnx


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (elements per axis, all positive) and NumPy dtype name of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Model:
    """An ONNX model with every shape fixed, simplified; what the tasks are extracted from."""

    name: str
    digest: str  # sha256 of the weights and the graph with its shapes fixed, hex
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    proto: onnx.ModelProto = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()  # what import had to change, for the report
    precision: str = ""  # that kernels compute in; "": as exported


@dataclass(frozen=True)
class TargetSpec:
    """What code is generated for. `json` is TVM's own target description."""

    kind: str  # "llvm" or "cuda"
    json: str  # of the slice's host or GPU, never the builder's

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"


# What kernels compute in; sums are in fp32 in each.
FP32, TF32, FP16, BF16 = "fp32", "tf32", "fp16", "bf16"


@dataclass(frozen=True)
class Task:
    """One distinct kernel of a model."""

    task_id: str  # 12 hex digits, the same for equal workloads of any model, in any process
    name: str
    weight: int  # calls per inference
    flops: float  # of one call; 0 where TVM cannot tell
    args: tuple[TensorSpec, ...]  # the function's arguments in order, outputs last
    weight_args: tuple[int, ...]  # which arguments hold constants of the model
    target: TargetSpec = field(repr=False)
    mod_json: str = field(repr=False)  # the unscheduled IRModule, as tvm.ir.save_json writes it
    precision: str = FP32  # that it computes in, whatever its tensors' types
    tenants: int = 1  # models whose calls it takes together


Arrays = dict[str, "np.ndarray"]


def architecture(target_json: Any) -> str:
    """Return the GPU's or CPU's architecture that a target's code is for; empty: it says none.

    Core counts and host parts of a target may differ between hosts with the same device.
    """
    try:
        fields = json.loads(target_json)
    except (ValueError, TypeError, RecursionError):
        return ""
    return str(fields.get("arch") or fields.get("mcpu") or "") if isinstance(fields, dict) else ""
