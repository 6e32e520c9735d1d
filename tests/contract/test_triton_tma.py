"""Products whose operands TMA brings: which they are, their numbers, and their calls."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.test_triton import Node, require_agreement, task_of
from tunerd.builder.library import load_tvm
from tunerd.builder.packed_imports import _cubin_body
from tunerd.candidates.base import ENTRY, DeviceKernel, SearchSettings
from tunerd.candidates.triton.compile import Compiled, build
from tunerd.candidates.triton.launch import Boxes
from tunerd.candidates.triton.source import Recipe, TritonSource, templates_of, types_of
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import Task

Form = tuple[list[Node], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]


def after_products(
    nodes: list[Node],
    weights: dict[str, tuple[int, ...]] | None = None,
    **sizes: tuple[int, ...],
) -> Form:
    """Return a model whose nodes read what small products wrote, which is of 16 bits.

    sizes: of what they wrote, by its name.
    """
    first: list[Node] = [("MatMul", [f"{name}_in", f"{name}_w"], name, {}) for name in sizes]
    inputs = {f"{name}_in": (*size[:-1], 16) for name, size in sizes.items()}
    own = {f"{name}_w": (16, size[-1]) for name, size in sizes.items()}
    return [*first, *nodes], inputs, own | (weights or {})


def product(depth: int, columns: int, rows: int = 64) -> Form:
    node: Node = ("MatMul", ["x", "w"], "y", {})
    return after_products([node], {"w": (depth, columns)}, x=(1, rows, depth))


FORMS: dict[str, Form] = {
    "ragged": after_products(
        [("MatMul", ["x", "w"], "m", {}), ("Add", ["m", "b"], "y", {})],
        {"w": (72, 80), "b": (80,)},
        x=(1, 197, 72),
    ),
    "deep": product(320, 64, rows=33),
    "turned": after_products(
        [("Transpose", ["z"], "zt", {"perm": [1, 0]}), ("MatMul", ["x", "zt"], "y", {})],
        x=(197, 64),
        z=(80, 64),
    ),
}
OTHERS: dict[str, Form] = {
    "rows not aligned": product(68, 64),
    "columns not aligned": product(64, 52),
    "operands of 32 bits": (
        [("MatMul", ["x", "w"], "y", {})],
        {"x": (64, 64)},
        {"w": (64, 64)},
    ),
    "taps": (
        [("Conv", ["x", "w"], "y", {"pads": [1, 1, 1, 1]})],
        {"x": (1, 32, 9, 11)},
        {"w": (40, 32, 3, 3)},
    ),
    "a batch": after_products([("MatMul", ["x", "z"], "y", {})], x=(4, 32, 64), z=(4, 64, 40)),
}


@pytest.fixture(scope="module")
def tvm() -> Any:
    return load_tvm()


def offered(task: Task) -> dict[str, Any]:
    found = templates_of(task, has_tma=True)
    assert not isinstance(found, str), found
    return found


def cuts(template: Any) -> Iterator[Any]:
    """Yield the cut that is best by the estimate, a large one, and one that splits."""
    ranked = sorted(template.tiles(), key=lambda cut: template.estimated_secs(cut, 132))
    yield ranked[0]
    yield next(c for c in ranked if c.rows == 64)
    yield from [c for c in ranked if c.splits > 1][:1]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_with_tensor_maps_computes_its_task(form: str, precision: str, tvm: Any) -> None:
    nodes, inputs, weights = FORMS[form]
    task = task_of(nodes, inputs, weights, precision=precision)
    template = offered(task)["tma"]
    for cut in cuts(template):
        require_agreement(task, template, cut, tvm)


@pytest.mark.parametrize("form", OTHERS)
def test_what_tma_cannot_read_stays_with_pointers(form: str, tvm: Any) -> None:
    nodes, inputs, weights = OTHERS[form]
    assert "tma" not in offered(task_of(nodes, inputs, weights, precision="fp16"))


def test_older_gpus_and_other_types_have_no_tma(tvm: Any) -> None:
    task = task_of(*FORMS["ragged"], precision="fp16")
    assert "tma" in offered(task)
    assert "tma" not in templates_of(task)
    assert "tma" not in offered(replace(task, target=cuda_target("8.0")))
    assert "tma" not in offered(task_of(*FORMS["ragged"], precision="tf32"))


def test_a_search_offers_both_where_it_is_told_to(tvm: Any) -> None:
    pytest.importorskip("triton")
    task = task_of(*FORMS["ragged"], precision="fp16")
    settings = SearchSettings(seed=0, threads=1, sms=132)

    def kinds(source: TritonSource, count: int) -> set[str]:
        found = source.search(settings).propose(task, count).candidates
        return {json.loads(c.recipe)["template"] for c in found}

    assert kinds(TritonSource(has_tma=True), 8) == {"product", "tma"}
    assert kinds(TritonSource(), 8) == {"product"}


def test_a_cut_is_ranked_beside_its_twin_with_pointers(tvm: Any) -> None:
    found = offered(task_of(*FORMS["ragged"], precision="fp16"))
    with_maps, twin = found["tma"], found["product"]
    assert list(with_maps.tiles()) == list(twin.tiles())
    for cut in twin.tiles():
        ratio = with_maps.estimated_secs(cut, 132) / twin.estimated_secs(cut, 132)
        assert 0.95 < ratio < 1 if cut.rows >= 64 else 1 < ratio < 1.05
        assert len(with_maps.features(cut, 132)) == len(twin.features(cut, 132))
        assert with_maps.features(cut, 132) != twin.features(cut, 132)


def test_tenants_have_the_same_cut_with_pointers(tvm: Any) -> None:
    pytest.importorskip("triton")
    task = task_of(*FORMS["ragged"], precision="fp16")
    recipe = Recipe("tma", next(cuts(offered(task)["tma"]))).text
    for kernel in TritonSource().lower(task, recipe, lanes=2).kernels:
        assert "tensormap" not in kernel.types


# --- the call ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_those_that_triton_compiles(form: str, tvm: Any) -> None:
    pytest.importorskip("triton")
    nodes, inputs, weights = FORMS[form]
    task = task_of(nodes, inputs, weights, precision="fp16")
    template = offered(task)["tma"]
    for cut in cuts(template):
        (launch,) = template.launches(cut, "kernel")
        pointers = ["*fp16"] * len(template.nest.params)
        pointers += ["*i32", "*fp32"] if template.workspace(cut) else []
        maps = [f"tensordesc<fp16[{m.block[0]}, {m.block[1]}]>" for m in launch.maps]
        built = build(
            launch.text,
            "kernel",
            [*pointers, *maps],
            arch="sm_90",
            warps=cut.warps,
            stages=cut.stages,
        )
        head = built.asm["ptx"].partition(".entry")[2].partition("\n)")[0]
        of = {"handle": ".u64", "int64": ".u64", "int32": ".u32", "tensormap": ".b8[128]"}
        found = [
            kind + (size or "")
            for kind, size in re.findall(
                r"\.param (?:\.align 64 )?(\.\w+).*?(\[128\])?,?$", head, re.M
            )
        ]
        assert found == [of[t] for t in types_of(len(pointers), 2)]
        assert "cp.async.bulk.tensor.2d" in built.asm["ptx"]


def test_host_code_makes_maps_and_passes_where_they_are(tvm: Any) -> None:
    pytest.importorskip("triton")
    import tvm_ffi

    nodes, inputs, weights = FORMS["deep"]
    task = task_of(nodes, inputs, weights, precision="fp16")
    template = offered(task)["tma"]
    cut = next(c for c in template.tiles() if (c.rows, c.columns, c.depth) == (64, 64, 64))
    lowered = TritonSource().lower(task, Recipe("tma", cut).text)
    (kernel,) = lowered.kernels
    made: list[tuple[Any, ...]] = []
    passed: list[tuple[Any, ...]] = []

    def encode(*args: Any) -> None:
        made.append(args)
        ctypes.memset(args[0].value, len(made), 128)

    def launch(*args: Any) -> None:
        passed.append(tuple(args))
        at = [args[i].value for i, t in enumerate(kernel.types) if t == "tensormap"]
        assert [ctypes.string_at(a, 128) for a in at] == [b"\1" * 128, b"\2" * 128]

    encoder = "runtime.cuTensorMapEncodeTiled"
    if tvm.get_global_func(encoder, allow_missing=True) is not None:
        pytest.skip("TVM's own encoder is here: tests of a GPU call it")
    tvm.register_global_func(encoder, encode)
    tvm.register_global_func(kernel.symbol, launch)
    try:
        library = tvm.compile(lowered.mod, target="llvm")
        specs = (*task.args, *lowered.scratch)
        library[ENTRY](*(tvm.runtime.tensor(np.zeros(s.shape, s.dtype)) for s in specs))
    finally:
        for name in (encoder, kernel.symbol):
            tvm_ffi.registry.remove_global_func(name)
    (args,) = passed
    assert len(args) == len(kernel.types) + 5  # the grid, threads and shared memory
    first = len(specs)
    assert args[first + 1 : first + 5] == (33, 320, 320, 1)
    assert args[first + 6 : first + 10] == (320, 64, 64, 1)
    for each, (rows, columns) in zip(made, ((33, 320), (320, 64)), strict=True):
        assert each[0].value % 64 == 0
        assert each[1:3] == ("float16", 2)
        # Extents, the stride in bytes, the box, element strides; no interleaving, a swizzle of 128
        # bytes, promotion to 128 bytes in L2, zeros outside.
        assert each[4:] == (columns, rows, 2 * columns, 64, 64, 1, 1, 0, 3, 2, 0)


def test_what_a_run_shares_of_a_kernel_says_how_its_maps_are_read(tmp_path: Path) -> None:
    made = Compiled(b"cubin", 1024, 128, (Boxes((64, 32), 2), Boxes((32, 128), 3)))
    made.write(tmp_path / "shared")
    assert Compiled.read(tmp_path / "shared") == made


def test_a_tensor_map_is_tagged_for_tvms_runtime() -> None:
    kernel = DeviceKernel("k", b"", types_of(1, 1), "")
    body = _cubin_body(kernel)
    tags = [0, 1, 0, 0, 0, 0, 0, 0]
    packed = len(tags).to_bytes(8, "little") + b"".join(t.to_bytes(4, "little") for t in tags)
    assert body.endswith(packed + bytes(8))
