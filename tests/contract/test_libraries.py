"""Libraries as candidates: what is matched, what is called, and what is said where one is missing.

A stand-in for cuBLASLt computes on the host what a call says.
"""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.test_sources import for_gpu
from tests.lib.build_fixtures import built, conv_task, matmul_task, task_of
from tests.lib.fake_cublaslt import FakeCublasLt
from tests.lib.library_tasks import MATCHED, SOURCE, fake, gpu_task, on_host, tensors  # noqa: F401  fixtures
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.libraries.recipe import Recipe
from tunerd.libraries import calls, cublaslt, packages
from tunerd.libraries.cublaslt import MatmulCall, Matrix
from tunerd.libraries.packages import LibraryCallError
from tunerd.system.codec import value_from
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import (
    CUBLASLT,
    FP16,
    LIBRARIES,
    Build,
    Candidate,
    LibraryCall,
    Result,
    Task,
    default_candidate,
    to_json,
)


def lowered_call(task: Task, rank: int = 0, sms: int = 52) -> tuple[MatmulCall, list[int]]:
    """Return the call of a task, and the numbers of the arguments whose pointers it takes."""
    lowered = SOURCE.lower(task, Recipe(rank, sms, "").text)
    (made,) = lowered.calls
    main = lowered.mod["main"]
    names = [str(p.name) for p in main.params]
    passed = [str(argument).split(".")[0] for argument in main.body.value.args]
    return MatmulCall.parse(made.text), [names.index(p) for p in passed if p in names]


@pytest.mark.parametrize("name", MATCHED)
def test_a_call_computes_what_the_default_computes(
    fake: FakeCublasLt, name: str, tmp_path: Path
) -> None:
    made = tensors(name)
    task = task_of(made)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s.shape).astype(s.dtype) for s in task.args]
    tvm = load_tvm()
    path = tmp_path / "kernel.so"
    path.write_bytes(built(build_candidate(task, default_candidate(task))).library)
    given = [tvm.runtime.tensor(a) for a in arrays]
    tvm.runtime.load_module(str(path))["main"](*given)
    call, numbers = lowered_call(gpu_task(made))
    workspace = np.zeros(1, np.float32)
    pointers = [[*arrays, workspace][i].ctypes.data for i in numbers]
    cublaslt.Handle().plan(call.text)(pointers, 7)
    np.testing.assert_allclose(arrays[-1], given[-1].numpy(), rtol=1e-4, atol=1e-4)
    assert fake.streams == [7]
    assert fake.targets == [52]
    assert fake.workspaces == [cublaslt.WORKSPACE_BYTES]


def refused() -> Iterator[tuple[str, list[Any]]]:
    load_tvm()
    from tvm import te, topi

    x, w = te.placeholder((6, 16), name="x"), te.placeholder((16, 10), name="w")
    bias = te.placeholder((6, 1), name="bias")
    residual = te.placeholder((6, 10), name="residual")
    yield "a bias of rows", [x, w, bias, topi.add(topi.nn.matmul(x, w), bias)]
    yield "sigmoid", [x, w, topi.sigmoid(topi.nn.matmul(x, w))]
    clipped = topi.clip(topi.nn.matmul(x, w), 0.0, 6.0)
    yield "ReLU up to six", [x, w, clipped]
    after = topi.add(topi.nn.relu(topi.nn.matmul(x, w)), residual)
    yield "a residual after ReLU", [x, w, residual, after]
    yield "no product", [x, topi.nn.relu(x)]


def test_what_the_library_does_not_do_is_left_to_other_sources() -> None:
    for _, made in refused():
        with pytest.raises(ValueError, match="it is no product of cuBLASLt's"):
            SOURCE.lower(gpu_task(made), Recipe(0, 52, "").text)
    with pytest.raises(ValueError, match="is computed before it is multiplied"):
        SOURCE.lower(for_gpu(conv_task(), cuda_target("9.0")), Recipe(0, 52, "").text)


def test_a_call_is_the_same_after_it_was_text() -> None:
    matrix = Matrix("float16", 10, 16, 12, 3)
    call = MatmulCall(
        a=matrix,
        b=matrix,
        c=matrix,
        d=matrix,
        transposed=(True, False),
        batch=4,
        precision=FP16,
        activation="relu",
        has_bias=True,
        alpha=0.5,
        sms=52,
        rank=3,
    )
    assert MatmulCall.parse(call.text) == call
    without = replace(call, c=None)
    assert MatmulCall.parse(without.text) == without


def test_the_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(cublaslt.HeuristicResult) == 64 + 8 + 4 + 4 + 16


