"""Products of fp32 in a CPU's vector registers: what the template takes, and what a cut gives."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.build_fixtures import built, conv_task
from tests.lib.models import floats
from tests.lib.super_models import require_right_alone_and_beside, two_convolutions
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import BATCH, ENTRY, SearchSettings, module_of
from tunerd.candidates.default import default_schedule
from tunerd.candidates.nests.blocks import blocks_of
from tunerd.candidates.registers.source import PACKED, TEMPLATE, WINOGRAD, FmaSource, Recipe
from tunerd.candidates.registers.sums import Cut, Sums
from tunerd.system.cores import cpu_field
from tunerd.system.targets import cpu_target_json
from tunerd.testing.kernels import matmul_task, task_of
from tunerd.testing.sources import ran, ran_in_plain_loops
from tunerd.vocabulary import (
    FMA,
    Candidate,
    Layout,
    TargetSpec,
    Task,
    default_candidate,
)

SOURCE = FmaSource()


def llvm(mcpu: str, *, cores: int = 2, **more: str) -> TargetSpec:
    described = {"kind": "llvm", "mcpu": mcpu, "num-cores": cores, **more}
    return TargetSpec("llvm", json.dumps(described))


def convolution(target: TargetSpec, *, size: int, kernel: int, stride: int, out: int) -> Task:
    """Return a convolution of 12 channels with its padding and a bias."""
    load_tvm()
    from tvm import te, topi

    data = te.placeholder((1, size, size, 12), name="data")
    weight = te.placeholder((kernel, kernel, 12, out), name="weight")
    bias = te.placeholder((out,), name="bias")
    sums = topi.nn.conv2d_nhwc(data, weight, stride, kernel // 2, 1)
    return task_of([data, weight, bias, topi.nn.relu(topi.add(sums, bias))], target)


def products_apart(target: TargetSpec) -> Task:
    """Return three products, each with weights of its own."""
    load_tvm()
    from tvm import te, topi

    left = te.placeholder((3, 14, 20), name="left")
    right = te.placeholder((3, 20, 32), name="right")
    product = topi.nn.batch_matmul(left, right, transpose_b=False)
    return task_of([left, right, topi.exp(product)], target)


def one_row(target: TargetSpec) -> Task:
    """Return a product with a vector, and what reads all of its result."""
    load_tvm()
    from tvm import te, topi

    left = te.placeholder((1, 40), name="left")
    right = te.placeholder((40, 1000), name="right")
    return task_of([left, right, topi.nn.matmul(left, right)], target)


def in_groups(target: TargetSpec, *, groups: int, columns: int, kernel: int = 1) -> Task:
    """Return a convolution in groups of 6 channels, with a bias, a second operand and a ReLU."""
    load_tvm()
    from tvm import te, topi

    every = groups * columns
    depth = 6 if columns > 1 else 1
    data = te.placeholder((1, 8, 9, groups * depth), name="data")
    weight = te.placeholder((kernel, kernel, depth, every), name="weight")
    bias = te.placeholder((every,), name="bias")
    beside = te.placeholder((1, 8, 9, every), name="beside")
    sums = topi.nn.conv(
        data, weight, 1, kernel // 2, 1, groups, data_layout="NHWC", kernel_layout="HWIO"
    )
    added = topi.add(topi.add(sums, bias), beside)
    return task_of([data, weight, bias, beside, topi.nn.relu(added)], target)


def odd_columns(target: TargetSpec, columns: int) -> Task:
    load_tvm()
    from tvm import te, topi

    left = te.placeholder((8, 16), name="left")
    right = te.placeholder((16, columns), name="right")
    return task_of([left, right, topi.nn.matmul(left, right)], target)


def moved_behind(target: TargetSpec) -> Task:
    """Return a square product of which the transpose is read: not place by place."""
    load_tvm()
    from tvm import te, topi

    left = te.placeholder((20, 20), name="left")
    right = te.placeholder((20, 20), name="right")
    product = topi.nn.relu(topi.nn.matmul(left, right))
    return task_of([left, right, topi.exp(topi.transpose(product))], target)


def square(target: TargetSpec) -> Task:
    """Return a product whose operands are as large as it is, and behind which is nothing."""
    load_tvm()
    from tvm import te, topi

    left = te.placeholder((32, 32), name="left")
    right = te.placeholder((32, 32), name="right")
    return task_of([left, right, topi.nn.matmul(left, right)], target)


TASKS: dict[str, Callable[[TargetSpec], Task]] = {
    "3x3 and a bias": conv_task,
    "1x1": lambda target: convolution(target, size=14, kernel=1, stride=1, out=48),
    "stride": lambda target: convolution(target, size=15, kernel=3, stride=2, out=32),
    "columns of half a vector": lambda target: convolution(
        target, size=7, kernel=3, stride=1, out=24
    ),
    "a product": matmul_task,
    "products apart": products_apart,
    "one row": one_row,
    "an odd number": lambda target: odd_columns(target, 31),
    "five columns": lambda target: odd_columns(target, 5),
    "groups of 17": lambda target: in_groups(target, groups=4, columns=17),
    "groups of 32": lambda target: in_groups(target, groups=3, columns=32, kernel=3),
    "groups of 7": lambda target: in_groups(target, groups=2, columns=7, kernel=3),
    "a column a group": lambda target: in_groups(target, groups=48, columns=1, kernel=3),
    "42 columns, each a group": lambda target: in_groups(target, groups=42, columns=1, kernel=3),
    "moved behind": moved_behind,
    "a square product": square,
}


def result_of(task: Task, candidate: Candidate, folder: Path) -> np.ndarray:
    own = folder / candidate.candidate_id
    own.mkdir()
    return np.asarray(ran(built(build_candidate(task, candidate)), task, own))


def right_of(task: Task, folder: Path) -> np.ndarray:
    apart = folder / "plain"
    apart.mkdir()
    return np.asarray(ran_in_plain_loops(task, apart))


def templates_of(task: Task) -> dict[str, Sums]:
    """Return the templates that compute each product, all but Winograd's."""
    templates = SOURCE.templates_of(task)
    assert not isinstance(templates, str), templates
    return {name: of for name, of in templates.items() if isinstance(of, Sums)}


