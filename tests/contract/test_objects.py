"""A model's kernels for CPUs: each is compiled by itself, and once for several models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunerd
from tests.lib.artifact_fixtures import CORES, LLVM, matmul_winner, tiny_convnet
from tunerd.artifacts.compile import compile_artifact
from tunerd.builder import objects as module
from tunerd.builder.library import load_tvm
from tunerd.builder.objects import Objects
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import lower, make_target
from tunerd.frontend.tasks import extract_tasks
from tunerd.system.arrays import random_inputs


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols of the functions that are compiled, in order."""
    symbols: list[str] = []
    usual = module._compiled

    def counted(function: Any, target: Any) -> bytes:
        symbols.append(str(function.attrs["global_symbol"]))
        return usual(function, target)

    monkeypatch.setattr(module, "_compiled", counted)
    return symbols


@pytest.fixture
def objects() -> Iterator[Objects]:
    with Objects() as made:
        yield made


def doubled(by: float = 2.0, name: str = "doubled") -> Any:
    load_tvm()
    from tvm import te

    x = te.placeholder((8,), name="x")
    y = te.compute((8,), lambda i: x[i] * by, name="y")
    return te.create_prim_func([x, y]).with_attr("global_symbol", name)


def test_models_have_the_kernels_in_common_that_are_the_same(
    tmp_path: Path, compiled: list[str], objects: Objects
) -> None:
    model = tiny_convnet()
    lowered = lower(model, LLVM)
    tasks = extract_tasks(lowered, LLVM)
    winner = matmul_winner(tasks)
    feed = random_inputs(model.inputs, 0)
    right = Reference(model.graph.proto).run(feed)
    counts = []
    for number, winners in enumerate(({}, {winner.task_id: winner})):
        folder = tmp_path / str(number)
        compile_artifact(
            lowered, tasks, winners, LLVM, folder, model=model, pct=50, proofs=(CORES,),
            objects=objects,
        )  # fmt: skip
        counts.append(len(compiled))
        for name, got in tunerd.load(folder)(feed).items():
            np.testing.assert_allclose(got, right[name], rtol=1e-4, atol=1e-5)
    assert counts[1] == counts[0] + 1  # the one that has a winner
    assert len(tasks) - 1 == counts[0]  # one is in what TVM links


def test_functions_are_one_where_all_of_them_is_the_same(
    compiled: list[str], objects: Objects
) -> None:
    target = make_target(LLVM)
    functions = [doubled(), doubled(), doubled(3.0), doubled(name="other")]
    found = [each.result() for each in objects.of(functions, target)]
    assert sorted(compiled) == ["doubled", "doubled", "other"]
    assert found[0] == found[1] != found[2]
    assert all(content.startswith(b"\x7fELF") for content in found)


def test_threads_that_ask_for_the_same_wait_for_one(compiled: list[str], objects: Objects) -> None:
    target, found = make_target(LLVM), []
    threads = [
        threading.Thread(target=lambda: found.append(objects.of([doubled()], target)[0].result()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == ["doubled"]
    assert len(set(found)) == 1


def test_what_cannot_be_compiled_is_said_by_who_waits_for_it(objects: Objects) -> None:
    load_tvm()
    import tvm
    from tvm import te

    x = te.placeholder((8,), name="x")
    y = te.compute((8,), lambda i: tvm.tirx.call_intrin("float32", "tirx.tvm_fill_fragment", x[i]))
    broken = te.create_prim_func([x, y]).with_attr("global_symbol", "broken")
    (future,) = objects.of([broken], make_target(LLVM))
    assert future.exception() is not None
