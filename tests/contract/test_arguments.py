"""The arguments of kernels: which memory each call reads and writes. Real tensors, of a CPU."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.build_fixtures import LLVM, named, task_of
from tests.lib.on_a_gpu import in_own_process
from tunerd.runner.arguments import MAX_COPIES, Arguments, copies_of
from tunerd.slices import plan
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    SliceRequest,
    TargetSpec,
    TensorSpec,
)

KIB = 1 << 10
WEIGHT = TensorSpec("w", (8, 4), "float32")  # 128 bytes
ACTIVATION = TensorSpec("x", (8, 4), "float32")


def kernel(args: Sequence[TensorSpec], weight_args: Sequence[int]) -> Build:
    return Build(
        candidate=Candidate("task", "id", METASCHEDULE),
        library=b"",
        library_sha256="",
        build_secs=0.0,
        args=tuple(args),
        weight_args=tuple(weight_args),
        compiler="llvm",
    )


KERNEL = kernel((ACTIVATION, WEIGHT, ACTIVATION), (1,))


def arguments(max_bytes: int = 1 << 20) -> Arguments:
    return Arguments(tvm.runtime.empty, lambda: None, max_bytes=max_bytes)


def extent(tensor: Any) -> tuple[int, int]:
    size = math.prod(tensor.shape) * dtype_of(str(tensor.dtype)).itemsize
    return tensor.data_ptr(), tensor.data_ptr() + size


def check(sets: Sequence[tuple[Any, ...]], build: Build, copies: int) -> None:
    assert len(sets) == copies
    assert all(len(of) == len(build.args) for of in sets)
    for of in sets:
        for tensor, spec in zip(of, build.args, strict=True):
            assert (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, spec.dtype)
            assert tensor.data_ptr() % 64 == 0  # what TVM's kernels may take for granted
    weights = [of[i] for of in sets for i in build.weight_args]
    activations = [t for i, t in enumerate(sets[0]) if i not in build.weight_args]
    taken = sorted(map(extent, [*weights, *activations]))
    for (_, end), (begin, _) in itertools.pairwise(taken):
        assert end <= begin  # nothing is written that another call reads
    for i in set(range(len(build.args))) - set(build.weight_args):
        assert len({of[i].data_ptr() for of in sets}) == 1


def test_calls_take_the_same_activations_and_other_copies_of_the_weights() -> None:
    made = arguments()
    check(made.sets(KERNEL, range_bytes=0), KERNEL, copies=1)
    sets = made.sets(KERNEL, range_bytes=1000)
    check(sets, KERNEL, copies=8)
    assert made.sets(KERNEL, range_bytes=1000) is sets  # a rival has the same


TYPES = ("float32", "float16", "bfloat16", "int64", "bool")
SPECS = st.builds(
    TensorSpec,
    st.just("t"),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(TYPES),
)


@given(data=st.data(), range_bytes=st.sampled_from([0, 4 * KIB, 300 * KIB]))
def test_no_call_writes_what_any_call_reads(data: st.DataObject, range_bytes: int) -> None:
    made = arguments()
    for _ in range(3):  # kernels one after the other, with the same memory
        specs = data.draw(st.lists(SPECS, min_size=1, max_size=5))
        weights = data.draw(st.sets(st.integers(0, len(specs) - 1), max_size=len(specs)))
        build = kernel(specs, sorted(weights))
        sizes = [math.prod(specs[i].shape) * dtype_of(specs[i].dtype).itemsize for i in weights]
        check(made.sets(build, range_bytes=range_bytes), build, copies_of(sum(sizes), range_bytes))


def test_values_have_both_signs_and_indices_are_valid_ones() -> None:
    sizes = (3, 40_000, 6_000_000)  # of one, of some, and beyond what the host makes
    for size in sizes:
        specs = [TensorSpec(dtype, (size,), dtype) for dtype in ("float32", "int64")]
        build = kernel([*specs, *specs], (0, 1))
        (found,) = arguments(1 << 30).sets(build, range_bytes=0)
        for tensor in found:
            values = tensor.numpy()
            if values.dtype.kind == "f":
                assert values.min() >= -1
                assert values.max() < 1
                assert size == 3 or abs(values[-10_000:].mean()) < 0.02
            else:
                assert not values.any()


def test_a_larger_kernel_leaves_the_arguments_of_one_under_way_alone() -> None:
    made = arguments()
    small = made.sets(KERNEL, range_bytes=1000)
    before = [tensor.numpy().copy() for of in small for tensor in of]
    large = kernel((TensorSpec("w", (5_000_000,), "float32"), ACTIVATION), (0,))
    check(made.sets(large, range_bytes=1 << 26), large, copies=4)
    after = [tensor.numpy() for of in small for tensor in of]
    assert all(map(np.array_equal, before, after))


def test_where_memory_is_short_a_kernel_still_has_all_its_copies() -> None:
    made = arguments(max_bytes=300)
    for shape in ((8, 4), (4, 8), (2, 16)):
        build = replace(KERNEL, args=tuple(replace(spec, shape=shape) for spec in KERNEL.args))
        check(made.sets(build, range_bytes=1000), build, copies=8)
    assert len(made._activations) == 2  # of the last one


def test_a_piece_takes_no_more_than_its_kernels_need() -> None:
    made = arguments(max_bytes=1 << 30)
    build = kernel((TensorSpec("w", (64, KIB), "float32"), ACTIVATION), (0,))  # 256 KiB
    for range_bytes in (0, 1 << 26, 1 << 20, 1 << 27):
        made.sets(build, range_bytes=range_bytes)
    (piece,) = made._pieces.values()
    assert piece.shape[0] * 4 <= 1.25 * (1 << 27) + (16 << 20)


@given(bytes_each=st.integers(0, 1 << 32), range_bytes=st.integers(0, 1 << 28))
def test_copies_reach_over_the_range_as_far_as_is_allowed(
    bytes_each: int, range_bytes: int
) -> None:
    copies = copies_of(bytes_each, range_bytes)
    assert 1 <= copies <= MAX_COPIES
    assert copies == 1 or copies * bytes_each <= 1 << 30
    if copies < MAX_COPIES and bytes_each > 0 and copies * bytes_each < 1 << 29:
        assert copies == max(1, math.ceil(range_bytes / bytes_each))


@pytest.mark.parametrize("dtype", TYPES)
def test_an_empty_tensor_is_an_argument_too(dtype: str) -> None:
    build = kernel((TensorSpec("x", (0, 4), dtype), TensorSpec("w", (0,), dtype)), (1,))
    (found,) = arguments().sets(build, range_bytes=1 << 20)
    assert [tuple(tensor.shape) for tensor in found] == [(0, 4), (0,)]


def doubled(target: TargetSpec, copies: int) -> list[float]:
    """Write another number to each copy of a kernel's weights; return what its calls make of it."""
    device = tvm.cuda() if target.is_cuda else tvm.cpu()
    weights = tvm.te.placeholder((KIB,), name="weights")
    twice = tvm.te.compute(weights.shape, lambda i: weights[i] * 2.0)
    build = named(task_of([weights, twice], target, weights=(0,)), "doubled")
    made = Arguments(
        lambda shape, dtype: tvm.runtime.empty(shape, dtype, device), device.sync, max_bytes=1 << 20
    )
    sets = made.sets(build, range_bytes=copies * 4 * KIB)
    for i, (weight, _) in enumerate(sets):
        weight.copyfrom(np.full(KIB, i, np.float32))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(build.library)
        call = tvm.runtime.load_module(str(path))["main"]
        for arguments_of_call in sets:
            call(*arguments_of_call)
            device.sync()
            found.append(float(arguments_of_call[1].numpy().mean()))
    return found


@pytest.mark.parametrize("kind", ["llvm", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_kernel_reads_the_copy_that_its_call_names(kind: str) -> None:
    target = LLVM if kind == "llvm" else plan(SliceRequest("whole", 100)).target
    assert in_own_process(doubled, target, 8) == [2.0 * i for i in range(8)]