def sums_of(task: Task) -> Sums:
    return templates_of(task)[TEMPLATE]


@pytest.mark.parametrize("name", TASKS)
def test_each_way_to_cut_computes_what_plain_loops_do(name: str, tmp_path: Path) -> None:
    task = replace(TASKS[name](cpu_target_json(2)), weight_args=(1,))
    right = right_of(task, tmp_path)
    for template, sums in templates_of(task).items():
        cuts = list(sums.tiles())
        for cut in {*random.Random(3).sample(cuts, min(4, len(cuts))), min(cuts), max(cuts)}:
            recipe = Recipe(template, cut).text
            candidate = Candidate.of_recipe(task.task_id, recipe, source=FMA)
            got = result_of(task, candidate, tmp_path)
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


def test_a_kernel_reads_its_weights_where_their_layout_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(TASKS["3x3 and a bias"](cpu_target_json(2)), weight_args=(1,))
    right = right_of(task, tmp_path)
    templates = templates_of(task)
    cut = min(templates[PACKED].tiles())
    ((number, panels),) = templates[PACKED].layouts(cut)
    *outer, last = panels.axes
    other = Layout(panels.split, (*reversed(outer), last))
    monkeypatch.setattr(Sums, "layouts", lambda *_: ((number, other),))
    recipe = Recipe(PACKED, cut).text
    got = result_of(task, Candidate.of_recipe(task.task_id, recipe, source=FMA), tmp_path)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not {"avx2", "fma"} <= {*cpu_field("flags").split()}, reason="no AVX2 or no FMA here"
)
@pytest.mark.parametrize("name", ["3x3 and a bias", "a product"])
def test_a_cut_for_shorter_vectors_computes_the_same(name: str, tmp_path: Path) -> None:
    task = replace(TASKS[name](llvm("haswell")), weight_args=(1,))
    right = right_of(task, tmp_path)
    proposed = SOURCE.search(SearchSettings(seed=1, threads=1)).propose(task, 1000).candidates
    found = [each for each in proposed if WINOGRAD not in each.recipe][:BATCH]
    assert len(found) == BATCH
    for candidate in found:
        got = result_of(task, candidate, tmp_path)
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_by_default_sums_are_cut_as_the_estimate_says(name: str, tmp_path: Path) -> None:
    task = TASKS[name](cpu_target_json(2))
    every = [
        (sums.estimated_secs(cut, 0.0), sums, cut)
        for sums in templates_of(task).values()
        for cut in sums.tiles()
    ]
    best = min(secs for secs, _, _ in every)
    mod = module_of(task)
    made = default_schedule(mod, tvm_target(task))
    assert made[ENTRY].attrs["tirx.is_scheduled"]
    fitting = [(sums, cut) for secs, sums, cut in every if secs == best]
    assert any(same_code(sums.scheduled(mod, cut), made) for sums, cut in fitting)
    assert default_schedule(made, tvm_target(task)) is made
    got = result_of(task, default_candidate(task), tmp_path)
    np.testing.assert_allclose(got, right_of(task, tmp_path), rtol=1e-5, atol=1e-5)


