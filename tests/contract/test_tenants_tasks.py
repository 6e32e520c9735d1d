"""Tasks of several models at once: how they are built, given arguments, checked and timed."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tvm

from tests.lib.build_fixtures import (
    built,
    candidate_of,
    default_of,
    matmul_task,
    new_schedule,
    tiled_matmul,
    typed_task,
)
from tests.lib.lowered import CUDA, LLVM, load
from tests.lib.models import conv_net
from tunerd.builder import tenants
from tunerd.builder.build import build_candidate
from tunerd.candidates import registry
from tunerd.candidates.base import LoweredKernel
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.records.rows import task_from_row, task_to_row
from tunerd.runner.arguments import Arguments
from tunerd.runner.base import Runner
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import (
    SEARCH,
    SLOT_BYTES,
    Build,
    Failure,
    Kind,
    LibraryCall,
    Measurement,
    Stage,
    Task,
    TensorSpec,
    in_lanes,
)

LANES = 3


def of_lanes(task: Task) -> Task:
    return task.for_tenants(LANES)


def default_build(task: Task) -> Build:
    return built(build_candidate(task, default_of(task)))


@pytest.fixture(scope="module")
def typed() -> Build:
    return default_build(of_lanes(typed_task(weights=(1, 2, 3, 4))))


def test_tasks_of_any_number_of_models_follow_from_each_other() -> None:
    one = matmul_task()
    four = one.for_tenants(4)
    assert one.for_tenants(1) == one
    assert four.for_tenants(2) == one.for_tenants(2)
    assert four.for_tenants(1) == one
    assert len({t.task_id for t in (one, four, one.for_tenants(2))}) == 3
    assert task_from_row({"position": 0, "run_id": 0, **task_to_row(four)}) == four


def test_the_tasks_of_a_model_are_those_of_several(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, conv_net()), LLVM)
    one, several = extract_tasks(lowered, LLVM), extract_tasks(lowered, LLVM, tenants=LANES)
    assert several == tuple(map(of_lanes, one))
    assert [t.flops for t in several] == [LANES * t.flops for t in one]


def test_a_build_says_what_the_lanes_take(typed: Build) -> None:
    assert typed.args == (
        TensorSpec("slots", (LANES,), "int32"),
        TensorSpec("data", (LANES, 32, 64), "float32"),
        TensorSpec("weight", (64 * 48,), "float32"),
        TensorSpec("scale", (48,), "float16"),
        TensorSpec("table", (48,), "int8"),
        TensorSpec("bias", (48,), "float32"),
        TensorSpec("out", (LANES, 32, 48), "float32"),
    )
    assert typed.weight_args == (2, 3, 4, 5)
    assert typed.tenants == LANES


def test_lanes_that_are_timed_take_weights_of_their_own(typed: Build) -> None:
    arguments = Arguments(tvm.runtime.empty, lambda: None, max_bytes=1 << 20)
    sets = arguments.sets(typed, range_bytes=1 << 20)
    assert len(sets) > 2
    taken: list[tuple[str, int, int]] = []
    for given in sets:
        slots = given[0].numpy()
        assert len(set(slots)) == LANES
        for i in typed.weight_args:
            size = int(np.prod(typed.args[i].shape)) * dtype_of(typed.args[i].dtype).itemsize
            for slot in slots:
                begin = given[i].data_ptr() + int(slot) * SLOT_BYTES
                taken.append((typed.args[i].dtype, begin, begin + size))
    for dtype, piece in arguments._pieces.items():
        of_type = sorted((begin, end) for kind, begin, end in taken if kind == dtype)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(of_type))
        if of_type:
            assert piece.data_ptr() <= of_type[0][0]
            assert of_type[-1][1] <= piece.data_ptr() + piece.shape[0] * dtype_of(dtype).itemsize


def test_a_slice_times_a_build_of_several_models(cores: Runner, typed: Build) -> None:
    (measured,) = cores.measure([typed], SEARCH)
    assert isinstance(measured, Measurement), measured


def test_a_schedule_agrees_with_the_default_of_several_models(cores: Runner) -> None:
    one = matmul_task(weights=(1,))
    task = of_lanes(one)
    found = built(build_candidate(task, candidate_of(task, tiled_matmul(one))))
    assert found.args == in_lanes(one.args, (1,), LANES)
    assert cores.agree(default_build(task), found) is None


def test_lanes_that_take_others_weights_are_a_wrong_answer(
    cores: Runner, typed: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores.agree(typed, typed) is None
    monkeypatch.setattr(tenants, "SLOT_BYTES", SLOT_BYTES // 2)
    failure = cores.agree(typed, default_build(of_lanes(typed_task(weights=(1, 2, 3, 4)))))
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.VERIFY, Kind.WRONG_ANSWER)


def test_a_kernel_made_for_other_lanes_is_a_failure_of_the_build() -> None:
    task = of_lanes(matmul_task())
    mod = registry.lower(task, default_of(task)).mod
    foreign = LoweredKernel(mod, calls=(LibraryCall("cublaslt", "{}"),), lanes=2)
    failure = build_candidate(task, default_of(task), lowered=foreign)
    assert isinstance(failure, Failure)
    assert "for 2 models, not 3" in failure.message


def test_a_library_takes_no_task_of_several_models() -> None:
    task = of_lanes(matmul_task(CUDA))
    assert "weights of one model" in (registry.SOURCES["cublaslt"].takes(task) or "")
    with pytest.raises(ValueError, match="weights of one model"):
        registry.SOURCES["cublaslt"].lower(task, "{}", lanes=LANES)


def test_the_search_leaves_weights_of_several_models_in_their_layout() -> None:
    one = matmul_task(weights=(1,))
    for task, rewrites in ((one, True), (of_lanes(one), False)):
        search = Searcher(seed=1, threads=1)
        builds = [build_candidate(task, c) for c in search.propose(task, 4).candidates]
        assert len(builds) == 4
        assert all(isinstance(found, Build) for found in builds)
        assert any(found.layouts for found in builds if isinstance(found, Build)) is rewrites


def test_a_schedule_with_weights_in_a_layout_of_its_own_is_for_one_model() -> None:
    from tvm.s_tir.meta_schedule.postproc import RewriteLayout

    one = matmul_task(weights=(1,))
    schedule = new_schedule(one)
    i, j, k = schedule.get_loops(schedule.get_sblock("T_matmul_NN"))
    outer, inner = schedule.split(j, [None, 16])
    schedule.reorder(i, outer, k, inner)
    schedule.enter_postproc()
    assert RewriteLayout().apply(schedule)
    task = of_lanes(one)
    failure = build_candidate(task, candidate_of(task, schedule))
    assert isinstance(failure, Failure)
    assert "for one model" in failure.message
