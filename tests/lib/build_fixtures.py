"""Small tasks, schedules and candidates for the tests of builds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tunerd.builder import build, library, nvrtc
from tunerd.candidates.base import LoweredKernel
from tunerd.system.targets import cpu_target_json
from tunerd.testing.kernels import LLVM, built, matmul_task, task_of  # noqa: F401  for tests
from tunerd.testing.sources import random_inputs  # noqa: F401
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Build,
    Candidate,
    TargetSpec,
    Task,
)

WITH_VNNI = TargetSpec("llvm", json.dumps({"kind": "llvm", "mcpu": "cascadelake", "num-cores": 2}))


def quantized_task() -> Task:
    """A product of bytes, as the graph's pass writes it; for this CPU, or one with AVX-512 VNNI."""
    library.load_tvm()
    from tvm import te

    from tunerd.vocabulary.model import INTEGER_PRODUCTS, VNNI_GROUP, VNNI_LANES

    data = te.placeholder((6, 24), "uint8", name="data")
    weight = te.placeholder((2, 6, VNNI_LANES, VNNI_GROUP), "int8", name="weight")
    k = te.reduce_axis((0, 24), name="k")
    products = te.compute(
        (6, 2 * VNNI_LANES),
        lambda i, j: te.sum(
            data[i, k].astype("int32")
            * weight[j // VNNI_LANES, k // VNNI_GROUP, j % VNNI_LANES, k % VNNI_GROUP].astype(
                "int32"
            ),
            axis=k,
        ),
        name=INTEGER_PRODUCTS,
    )
    scaled = te.compute(products.shape, lambda i, j: products[i, j].astype("float32") * 0.5, "y")
    return task_of([data, weight, scaled], vnni_target() or WITH_VNNI)


def vnni_target() -> TargetSpec | None:
    """Return the target of this machine's CPU, None where it lacks AVX-512 VNNI."""
    from tunerd.frontend.relax.integers import has_instructions
    from tunerd.frontend.relax.lowering import make_target

    target = cpu_target_json(2)
    return target if has_instructions(make_target(target)) else None


def conv_task(target: TargetSpec = LLVM) -> Task:
    """Convolution 3x3, NHWC, with bias and ReLU."""
    library.load_tvm()
    from tvm import te, topi

    data = te.placeholder((1, 14, 14, 16), name="data")
    weight = te.placeholder((3, 3, 16, 32), name="weight")
    bias = te.placeholder((32,), name="bias")
    conv = topi.nn.conv2d_nhwc(data, weight, 1, 1, 1)
    return task_of([data, weight, bias, topi.nn.relu(topi.add(conv, bias))], target)


def typed_task(target: TargetSpec = LLVM, *, weights: tuple[int, ...] = ()) -> Task:
    """Dense with a scale in half precision, a table of bytes and a bias in full precision."""
    library.load_tvm()
    from tvm import te, topi

    data = te.placeholder((32, 64), name="data")
    weight = te.placeholder((64, 48), name="weight")
    scale = te.placeholder((48,), "float16", name="scale")
    table = te.placeholder((48,), "int8", name="table")
    bias = te.placeholder((48,), name="bias")
    product = topi.nn.matmul(data, weight)
    out = te.compute(
        (32, 48),
        lambda i, j: (
            product[i, j] * scale[j].astype("float32") + table[j].astype("float32") + bias[j]
        ),
        name="out",
    )
    task = task_of([data, weight, scale, table, bias, out], target)
    return replace(task, weight_args=weights)


def default_of(task: Task) -> Candidate:
    return Candidate(task.task_id, "0" * 16, DEFAULT_SOURCE)


def candidate_of(task: Task, schedule: Any) -> Candidate:
    def number(value: Any) -> int | float:
        return value.value  # type: ignore[no-any-return]  # TVM's IntImm and FloatImm

    trace = json.dumps(schedule.trace.as_json(), separators=(",", ":"), default=number)
    digest = hashlib.sha256(f"{task.task_id}{trace}".encode()).hexdigest()
    return Candidate(task.task_id, digest[:16], METASCHEDULE, trace)