def shuffled(target: TargetSpec) -> Task:
    """Return a shuffle of channels, as networks write it, and what is added to it."""
    load_tvm()
    from tvm import te, topi

    data = te.placeholder((1, 5, 6, 12), name="data")
    last = topi.transpose(data, (0, 3, 1, 2))
    apart = topi.transpose(topi.reshape(last, (1, 3, 4, 5, 6)), (0, 2, 1, 3, 4))
    made = topi.transpose(topi.reshape(apart, (1, 12, 5, 6)), (0, 2, 3, 1))
    return task_of([data, topi.add(made, data)], target)


def test_by_default_what_is_read_once_is_no_loop_of_its_own(tmp_path: Path) -> None:
    task = shuffled(cpu_target_json(2))
    made = default_schedule(module_of(task), tvm_target(task))
    assert len(blocks_of(module_of(task)[ENTRY])) > len(blocks_of(made[ENTRY])) == 1
    got = result_of(task, default_candidate(task), tmp_path)
    np.testing.assert_array_equal(got, right_of(task, tmp_path))


def test_by_default_what_is_read_more_than_once_is_computed_once(tmp_path: Path) -> None:
    load_tvm()
    from tvm import te, topi

    data = te.placeholder((8, 40), name="data")
    once = topi.exp(data)
    both = te.compute((8, 39), lambda i, j: once[i, j] * once[i, j + 1])
    task = task_of([data, topi.add(both, topi.sum(once))], cpu_target_json(2))
    made = default_schedule(module_of(task), tvm_target(task))
    assert len(blocks_of(made[ENTRY])) == 3  # the exponential, its sum, and all else
    got = result_of(task, default_candidate(task), tmp_path)
    np.testing.assert_allclose(got, right_of(task, tmp_path), rtol=1e-5)


def test_by_default_what_has_no_sums_stays_as_it_is() -> None:
    load_tvm()
    from tvm import te, topi

    target = cpu_target_json(2)
    data = te.placeholder((8, 40), name="data")
    task = task_of([data, topi.exp(data)], target)
    mod = module_of(task)
    assert default_schedule(mod, tvm_target(task)) is mod


def tvm_target(task: Task) -> Any:
    import tvm

    return tvm.target.Target(task.target.json)


def same_code(one: Any, other: Any) -> bool:
    import tvm_ffi

    mark = "tirx.is_scheduled"
    return bool(
        tvm_ffi.structural_equal(one[ENTRY].without_attr(mark), other[ENTRY].without_attr(mark))
    )


def test_by_default_weights_of_one_model_are_packed(tmp_path: Path) -> None:
    wide = convolution(cpu_target_json(2), size=6, kernel=1, stride=1, out=512)
    task = replace(wide, weight_args=(1,))
    lowered = registry.lower(task, default_candidate(task))
    assert [number for number, _ in lowered.layouts] == [1]
    got = result_of(task, default_candidate(task), tmp_path)
    np.testing.assert_allclose(got, right_of(task, tmp_path), rtol=1e-5, atol=1e-5)
    for other in (replace(task, weight_args=()), replace(task, tenants=2)):
        assert not registry.lower(other, default_candidate(other)).layouts
    assert not registry.lower(task, default_candidate(task), lanes=1).layouts


def test_weights_that_the_model_computes_are_not_packed() -> None:
    task = matmul_task(cpu_target_json(2))
    assert set(SOURCE.templates_of(task)) == {TEMPLATE}
    assert set(SOURCE.templates_of(replace(task, weight_args=(1,)))) == {TEMPLATE, PACKED}
    assert set(SOURCE.templates_of(replace(task, weight_args=(1,), tenants=2))) == {TEMPLATE}