def test_ranks_are_proposed_until_the_heuristic_names_no_more() -> None:
    task = gpu_task(tensors("plain"))
    search = SOURCE.search(SearchSettings(seed=0, threads=1, sms=52))
    first = search.propose(task, 8).candidates
    assert [Recipe.parse(c.recipe).rank for c in first] == list(range(8))
    assert {Recipe.parse(c.recipe).sms for c in first} == {52}
    results = [Result(c, 1e-5 if i < 4 else None) for i, c in enumerate(first)]
    answer = search.propose(task, 8, results=results)
    assert (answer.candidates, answer.exhausted) == ((), True)
    assert answer.message == "the library names no more algorithms"


def test_all_ranks_are_proposed_once() -> None:
    task = gpu_task(tensors("plain"))
    search = SOURCE.search(SearchSettings(seed=0, threads=1, sms=52))
    found = [c for _ in range(5) for c in search.propose(task, 8).candidates]
    assert [Recipe.parse(c.recipe).rank for c in found] == list(range(cublaslt.RANKS))


def test_a_rank_that_the_heuristic_does_not_name_is_refused(fake: FakeCublasLt) -> None:
    fake.algorithms = 2
    call, _ = lowered_call(gpu_task(tensors("plain")), rank=2)
    with pytest.raises(LibraryCallError, match=r"names 2 algorithms .* and number 3"):
        cublaslt.Handle().plan(call.text)


def test_libraries_are_searched_only_where_they_are_asked_for() -> None:
    assert not set(registry.searched()) & set(LIBRARIES)
    assert CUBLASLT in registry.searched([CUBLASLT])


def test_a_build_says_what_it_calls() -> None:
    task = gpu_task(tensors("with a bias"))
    recipe = Recipe(1, 52, "").text
    build = built(build_candidate(task, Candidate.of_recipe(task.task_id, recipe, source=CUBLASLT)))
    (call,) = build.calls
    assert call.library == build.compiler == CUBLASLT
    assert MatmulCall.parse(call.text).rank == 1
    assert [s.name for s in build.scratch] == ["workspace"]
    assert call.text.encode() in build.library
    sent = json.loads(json.dumps(to_json(build)))
    assert value_from(Build, sent, library=build.library).calls == build.calls


def test_compiled_code_finds_the_function_and_hands_over_text_and_pointers(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tvm = load_tvm()
    made = tensors("with a bias")
    task = gpu_task(made)
    lowered = SOURCE.lower(task, Recipe(5, 52, "").text)
    host = tvm.tirx.build(lowered.mod, target=tvm.target.Target("llvm"))

    on_host(monkeypatch)
    calls.provide(lowered.calls, 0)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s.shape).astype(s.dtype) for s in task.args]
    workspace = np.zeros(lowered.scratch[0].shape, np.float32)
    given = [tvm.runtime.tensor(a) for a in (*arrays, workspace)]
    host["main"](*given)
    x, w, bias, _ = arrays
    np.testing.assert_allclose(given[3].numpy(), x @ w + bias, rtol=1e-4, atol=1e-4)
    assert fake.ranks == [5]


# --- a library that is missing -----------------------------------------------------------------


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_places", lambda package: iter(()))
    packages.load.cache_clear()
    with pytest.raises(packages.MissingLibraryError) as raised:
        packages.load(CUBLASLT)
    said = str(raised.value)
    assert "cuBLASLt 13.0.0 or newer is needed, and libcublasLt.so.13 is not found here" in said
    assert "pip install nvidia-cublas" in said
    assert "[libraries]" in said


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_places", lambda package: iter(["libc.so.6"]))
    monkeypatch.setattr(packages, "_version_of", lambda library, package: 120804)
    packages.load.cache_clear()
    with pytest.raises(packages.MissingLibraryError, match=r"and cuBLASLt 12\.8\.4 is here"):
        packages.load(CUBLASLT)


def test_calls_of_a_missing_library_are_not_provided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_places", lambda package: iter(()))
    packages.load.cache_clear()
    with pytest.raises(packages.MissingLibraryError):
        calls.provide([LibraryCall(CUBLASLT, "{}")], 0)


def test_a_source_says_that_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "missing", lambda name: "cuBLASLt is needed")
    assert SOURCE.takes(gpu_task(tensors("plain"))) == "cuBLASLt is needed"
    monkeypatch.setattr(packages, "missing", lambda name: None)
    assert SOURCE.takes(gpu_task(tensors("plain"))) is None
    assert SOURCE.takes(matmul_task()) == "cuBLASLt is for GPUs"
