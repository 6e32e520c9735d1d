"""Triton's templates for several models of one architecture in one launch."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.test_attention import attention_task, exported, of_transformers
from tests.contract.test_triton import CASES, conv, task_of, with_precisions
from tests.lib import triton_in_numpy
from tests.lib.lowered import CUDA
from tests.lib.triton_in_numpy import Pointer
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.triton import tenants
from tunerd.candidates.triton.product import MAX_TILES
from tunerd.candidates.triton.source import Recipe, Template, lowered, templates_of
from tunerd.frontend.relax.lowering import lower
from tunerd.system.arrays import comparison_values, dtype_of
from tunerd.vocabulary import SLOT_BYTES, TRITON, Task, TensorSpec

LANES = [0, 3, 3, 1]  # the tenant of each; 2 is the base piece's, and nobody's
TENANTS, BASE = 4, 2


@pytest.mark.parametrize(("case", "precision"), with_precisions("bf16", "tf32"))
def test_each_lane_computes_what_a_kernel_of_its_tenant_does(case: str, precision: str) -> None:
    nodes, inputs, weights = CASES[case]
    several = 2 if precision == "fp16" else 1  # where a lane reads and writes is the same in each
    require_lanes(task_of(nodes, inputs, weights, precision=precision), cuts=several)


def test_each_lane_has_its_own_attention(tmp_path: Path) -> None:
    task = attention_task(lower(exported(of_transformers, tmp_path, "fp16"), CUDA), "fp16")
    require_lanes(task)
    require_lanes(replace(task, weight_args=(1,)))  # a mask that is a constant of the model


def require_lanes(task: Task, *, cuts: int = 2) -> None:
    """Run so many ways to cut each kernel, and one that splits its sum."""
    templates = templates_of(task)
    assert not isinstance(templates, str), templates
    for template in templates.values():
        tiles = list(template.tiles())
        split = [c for c in tiles if getattr(c, "splits", 1) > 1][:1]
        for cut in [*random.Random(2).sample(tiles, min(cuts, len(tiles))), *split]:
            require_equal_bits(task, template, cut)


def require_equal_bits(task: Task, template: Template, cut: Any) -> None:
    """Run a kernel's text for all lanes, and that for one model for each of them."""
    given = [[values(s, tenant, i) for i, s in enumerate(task.args)] for tenant in range(TENANTS)]
    memory, step, at = pieces(task, given)
    scratch: list[np.ndarray] = []
    if template.workspace(cut):
        scratch = [np.zeros(MAX_TILES, np.int32), np.zeros(template.workspace(cut), np.float32)]
    specs = (*task.args, *(TensorSpec("", s.shape, str(s.dtype)) for s in scratch))
    lanes: list[np.ndarray | Pointer] = [np.array([step * (t - BASE) for t in LANES], np.int32)]
    for i, spec in enumerate(specs):
        if i in task.weight_args:
            item = dtype_of(spec.dtype).itemsize
            whole = memory.view(dtype_of(spec.dtype))
            lanes.append(Pointer(whole, (BASE * step * SLOT_BYTES + at[i]) // item))
        elif i < len(task.args):
            # Lanes of one tenant differ in what they are given.
            lanes.append(np.stack([values(spec, 10 + lane, i) for lane in range(len(LANES))]))
        else:
            lanes.append(np.stack([scratch[i - len(task.args)]] * len(LANES)))
    launches = template.launches(cut, "kernel")
    for launch in launches:
        across, down, deep = launch.grid
        triton_in_numpy.run(
            tenants.text_for(launch.text, specs, task.weight_args, deep),
            launch.name,
            lanes,
            (across, down, deep * len(LANES)),
        )
    for lane, tenant in enumerate(LANES):
        alone = [
            given[tenant][i] if i in task.weight_args else values(spec, 10 + lane, i)
            for i, spec in enumerate(task.args)
        ]
        triton_in_numpy.run_all(launches, [*alone, *(s.copy() for s in scratch)])
        found = lanes[1 + len(task.args) - 1]
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found[lane], alone[-1], equal_nan=True), (cut, launches)
    if scratch:
        assert not lanes[-2].any(), "counters are not zero again"  # type: ignore[union-attr]


def values(spec: TensorSpec, seed: int, number: int) -> np.ndarray:
    own = replace(spec, dtype="float32") if spec.dtype == "bfloat16" else spec
    return comparison_values(own, seed, number).astype(dtype_of(spec.dtype))


def pieces(task: Task, given: list[list[np.ndarray]]) -> tuple[np.ndarray, int, dict[int, int]]:
    """Return all tenants' pieces, the size of each in slots, and where in it a weight lies."""
    at, end = {}, 0
    for i in task.weight_args:
        at[i] = end
        end += -(-given[0][i].nbytes // SLOT_BYTES) * SLOT_BYTES
    memory = np.full((TENANTS, end), 0xFF, np.uint8)  # what is no weight is no number
    for row, arrays in zip(memory, given, strict=True):
        for i, begin in at.items():
            row[begin : begin + arrays[i].nbytes] = arrays[i].reshape(-1).view(np.uint8)
    return memory.reshape(-1), end // SLOT_BYTES, at


# --- what is compiled --------------------------------------------------------------------------

SIZES: dict[str, tuple[list[Any], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "convolution": (
        conv(pads=[1, 1, 1, 1])(),
        {"x": (1, 64, 28, 28)},
        {"w": (64, 64, 3, 3), "b": (64,)},
    ),
    "matrix product": (
        [("MatMul", ["x", "w"], "m", {}), ("Add", ["m", "b"], "y", {})],
        {"x": (1, 128, 768)},
        {"w": (768, 768), "b": (768,)},
    ),
    "depthwise": (
        conv(pads=[1, 1, 1, 1], group=64)(),
        {"x": (1, 64, 14, 14)},
        {"w": (64, 1, 3, 3), "b": (64,)},
    ),
    "groups": (
        conv(pads=[1, 1, 1, 1], group=8)(),
        {"x": (1, 64, 28, 28)},
        {"w": (64, 8, 3, 3), "b": (64,)},
    ),
    "layer norm": (
        [("LayerNormalization", ["x", "s", "b"], "y", {"axis": -1})],
        {"x": (1, 50, 768)},
        {"s": (768,), "b": (768,)},
    ),
}


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return compiled_ptx(monkeypatch)


def compiled_ptx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that the PTX of what is compiled from now on comes to."""
    pytest.importorskip("triton")
    from tunerd.candidates.triton.compile import load

    triton, found = load(), []
    compiled = triton.compile

    def spied(*args: Any, **options: Any) -> Any:
        built = compiled(*args, **options)
        found.append(built.asm["ptx"])
        return built

    monkeypatch.setattr(triton, "compile", spied)
    return found


def accesses(ptx: str) -> Counter[str]:
    """Count loads, stores, copies with their bytes, and products of tensor cores."""
    found: Counter[str] = Counter()
    for line in ptx.splitlines():
        if match := re.search(r"\b(ld\.global|st\.global|wgmma\.mma_async|mma\.sync)[\w.:]*", line):
            found[match[0]] += 1
        elif match := re.search(r"cp\.async\.\w+\.shared.*?(0x\w+)", line):
            found[f"copy of {match[1]}"] += 1
    return found


@pytest.mark.parametrize("case", SIZES)
def test_lanes_load_as_much_at_once_as_one_model_does(case: str, ptx: list[str]) -> None:
    nodes, inputs, weights = SIZES[case]
    task = task_of(nodes, inputs, weights, precision="fp16")
    for name, template in templates_of(task).items():  # type: ignore[union-attr]
        cuts = list(template.tiles())
        for cut in random.Random(0).sample(cuts, 2):
            ptx.clear()
            for lanes in (None, 8):
                lowered(task, template, Recipe(name, cut), lanes=lanes)
            one, several = map(accesses, ptx)
            assert several - one == Counter({"ld.global.b32": 1}), cut  # the slot
            assert not one - several, cut


def test_no_vector_begins_where_a_lane_ends(ptx: list[str]) -> None:
    """Masks of ragged rows make vectors of one model as short as those of lanes need to be."""
    nodes = [("Relu", ["x"], "y", {})]
    task = task_of(nodes, {"x": (1, 3, 1002)}, {}, precision="fp32")
    template = templates_of(task)["loops"]  # type: ignore[index]
    for cut in [c for c in template.tiles() if c.columns == 1024][:4]:
        for lanes in (None, 2):
            lowered(task, template, Recipe("loops", cut), lanes=lanes)
    assert all("ld.global.v2" in text and ".v4" not in text for text in ptx)


# --- the convention ----------------------------------------------------------------------------


def split_product() -> tuple[Task, Template, Recipe]:
    nodes, inputs, weights = CASES["convolution"]
    task = task_of(nodes, inputs, weights, precision="fp16")
    template = templates_of(task)["product"]  # type: ignore[index]
    return task, template, Recipe("product", next(c for c in template.tiles() if c.splits > 1))


def test_a_kernel_takes_slots_then_weights_as_they_lie_and_rows_of_the_rest() -> None:
    pytest.importorskip("triton")
    task, template, recipe = split_product()
    found = lowered(task, template, recipe, lanes=4)
    x, w, b, y = (spec.shape for spec in task.args)
    shapes = [tuple(int(d) for d in p.ty.shape) for p in found.mod["main"].params]
    assert task.weight_args == (1, 2)
    assert shapes[:5] == [(4,), (4, *x), (int(np.prod(w)),), (int(np.prod(b)),), (4, *y)]
    assert shapes[5] == (4, MAX_TILES)
    assert [s.shape for s in found.scratch] == shapes[5:]
    assert len(found.kernels[0].types) == len(shapes) + 2


def test_a_kernel_is_named_by_how_many_lanes_it_has_and_what_their_weights_are() -> None:
    pytest.importorskip("triton")
    task, template, recipe = split_product()
    other = replace(task, weight_args=(1,))
    kernels = [
        *(lowered(task, template, recipe, lanes=n).kernels[0].symbol for n in (None, 1, 2)),
        lowered(other, template, recipe, lanes=2).kernels[0].symbol,
    ]
    assert len(set(kernels)) == 4


def test_lanes_that_no_grid_has_room_for_are_refused() -> None:
    pytest.importorskip("triton")
    task, template, recipe = split_product()
    with pytest.raises(ValueError, match="more blocks than a grid has"):
        lowered(task, template, recipe, lanes=1 << 16)


@pytest.mark.parametrize("case", ["convolution", "mean of an image", "softmax", "depthwise"])
def test_lanes_are_estimated_as_one_model_on_its_part_of_the_device(case: str) -> None:
    nodes, inputs, weights = CASES[case]
    task = task_of(nodes, inputs, weights, precision="fp16")
    for template in templates_of(task).values():  # type: ignore[union-attr]
        cut = next(iter(template.tiles()))
        assert template.estimated_secs(cut, 52 / 8) >= template.estimated_secs(cut, 52)
        assert template.features(cut, 52 / 8) != template.features(cut, 52)


def test_candidates_for_lanes_are_those_of_one_model_on_its_part_of_the_device() -> None:
    nodes, inputs, weights = SIZES["matrix product"]
    task = task_of(nodes, inputs, weights, precision="fp16")
    several = task.for_tenants(4)
    recipes = []
    for each, sms in ((task, 13), (several, 52), (task, 52)):
        search = registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1, sms=sms))
        recipes.append([c.recipe for c in search.propose(each, 12).candidates])
    assert recipes[0] == recipes[1] != recipes[2]
    assert templates_of(several) == templates_of(task)