def test_what_serves_several_models_takes_weights_as_each_has_them() -> None:
    task = replace(matmul_task(cpu_target_json(2)), weight_args=(1,))
    found = SOURCE.search(SearchSettings(seed=0, threads=1)).propose(task, 100).candidates
    packed = next(c for c in found if PACKED in c.recipe)
    assert SOURCE.lower(task, packed.recipe).layouts
    assert not SOURCE.lower(task, packed.recipe, lanes=1).layouts


@pytest.mark.parametrize(("is_tuned", "columns"), [(True, 32), (False, 512)])
def test_a_model_takes_its_weights_packed(is_tuned: bool, columns: int, tmp_path: Path) -> None:
    model = two_convolutions(
        floats(columns, 8, 3, 3, seed=1) / 9, floats(4, columns, 1, 1, seed=2) / columns**0.5
    )
    winners = []

    def winner_of(task: Task) -> Candidate | None:
        if not is_tuned or SOURCE.takes(task) is not None:
            return None
        found = SOURCE.search(SearchSettings(seed=0, threads=1)).propose(task, 100).candidates
        winners.append(next((c for c in found if PACKED in c.recipe), found[0]))
        return winners[-1]

    manifest = require_right_alone_and_beside(
        model, tmp_path, cpu_target_json(2), winner_of, tolerance=1e-5
    )
    assert len(winners) == (2 if is_tuned else 0)
    kept, packed = manifest["weights"]
    assert kept == "weight_1"
    assert re.fullmatch(r"weight_0_3x3x8x\d+x\d+_30124", packed)


@pytest.mark.parametrize(
    ("target", "instruction", "register"),
    [
        (llvm("cascadelake"), "vfmadd", "%zmm"),
        (llvm("znver4"), "vfmadd", "%zmm"),
        (llvm("haswell"), "vfmadd", "%ymm"),
        (llvm("neoverse-n1", mtriple="aarch64-linux-gnu"), "fmla", ".4s"),
    ],
    ids=["cascadelake", "znver4", "haswell", "neoverse"],
)
def test_sums_stay_in_the_widest_registers(
    target: TargetSpec, instruction: str, register: str
) -> None:
    for task in (conv_task(target), in_groups(target, groups=4, columns=34)):
        first = SOURCE.search(SearchSettings(seed=1, threads=1)).propose(task, 1).candidates[0]
        require_registers(SOURCE.lower(task, first.recipe).mod, target, instruction, register)


def require_registers(mod: Any, target: TargetSpec, instruction: str, register: str) -> None:
    import tvm

    code = tvm.tirx.build(mod, target=tvm.target.Target(target.json)).inspect_source("asm")
    multiplied = [line for line in code.splitlines() if instruction in line]
    assert multiplied
    assert all(register in line for line in multiplied)
    assert "Spill" not in code


def test_packed_weights_are_asked_for_ahead() -> None:
    import tvm

    target = llvm("cascadelake")
    task = replace(convolution(target, size=6, kernel=3, stride=1, out=64), weight_args=(1,))
    for template, sums in templates_of(task).items():
        cut = min(sums.tiles(), key=lambda cut: sums.estimated_secs(cut, 0.0))
        mod = SOURCE.lower(task, Recipe(template, cut).text).mod
        code = tvm.tirx.build(mod, target=tvm.target.Target(target.json)).inspect_source("asm")
        asked = code.count("prefetcht0")
        assert asked % cut.vectors == 0 < asked if template == PACKED else asked == 0


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("template", [TEMPLATE, PACKED])
def test_sums_are_stored_behind_the_loop_over_their_depth(template: str, cores: int) -> None:
    import tvm

    target = llvm("cascadelake", cores=cores)
    task = replace(convolution(target, size=6, kernel=1, stride=1, out=64), weight_args=(1,))
    sums = templates_of(task)[template]
    cut = min(sums.tiles(), key=lambda cut: sums.estimated_secs(cut, 0.0))
    mod = SOURCE.lower(task, Recipe(template, cut).text).mod
    code = tvm.tirx.build(mod, target=tvm.target.Target(target.json)).inspect_source("ll")
    bodies = [body for body in code.split("\n\n") if "fmuladd" in body]
    assert bodies
    assert not any(" store " in body for body in bodies)


