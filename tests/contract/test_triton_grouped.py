"""Convolutions in groups on tensor cores: a group alone, or several as one with zeros between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.contract.test_triton import conv, kernels, require_agreement, task_of
from tests.contract.test_triton_tenants import accesses, compiled_ptx, require_equal_bits
from tests.lib import IS_NIGHTLY
from tests.lib.build_fixtures import task_of as task_of_tensors
from tests.lib.on_a_gpu import disagreements, in_own_process
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.triton.grouped import Grouped, GroupedTile
from tunerd.candidates.triton.source import Recipe, lowered, templates_of
from tunerd.slices import plan
from tunerd.system.targets import cuda_target
from tunerd.testing.sources import for_gpu
from tunerd.vocabulary import TRITON, Candidate, SliceRequest, TargetSpec, Task

Sizes = tuple[list[Any], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]


def grouped(groups: int, depth: int, columns: int, taps: int, **attributes: Any) -> Sizes:
    """Return a convolution of so many groups, each from `depth` channels to `columns`."""
    nodes = conv(group=groups, **{"pads": [taps // 2] * 4} | attributes)()
    weights = {"w": (groups * columns, depth, taps, taps), "b": (groups * columns,)}
    return nodes, {"x": (1, groups * depth, 9, 7)}, weights


CASES: dict[str, Sizes] = {
    "4 channels in each": grouped(8, 4, 4, 3),
    "8 channels, and groups that no pair divides": grouped(5, 8, 8, 3),
    "strided, of 24 channels": grouped(3, 24, 24, 3, strides=[2, 2]),
    "dilated, of unlike channels": grouped(2, 16, 32, 3, pads=[2, 2, 2, 2], dilations=[2, 2]),
    "one tap, of 20 channels": grouped(4, 12, 20, 1),
    "5 groups of 4 channels": grouped(5, 4, 4, 3),
    "of a signal, its channels first": (
        conv(group=4, pads=[3, 3])(),
        {"x": (1, 64, 21)},
        {"w": (80, 16, 7), "b": (80,)},
    ),
    "with a residual": (
        [
            ("Conv", ["x", "w", "b"], "c", {"group": 4, "pads": [1, 1, 1, 1]}),
            ("Add", ["c", "r"], "s", {}),
            ("Relu", ["s"], "y", {}),
        ],
        {"x": (2, 32, 6, 5), "r": (2, 32, 6, 5)},
        {"w": (32, 8, 3, 3), "b": (32,)},
    ),
}
PRECISIONS = ("fp16", "bf16", "tf32")
ON_A_GPU = (
    "4 channels in each",
    "8 channels, and groups that no pair divides",
    "strided, of 24 channels",
    "with a residual",
)


@pytest.fixture(scope="module")
def tvm() -> Any:
    return load_tvm()


def grouped_task(case: str, precision: str) -> tuple[Task, Grouped]:
    nodes, inputs, weights = CASES[case]
    task = task_of(nodes, inputs, weights, precision=precision)
    return task, template_of(task)


def template_of(task: Task) -> Grouped:
    templates = templates_of(task)
    assert not isinstance(templates, str), templates
    template = templates["grouped"]
    assert isinstance(template, Grouped)
    return template


def sample(template: Grouped, seed: int = 0) -> Iterator[GroupedTile]:
    """Yield a cut of each kind: of so many groups, of steps of a tap or several, split or not."""
    kinds: dict[tuple[int, int, bool], list[GroupedTile]] = {}
    for cut in template.tiles():
        kinds.setdefault((cut.groups, cut.fills_steps, cut.splits > 1), []).append(cut)
    for _, cuts in sorted(kinds.items()):
        yield random.Random(seed).choice(cuts)


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (case, precision)
        for nth, case in enumerate(CASES)
        for precision in (
            PRECISIONS if IS_NIGHTLY else dict.fromkeys(("fp16", PRECISIONS[nth % 3]))
        )
    ],
)
def test_a_kernel_of_groups_computes_its_task(case: str, precision: str, tvm: Any) -> None:
    task, template = grouped_task(case, precision)
    for cut in sample(template):
        require_agreement(task, template, cut, tvm, backwards=cut.splits > 1)


def test_products_of_few_channels_take_several_groups_as_one(tvm: Any) -> None:
    for case, counts in {
        "4 channels in each": {4, 8},
        "8 channels, and groups that no pair divides": {1, 2, 4, 5},
        "strided, of 24 channels": {1, 2},
        "5 groups of 4 channels": {4, 5},
    }.items():
        _, template = grouped_task(case, "fp16")
        assert {cut.groups for cut in template.tiles()} == counts, case


def test_images_in_groups_are_left_to_tensor_cores(tvm: Any) -> None:
    for case, (_, inputs, _) in CASES.items():
        task, _ = grouped_task(case, "fp16")
        others = {"product"} if len(inputs["x"]) == 3 else set()  # its products have one row
        assert set(templates_of(task)) == {"grouped"} | others, case


def test_weights_that_are_no_constants_are_multiplied_alike(tvm: Any) -> None:
    task, _ = grouped_task("4 channels in each", "tf32")
    task = replace(task, weight_args=())
    for cut in sample(template_of(task), 1):
        require_agreement(task, template_of(task), cut, tvm)


@pytest.mark.parametrize("case", ["5 groups of 4 channels", "strided, of 24 channels"])
def test_each_lane_has_the_groups_of_its_tenant(case: str, tvm: Any) -> None:
    task, template = grouped_task(case, "fp16")
    for cut in sample(template, 2):
        require_equal_bits(task, template, cut)


def test_groups_whose_channels_alternate_are_taken_one_by_one(tvm: Any) -> None:
    from tvm import te

    x, w = te.placeholder((32, 64), "float16", "x"), te.placeholder((16, 64), "float16", "w")
    k = te.reduce_axis((0, 16), "k")

    def of(i: Any, c: Any) -> Any:
        product = x[i, k * 4 + c // 16].astype("float32") * w[k, c].astype("float32")
        return te.sum(product, axis=k)

    made = for_gpu(task_of_tensors([x, w, te.compute((32, 64), of, "y")]), cuda_target("9.0"))
    task = replace(made, precision="fp16", weight_args=(1,))
    template = template_of(task)
    assert {cut.groups for cut in template.tiles()} == {1}
    for cut in sample(template):
        require_agreement(task, template, cut, tvm)


def test_a_recipe_says_how_many_groups_are_taken_as_one(tvm: Any) -> None:
    _, template = grouped_task("4 channels in each", "fp16")
    recipes = {Recipe("grouped", cut).text: cut for cut in template.tiles()}
    for text, cut in recipes.items():
        assert Recipe.parse(text) == Recipe("grouped", cut)
    assert len(recipes) == len(list(template.tiles()))


def test_what_is_tried_first_takes_groups_and_fills_steps_in_several_ways(tvm: Any) -> None:
    task, _ = between(32, 128, 56)
    search = registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1, sms=52))
    cuts = [Recipe.parse(c.recipe).cut for c in search.propose(task, 12).candidates]
    assert len({cut.groups for cut in cuts}) > 1
    assert {cut.fills_steps for cut in cuts} == {0, 1}


# --- what is compiled --------------------------------------------------------------------------


def between(groups: int, channels: int, size: int) -> tuple[Task, Grouped]:
    """Return a convolution of 3x3 in groups in fp16, between others."""
    nodes: list[Any] = [
        ("Conv", ["x", "u"], "a", {}),
        ("Conv", ["a", "w", "b"], "c", {"group": groups, "pads": [1, 1, 1, 1]}),
        ("Relu", ["c"], "r", {}),
        ("Conv", ["r", "v"], "y", {}),
    ]
    weights = {"u": (channels, 16, 1, 1), "b": (channels,), "v": (16, channels, 1, 1)}
    weights["w"] = (channels, channels // groups, 3, 3)
    found = kernels(nodes, {"x": (1, 16, size, size)}, weights, precision="fp16")
    (task,) = (t for t in found.tasks if "grouped" in templates_of(t))
    return task, template_of(task)


@pytest.mark.parametrize(
    ("groups", "channels", "size"),
    [(32, 128, 56), (32, 256, 28), (14, 336, 14), (13, 104, 28)],
    ids=["of 4", "of 8", "of 24", "of 8, ragged"],
)
def test_images_of_groups_are_copied_by_16_bytes_to_tensor_cores(
    groups: int, channels: int, size: int, monkeypatch: pytest.MonkeyPatch, tvm: Any
) -> None:
    ptx = compiled_ptx(monkeypatch)
    task, template = between(groups, channels, size)
    ranked = sorted(template.tiles(), key=lambda cut: template.estimated_secs(cut, 52))
    best = {(cut.groups, cut.fills_steps): cut for cut in reversed(ranked)}
    for cut in best.values():
        ptx.clear()
        lowered(task, template, Recipe("grouped", cut))
        found = accesses(ptx[0])
        assert any(name.startswith(("wgmma", "mma.sync")) for name in found), cut
        threads = 32 * cut.warps
        of_image = cut.rows * cut.depth // (8 * threads)  # copies of 8 values
        assert found["copy of 0x10"] >= of_image * max(1, cut.stages - 1), found
        assert not [name for name in found if name.startswith("ld.global") and "b16" in name]


# --- on a GPU ----------------------------------------------------------------------------------


def cases_for(target: TargetSpec) -> list[tuple[Task, list[Candidate]]]:
    cases = []
    for case, precision in zip(ON_A_GPU, (*PRECISIONS, "fp16"), strict=True):
        task = replace(grouped_task(case, precision)[0], target=target)
        # The other kinds split, and fill steps.
        cuts = [c for c in sample(template_of(task), 3) if not (c.splits > 1 and c.fills_steps)]
        cases.append((task, [candidate_of(task, cut) for cut in cuts]))
    return cases


def candidate_of(task: Task, cut: GroupedTile) -> Candidate:
    return Candidate.of_recipe(task.task_id, Recipe("grouped", cut).text, source=TRITON)


@pytest.mark.gpu
def test_groups_on_tensor_cores_compute_what_the_default_computes() -> None:
    pytest.importorskip("triton")
    cases = cases_for(plan(SliceRequest("whole", 100)).target)
    assert in_own_process(disagreements, cases) == []
