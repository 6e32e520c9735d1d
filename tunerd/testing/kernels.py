"""Small tasks, and builds of their default kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tunerd.builder import library
from tunerd.builder.build import build_candidate
from tunerd.vocabulary import (
    Build,
    Failure,
    TargetSpec,
    Task,
    TensorSpec,
    default_candidate,
)

LLVM = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 2}))


def task_of(
    tensors: Sequence[Any], target: TargetSpec = LLVM, weights: tuple[int, ...] = ()
) -> Task:
    """Return the task of a kernel from tensors of TVM's `te`: its arguments, the output last.

    Args:
        weights: positions of the arguments that are weights.
    """
    tvm = library.load_tvm()
    func = tvm.te.create_prim_func([*tensors])
    if weights:
        func = func.with_attr("layout_free_buffers", list(weights))
    mod_json = tvm.ir.save_json(tvm.IRModule({"main": func}))
    return Task(
        task_id=hashlib.sha256(mod_json.encode()).hexdigest()[:12],
        name="test",
        weight=1,
        flops=0.0,
        args=tuple(
            TensorSpec(t.op.name, tuple(int(extent) for extent in t.shape), str(t.dtype))
            for t in tensors
        ),
        weight_args=weights,
        target=target,
        mod_json=mod_json,
    )


def matmul_task(
    target: TargetSpec = LLVM, *, after: str = "", weights: tuple[int, ...] = ()
) -> Task:
    """Return a product of (32, 64) and (64, 48); `after`: a function of `topi` for its values."""
    library.load_tvm()
    from tvm import te, topi

    left = te.placeholder((32, 64), name="left")
    right = te.placeholder((64, 48), name="right")
    product = topi.nn.matmul(left, right)
    result = getattr(topi, after)(product) if after else product
    return task_of([left, right, result], target, weights)


def built(result: Build | Failure) -> Build:
    """Return a build; fails where there is none."""
    assert isinstance(result, Build), result
    return result


def kernel(target: TargetSpec, length: int) -> Build:
    """Build a kernel that doubles so many numbers; its candidate's id is their number."""
    library.load_tvm()
    from tvm import te

    data = te.placeholder((length,), name="data")
    task = task_of([data, te.compute((length,), lambda i: data[i] * 2.0, name="twice")], target)
    candidate = replace(default_candidate(task), candidate_id=f"{length:016x}")
    return built(build_candidate(task, candidate))


def kernels(target: TargetSpec, count: int = 3) -> list[Build]:
    """Build kernels of different lengths."""
    return [kernel(target, 64 << i) for i in range(count)]
