"""Products of bytes in AMX's tiles: each way to cut them is exact; who runs them asks first."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.build_fixtures import built
from tunerd.artifacts import device
from tunerd.artifacts.manifest import LoadError
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates.base import module_of
from tunerd.candidates.default import default_schedule
from tunerd.candidates.registers.amx import Amx, AmxCut
from tunerd.candidates.registers.intrinsic import uses_tiles
from tunerd.candidates.registers.source import AMX, Recipe, VnniSource
from tunerd.frontend.relax.integers import packed
from tunerd.frontend.relax.lowering import make_target
from tunerd.system import amx
from tunerd.system.targets import cpu_target_json
from tunerd.testing.kernels import task_of
from tunerd.vocabulary import VNNI, Candidate, TargetSpec, Task
from tunerd.vocabulary.model import INTEGER_PRODUCTS, STAGED, VNNI_GROUP, VNNI_LANES

WITHOUT = "this CPU has no AMX, or Linux does not permit it"
HAS_AMX = amx.permitted()


def target(cores: int = 2) -> TargetSpec:
    """Return the target of this machine's CPU; where it lacks AMX, of one that has it."""
    load_tvm()
    if HAS_AMX:
        return cpu_target_json(cores)
    described = {"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": cores}
    return TargetSpec("llvm", json.dumps(described))


def products(weight: Any, rows: Any, shape: tuple[int, ...], place: Callable[..., Any]) -> Any:
    """Return sums as the graph's pass writes them. place: of what a sum and its taps read."""
    from tvm import te

    taps, depth = [int(d) for d in weight.shape[1:3]], int(rows.shape[-1])
    y, z, k = (
        te.reduce_axis((0, n), name=name) for n, name in zip((*taps, depth), "yzk", strict=True)
    )
    axes = [y, z, k] if len(shape) > 2 else [k]

    def sums(*at: Any) -> Any:
        *outer, o = at
        of = (o // VNNI_LANES, *((y, z) if len(shape) > 2 else (0, 0)))
        own = weight(*of, k // VNNI_GROUP, o % VNNI_LANES, k % VNNI_GROUP)
        value = rows(*place(outer, y, z), k)
        return te.sum(value.astype("int32") * own.astype("int32"), axis=axes)

    return te.compute(shape, sums, name=INTEGER_PRODUCTS)


def matrix(rows: int, depth: int, columns: int, cores: int = 2) -> Task:
    """Return a product of which a number for each column is taken off."""
    of = target(cores)
    from tvm import te

    data = te.placeholder((rows, depth), "uint8", name="data")
    groups = (columns // VNNI_LANES, 1, 1, depth // VNNI_GROUP, VNNI_LANES, VNNI_GROUP)
    weight = te.placeholder(groups, "int8", name="weight")
    less = te.placeholder((columns,), "int32", name="less")
    sums = products(weight, data, (rows, columns), lambda at, _y, _z: at)
    out = te.compute(sums.shape, lambda i, j: sums[i, j] - less[j], "out")
    return task_of([data, weight, less, out], of)


def convolution(size: int, kernel: int, stride: int, depth: int, columns: int = 32) -> Task:
    """Return a convolution of two images, with padding of 3 and a number taken off."""
    of = target()
    from tvm import te, tirx

    pad = kernel // 2
    data = te.placeholder((2, size, size, depth), "uint8", name="data")
    groups = (columns // VNNI_LANES, kernel, kernel, depth // VNNI_GROUP, VNNI_LANES, VNNI_GROUP)
    weight = te.placeholder(groups, "int8", name="weight")
    less = te.placeholder((columns,), "int32", name="less")
    staged = data
    if pad:
        wide = size + 2 * pad

        def padded(n: Any, y: Any, x: Any, c: Any) -> Any:
            inside = tirx.all(y >= pad, y < size + pad, x >= pad, x < size + pad)
            return tirx.if_then_else(inside, data(n, y - pad, x - pad, c), tirx.const(3, "uint8"))

        staged = te.compute((2, wide, wide, depth), padded, name=STAGED)
    out_size = (size + 2 * pad - kernel) // stride + 1
    shape = (2, out_size, out_size, columns)

    def place(at: Any, y: Any, z: Any) -> Any:
        n, h, v = at
        return n, h * stride + y, v * stride + z

    sums = products(weight, staged, shape, place)
    out = te.compute(shape, lambda n, h, v, o: sums[n, h, v, o] - less[o], "out")
    return task_of([data, weight, less, out], of)


def arrays_of(task: Task) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return values, weights [height, width, depth, columns], these packed, and numbers."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, task.args[0].shape).astype(np.uint8)
    groups, height, width, fours, *_ = task.args[1].shape
    shape = (height, width, fours * VNNI_GROUP, groups * VNNI_LANES)
    weight = rng.integers(-128, 128, shape).astype(np.int8)
    less = rng.integers(-1000, 1000, task.args[2].shape).astype(np.int32)
    return data, weight, packed(weight), less


def right_of(task: Task, stride: int = 1) -> np.ndarray:
    data, weight, _, less = arrays_of(task)
    values, weights = data.astype(np.int64), weight.astype(np.int64)
    if values.ndim == 2:
        return np.asarray(values @ weights[0, 0] - less)
    pad, size = weight.shape[0] // 2, task.args[-1].shape[1]
    values = np.pad(values, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=3)
    out = np.zeros(task.args[-1].shape, np.int64) - less
    for y in range(weight.shape[0]):
        for z in range(weight.shape[1]):
            last = stride * (size - 1) + 1
            out += values[:, y : y + last : stride, z : z + last : stride] @ weights[y, z]
    return out


def template_of(task: Task) -> Amx:
    templates = VnniSource().templates_of(task)
    assert not isinstance(templates, str), templates
    found = templates[AMX]
    assert isinstance(found, Amx)
    return found


def candidate_of(task: Task, cut: AmxCut) -> Candidate:
    return Candidate.of_recipe(task.task_id, Recipe(AMX, cut).text, source=VNNI)


def require_exact(task: Task, cuts: list[AmxCut], right: np.ndarray, folder: Path) -> None:
    tvm = load_tvm()
    data, _, weight, less = arrays_of(task)
    assert cuts
    for cut in cuts:
        build = built(build_candidate(task, candidate_of(task, cut)))
        path = folder / f"{build.candidate.candidate_id}.so"
        path.write_bytes(build.library)
        output = tvm.runtime.empty(task.args[-1].shape, task.args[-1].dtype)
        given = map(tvm.runtime.tensor, (data, weight, less))
        tvm.runtime.load_module(str(path))["main"](*given, output)
        np.testing.assert_array_equal(output.numpy(), right, err_msg=str(cut))


@pytest.mark.skipif(not HAS_AMX, reason=WITHOUT)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 64, 16), (6, 4, 32), (17, 20, 48), (37, 68, 96), (49, 192, 32), (128, 100, 64)],
)
def test_products_are_exact(rows: int, depth: int, columns: int, tmp_path: Path) -> None:
    task = matrix(rows, depth, columns)
    require_exact(task, list(template_of(task).tiles()), right_of(task), tmp_path)


@pytest.mark.skipif(not HAS_AMX, reason=WITHOUT)
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "depth"),
    [(7, 3, 1, 64), (7, 1, 1, 20), (14, 1, 2, 64), (15, 3, 2, 12), (20, 7, 2, 4), (13, 5, 1, 8)],
)
def test_convolutions_are_exact(
    size: int, kernel: int, stride: int, depth: int, tmp_path: Path
) -> None:
    task = convolution(size, kernel, stride, depth)
    cuts = list(template_of(task).tiles())
    every = {cut.merged: cut for cut in cuts}  # one of each
    chosen = {*every.values(), *random.Random(3).sample(cuts, 8), min(cuts)}
    require_exact(task, sorted(chosen), right_of(task, stride), tmp_path)


