"""Kernels for several models at once: each lane computes what the kernel of one model does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.lib.build_fixtures import (
    LLVM,
    candidate_of,
    conv_task,
    default_of,
    matmul_task,
    new_schedule,
    task_of,
    tiled_matmul,
    typed_task,
)
from tests.lib.lowered import CUDA
from tunerd.builder import library, nvrtc
from tunerd.builder.lowering import tir_pipeline
from tunerd.builder.tenants import for_tenants
from tunerd.candidates import registry
from tunerd.candidates.base import ENTRY, SearchSettings
from tunerd.candidates.metaschedule.source import MetaScheduleSource
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import SLOT_BYTES, TargetSpec, Task

needs_nvrtc = pytest.mark.skipif(
    nvrtc.cuda_build_problem() is not None, reason=str(nvrtc.cuda_build_problem())
)


def softmax_task(target: TargetSpec = LLVM) -> Task:
    """Several loops, with what lies between them in memory of the kernel."""
    library.load_tvm()
    from tvm import te, topi

    data = te.placeholder((8, 250), name="data")
    return task_of([data, topi.nn.softmax(data)], target)


def batched_task(target: TargetSpec) -> Task:
    """Products that DLight has on tensor cores, one for each block along z."""
    library.load_tvm()
    from tvm import te, topi

    left = te.placeholder((12, 128, 128), "float16", name="left")
    right = te.placeholder((12, 128, 128), "float16", name="right")
    return task_of([left, right, topi.nn.batch_matmul(left, right)], target)


def copying_task(target: TargetSpec = LLVM) -> Task:
    """Takes the first 64 of 65 numbers: rows do not begin where vectors may."""
    library.load_tvm()
    from tvm import te

    data = te.placeholder((65,), name="data")
    return task_of([data, te.compute((64,), lambda i: data[i] + 1.0, name="out")], target)


def default_kernel(task: Task) -> Any:
    return registry.lower(task, default_of(task)).mod[ENTRY]


def searched_kernel(task: Task) -> Any:
    """Return the kernel of a task as MetaSchedule would have it."""
    search = MetaScheduleSource().search(SearchSettings(seed=3, threads=1))
    (found, *_) = search.propose(task, 2).candidates
    return registry.lower(task, found).mod[ENTRY]


def compiled(func: Any, target: TargetSpec) -> Any:
    tvm = library.load_tvm()
    pipeline = tir_pipeline() if target.is_cuda else None
    mod = tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)})
    with (
        tvm.transform.PassContext(config={"tirx.disable_assert": True}),
        tvm.target.Target(target.json) as chosen,
    ):
        return tvm.tirx.build(mod, target=chosen, pipeline=pipeline)


def values(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 4).astype(dtype)


def check_lanes(func: Any, weights: Sequence[int], slots: Sequence[int], *, pieces: int) -> None:
    """Assert that each lane computes what the kernel of one model does with its weights.

    Pieces of weights lie one after the other; slots count from the first of them, or from a later
    one where a slot is negative.
    """
    tvm = library.load_tvm()
    shapes = [[int(extent) for extent in param.shape] for param in func.params]
    types = [str(param.dtype) for param in func.params]
    begins, end = {}, 0
    for i in weights:
        begins[i] = end
        size = int(np.prod(shapes[i])) * dtype_of(types[i]).itemsize
        end += -(-size // SLOT_BYTES) * SLOT_BYTES
    memory = np.zeros(max(pieces * end, 1), np.uint8)
    own = [{i: values(shapes[i], types[i], 10 * p + i) for i in weights} for p in range(pieces)]
    for p, of_piece in enumerate(own):
        for i, value in of_piece.items():
            begin = p * end + begins[i]
            memory[begin : begin + value.nbytes] = value.reshape(-1).view(np.uint8)
    on_device = tvm.runtime.tensor(memory)
    base = max(0, -min(slots))
    rows = [
        values((len(slots), *s), t, i) for i, (s, t) in enumerate(zip(shapes, types, strict=True))
    ]
    rows[-1] = np.zeros_like(rows[-1])

    one = compiled(func, LLVM)
    expected = rows[-1].copy()
    for lane, slot in enumerate(slots):
        arguments = [own[base + slot][i] if i in begins else r[lane] for i, r in enumerate(rows)]
        tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arguments]
        one[ENTRY](*tensors)
        expected[lane] = tensors[-1].numpy()
    assert np.abs(expected).max() > 0

    from tunerd.artifacts.weights import view

    together = compiled(for_tenants(func, weights, len(slots), is_cuda=False), LLVM)
    tensors = [
        view(on_device, (int(np.prod(shapes[i])),), types[i], base * end + begins[i])
        if i in begins
        else tvm.runtime.tensor(row)
        for i, row in enumerate(rows)
    ]
    units = np.array(slots, np.int32) * (end // SLOT_BYTES)
    together[ENTRY](tvm.runtime.tensor(units), *tensors)
    np.testing.assert_array_equal(tensors[-1].numpy(), expected)


MIXED = {1: (1,), 3: (2, -1, 0), 4: (1, 0, 2, 1)}


@pytest.mark.parametrize("count", MIXED)
def test_each_lane_of_a_default_convolution_takes_the_weights_of_its_slot(count: int) -> None:
    check_lanes(default_kernel(conv_task()), (1, 2), MIXED[count], pieces=4)


@pytest.mark.parametrize("count", MIXED)
def test_each_lane_of_a_searched_dense_takes_its_weights_of_several_types(count: int) -> None:
    check_lanes(searched_kernel(typed_task()), (1, 2, 3, 4), MIXED[count], pieces=4)


@pytest.mark.parametrize("count", MIXED)
def test_what_a_kernel_keeps_between_its_loops_is_each_lanes_own(count: int) -> None:
    check_lanes(default_kernel(softmax_task()), (), [0] * count, pieces=1)


def test_a_schedule_with_vectors_and_threads_of_the_host_serves_lanes() -> None:
    task = matmul_task()
    kernel = registry.lower(task, candidate_of(task, tiled_matmul(task))).mod[ENTRY]
    check_lanes(kernel, (1,), (0, 2, 2, -1), pieces=4)


def test_rows_may_begin_where_no_vector_does() -> None:
    schedule = new_schedule(copying_task())
    (i,) = schedule.get_loops(schedule.get_sblock("out"))
    _, inner = schedule.split(i, [None, 4])
    schedule.vectorize(inner)
    check_lanes(schedule.mod[ENTRY], (), (0, 0, 0), pieces=1)


def test_a_kernel_with_memory_behind_a_pointer_is_refused() -> None:
    tvm = library.load_tvm()
    from tvm import te

    data = te.placeholder((4,), name="data")
    out = te.extern(
        (4,),
        [data],
        lambda ins, outs: tvm.tirx.call_packed("f", ins[0].access_ptr("r"), outs[0]),
        name="out",
    )
    with pytest.raises(ValueError, match="data, out in another way than by elements"):
        for_tenants(te.create_prim_func([data, out]), (), 2, is_cuda=False)


# --- CUDA --------------------------------------------------------------------------------------


def cuda_source(func: Any, weights: Sequence[int], count: int) -> str:
    """Return the source of a kernel for several models, which NVRTC compiles."""
    made = for_tenants(func, weights, count, is_cuda=True)
    source = str(compiled(made, CUDA).imports[0].inspect_source("cuda"))
    assert nvrtc.compile_kernels(source, "sm_90")
    return source


def launches(func: Any, weights: Sequence[int], count: int) -> list[dict[str, int]]:
    """Return the extents of each axis of each kernel that is launched."""
    from tvm import tirx
    from tvm_ffi import structural_walk

    nests: list[dict[str, int]] = []

    def visit(loop: Any) -> None:
        if loop.thread_binding is None:
            return
        tag = str(loop.thread_binding.thread_tag)
        if loop.loop_var.name == "lane":
            nests.append({})
        nests[-1].setdefault(tag, int(loop.extent))

    made = for_tenants(func, weights, count, is_cuda=True)
    structural_walk(made.body, (tirx.For, visit), order="pre")
    return nests


SLOT_OF_LANE = r"\(\(int64_t\)slots_ptr\[\(\(int\)blockIdx\.z\)\]\) \* \(int64_t\)"


def vector_loads(source: str) -> int:
    return len(re.findall(r"\*\(float[24]\*\)\(", source))


@needs_nvrtc
def test_a_default_schedule_gets_an_axis_of_the_grid() -> None:
    func = default_kernel(conv_task(CUDA))
    source = cuda_source(func, (1, 2), 4)
    assert [nest["blockIdx.z"] for nest in launches(func, (1, 2), 4)] == [4]
    assert len(re.findall(SLOT_OF_LANE + "64", source)) == 2
    alone = str(compiled(func, CUDA).imports[0].inspect_source("cuda"))
    assert vector_loads(source) == vector_loads(alone) > 0


@needs_nvrtc
def test_a_searched_schedule_keeps_its_vectors() -> None:
    task = conv_task(CUDA)
    func = searched_kernel(task)
    source = cuda_source(func, (1, 2), 3)
    assert re.search(SLOT_OF_LANE + "64", source)
    alone = str(compiled(func, CUDA).imports[0].inspect_source("cuda"))
    assert vector_loads(source) == vector_loads(alone)


@needs_nvrtc
def test_slots_count_in_elements_of_each_weights_type() -> None:
    source = cuda_source(default_kernel(typed_task(CUDA)), (1, 2, 3, 4), 2)
    factors = re.findall(SLOT_OF_LANE + r"(\d+)", source)
    assert sorted(factors) == ["128", "256", "64", "64"]


@needs_nvrtc
def test_lanes_share_an_axis_that_the_schedule_has() -> None:
    func = default_kernel(batched_task(CUDA))
    (alone,) = launches(func, (1,), 1)
    (together,) = launches(func, (1,), 5)
    assert alone["blockIdx.z"] == 12
    assert together == {**alone, "blockIdx.z": 60}
    source = cuda_source(func, (1,), 5)
    assert "slots_ptr[(((int)blockIdx.z) / 12)]" in source
    assert "(((int)blockIdx.z) % 12)" in source


@needs_nvrtc
def test_each_kernel_of_a_function_has_the_lanes_and_memory_between_them_for_each() -> None:
    schedule = new_schedule(softmax_task(CUDA))
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    for block in blocks:
        i, *_ = schedule.get_loops(block)
        schedule.bind(i, "blockIdx.x")
    func = schedule.mod[ENTRY]
    between = for_tenants(func, (), 3, is_cuda=True).body.block.alloc_buffers
    assert {tuple(map(int, b.shape)) for b in between} == {(3, 8), (3, 8, 250)}
    assert launches(func, (), 3) == len(blocks) * [{"blockIdx.z": 3, "blockIdx.x": 8}]
    assert cuda_source(func, (), 3).count(" __global__ ") == 2 * len(blocks)


def test_lanes_lie_along_another_axis_where_the_usual_one_is_too_short() -> None:
    func = default_kernel(batched_task(CUDA))
    (alone,) = launches(func, (), 1)
    (together,) = launches(func, (), 6000)
    assert together["blockIdx.z"] == 12
    assert together["blockIdx.x"] == 6000 * alone.get("blockIdx.x", 1)