def test_what_is_added_to_a_tile_is_asked_for_when_it_begins() -> None:
    import tvm

    target = llvm("cascadelake")
    task = residual(target)
    cut = Cut(height=1, width=4, vectors=2, columns_outside=1)
    mod = SOURCE.lower(task, Recipe(TEMPLATE, cut).text).mod
    code = tvm.tirx.build(mod, target=tvm.target.Target(target.json)).inspect_source("asm")
    assert code.count("prefetcht0") == 8


def residual(target: TargetSpec) -> Task:
    """Return a 1x1 convolution, whose sums are added to a tensor of their size."""
    load_tvm()
    from tvm import te, topi

    data = te.placeholder((1, 8, 8, 16), name="data")
    weight = te.placeholder((1, 1, 16, 64), name="weight")
    beside = te.placeholder((1, 8, 8, 64), name="beside")
    sums = topi.nn.conv2d_nhwc(data, weight, 1, 0, 1)
    return task_of([data, weight, beside, topi.nn.relu(topi.add(sums, beside))], target)


def test_where_two_units_add_up_a_tile_has_enough_sums_for_both() -> None:
    def gain(cpu: str) -> float:
        """Return what twice the sums give, where each step takes as long as one is added to."""
        sums = sums_of(convolution(llvm(cpu), size=16, kernel=3, stride=1, out=64))
        eight, sixteen = (Cut(1, rows, 2, 0) for rows in (4, 8))
        return sums.estimated_secs(eight, 0.0) / sums.estimated_secs(sixteen, 0.0)

    assert gain("znver4") == gain("tigerlake") < 1.05
    assert gain("emeraldrapids") > 1.1


def test_no_tile_takes_more_registers_than_there_are() -> None:
    for mcpu, most, lanes in (("znver4", 32, 16), ("haswell", 16, 8)):
        sums = sums_of(conv_task(llvm(mcpu)))
        assert sums.unit.lanes == lanes
        used = [c.height * c.width * c.vectors + c.vectors for c in sums.tiles()]
        assert max(used) < most


def test_weights_of_their_own_are_loaded_once_a_tile_of_rows() -> None:
    assert all(cut.height == 1 for cut in sums_of(products_apart(cpu_target_json(2))).tiles())


def test_proposals_are_unlike_and_end() -> None:
    task = matmul_task(cpu_target_json(2))
    search = SOURCE.search(SearchSettings(seed=1, threads=1))
    seen: set[str] = set()
    while found := search.propose(task, BATCH).candidates:
        assert not seen & {c.recipe for c in found}
        seen |= {c.recipe for c in found}
    assert len(seen) == len(list(sums_of(task).tiles()))


def refused(name: str) -> Task:
    load_tvm()
    from tvm import te, topi

    target = cpu_target_json(2)
    data = te.placeholder((1, 9, 9, 16), name="data")
    left = te.placeholder((8, 16), name="left")
    if name == "depthwise":
        weight = te.placeholder((3, 3, 16, 1), name="weight")
        own = topi.nn.depthwise_conv2d_nhwc(data, weight, 1, 1, 1)
        return task_of([data, weight, own], target)
    if name == "weights by rows":
        right = te.placeholder((32, 16), name="right")
        return task_of([left, right, topi.nn.dense(left, right)], target)
    if name == "three columns":
        return odd_columns(target, 3)
    if name == "groups of two":
        return in_groups(target, groups=8, columns=2)
    if name == "a sum":
        return task_of([data, topi.sum(data, axis=3)], target)
    if name == "none at all":
        return task_of([data, topi.exp(data)], target)
    if name == "a GPU":
        gpu = TargetSpec("cuda", json.dumps({"kind": "cuda", "arch": "sm_90"}))
        return replace(matmul_task(target), target=gpu)
    return matmul_task(llvm("x86-64"))


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "depthwise": "its columns are not those of its weights",
        "weights by rows": "its columns are not those of its weights",
        "three columns": "its 3 columns fill no vectors",
        "groups of two": "its columns are in groups",
        "a sum": "it has no sums of products",
        "none at all": "it has no sums of products, or several",
        "a GPU": "FMA is a CPU's",
        "an old CPU": "its CPU has no vectors that multiply and add",
    }.items(),
)
def test_other_tasks_are_left_to_other_sources(name: str, reason: str) -> None:
    assert SOURCE.takes(refused(name)) == reason