@pytest.mark.skipif(not HAS_AMX, reason=WITHOUT)
@pytest.mark.parametrize("cores", [1, 3])
def test_cores_have_parts_of_any_size(cores: int, tmp_path: Path) -> None:
    task = matrix(100, 64, 32, cores)
    require_exact(task, list(template_of(task).tiles())[:6], right_of(task), tmp_path)


def test_taps_side_by_side_fill_a_row_of_a_tile() -> None:
    assert template_of(convolution(20, 7, 2, 4)).depth == 28
    assert template_of(convolution(15, 3, 1, 12)).depth == 36
    assert template_of(convolution(7, 3, 1, 64)).depth == 64
    assert template_of(convolution(14, 1, 2, 20)).depth == 20


def test_an_image_is_one_line_with_its_padding() -> None:
    template = template_of(convolution(7, 3, 1, 64))
    assert {cut.merged for cut in template.tiles()} == {1, 2, 3}
    line = template.line(2)
    assert line.padded == (7, 9)
    assert line.length == 6 * 9 + 7


def test_a_cpu_without_amx_gets_none() -> None:
    load_tvm()
    task = matrix(32, 64, 32)
    older = TargetSpec("llvm", json.dumps({"kind": "llvm", "mcpu": "cascadelake"}))
    other = replace(task, target=older)
    templates = VnniSource().templates_of(other)
    assert AMX not in templates
    mod = default_schedule(module_of(other), make_target(older))
    assert not uses_tiles(mod)


def test_by_default_amx_is_used_where_the_estimate_says_so() -> None:
    task = matrix(128, 256, 64)
    mod = default_schedule(module_of(task), make_target(task.target))
    assert uses_tiles(mod)


def test_the_instructions_are_in_the_code() -> None:
    import tvm

    task = matrix(128, 256, 64)
    cut = AmxCut(1, 2, 2, 1)
    mod = VnniSource().lower(task, Recipe(AMX, cut).text).mod
    code = str(tvm.tirx.build(mod, target=make_target(task.target)).inspect_source("asm"))
    assert code.count("ldtilecfg") == code.count("tilerelease") == 1
    assert code.count("tdpbusd") % 4 == 0 < code.count("tdpbusd")


@pytest.mark.parametrize(
    ("flags", "why"),
    [("fma amx_tile", "use amx-int8, and this CPU"), ("fma amx_tile amx_int8", "use AMX, which")],
)
def test_an_artifact_says_what_its_kernels_use_that_is_not_here(
    flags: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "permitted", lambda: False)
    monkeypatch.setattr(device, "cpu_field", lambda _: flags)
    device.enable({})
    device.enable({"cpu_features": ["fma"]})
    with pytest.raises(LoadError, match=rf"{why}.*tune the model"):
        device.enable({"cpu_features": ["fma", *amx.FEATURES]})
    monkeypatch.setattr(device, "cpu_field", lambda _: "fma amx_tile amx_int8")
    monkeypatch.setattr(amx, "permitted", lambda: True)
    device.enable({"cpu_features": ["fma", *amx.FEATURES]})


def test_a_target_has_no_amx_where_it_is_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunerd.candidates.registers import units

    load_tvm()
    monkeypatch.setattr(amx, "permitted", lambda: False)
    assert not units.has_tiles(make_target(cpu_target_json(1)))