def new_schedule(task: Task) -> Any:
    tvm = library.load_tvm()
    from tvm.s_tir import Schedule

    return Schedule(tvm.ir.load_json(task.mod_json))


def tiled_matmul(task: Task) -> Any:
    schedule = new_schedule(task)
    i, j, k = schedule.get_loops(schedule.get_sblock("T_matmul_NN"))
    j_outer, j_inner = schedule.split(j, [None, 16])
    k_outer, k_inner = schedule.split(k, [None, 4])
    schedule.reorder(i, j_outer, k_outer, k_inner, j_inner)
    schedule.parallel(i)
    schedule.vectorize(j_inner)
    return schedule


def named(task: Task, name: str, mod: Any = None) -> Build:
    """Build a task's default, or a module that is scheduled already, as a candidate of a name."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    candidate = replace(default_of(task), candidate_id=digest[:16])
    lowered = None if mod is None else LoweredKernel(mod)
    return built(build.build_candidate(task, candidate, lowered=lowered))


def doubling(target: TargetSpec, name: str = "doubling") -> Build:
    """Build a kernel that doubles 64 Ki numbers."""
    library.load_tvm()
    from tvm import te

    data = te.placeholder((1 << 16,), name="data")
    twice = te.compute(data.shape, lambda i: data[i] * 2.0)
    return named(task_of([data, twice], target), name)


# Lines of CUDA that make a kernel fault, for `faulty_compiler`.
FAULTS = {
    "illegal address": "*(volatile int*)0x10 = 1;",
    "misaligned access": "*(volatile int*)((char*)POINTER + 1) = 1;",
    "trap": 'asm volatile("trap;");',
}


@contextlib.contextmanager
def faulty_compiler(line: str) -> Iterator[None]:
    """Put a line of CUDA at the beginning of each kernel that is compiled meanwhile.

    POINTER in the line stands for the kernel's first argument.
    """

    def compile_cubin(source: str, arch: str) -> Any:
        head = re.search(r"__global__ void[^{]*?\((?P<first>[^,)]*)[^{]*\{", source)
        assert head is not None, source
        pointer = head["first"].split()[-1].lstrip("*")
        body = line.replace("POINTER", pointer)
        return nvrtc._compile_either(source[: head.end()] + body + source[head.end() :], arch)

    real, nvrtc.compile_cubin = nvrtc.compile_cubin, compile_cubin  # type: ignore[assignment]
    try:
        yield
    finally:
        nvrtc.compile_cubin = real


def suicide(target: TargetSpec, number: signal.Signals) -> Build:
    """Build a kernel that ends its process by a signal."""
    return _calling(lambda tirx, _: tirx.call_extern("int32", "raise", int(number)), target, 1)


def raising(target: TargetSpec, name: str) -> Build:
    """Build a kernel that raises an error with `name` in its message."""
    return _calling(lambda tirx, x: tirx.call_packed(name, x), target, 3)


def _calling(call: Callable[[Any, Any], Any], target: TargetSpec, number: int) -> Build:
    tvm = library.load_tvm()
    from tvm import te

    data = te.placeholder((1,), "int32", name="data")
    out = te.compute((1,), lambda i: data[i] + call(tvm.tirx, data[i]))
    task = task_of([data, out], target)
    candidate = replace(default_of(task), candidate_id=f"{number:016x}")
    return built(build.build_candidate(task, candidate))


def endless(target: TargetSpec) -> Build:
    """Build a kernel that would take hours."""
    tvm = library.load_tvm()
    from tvm import te

    data = te.placeholder((64,), name="data")
    k = te.reduce_axis((tvm.tirx.IntImm("int64", 0), tvm.tirx.IntImm("int64", 1 << 42)), "k")
    out = te.compute((1,), lambda i: te.sum(data[k % 64], axis=k), name="out")
    task = task_of([data, out], target)
    return built(build.build_candidate(task, replace(default_of(task), candidate_id=f"{2:016x}")))
