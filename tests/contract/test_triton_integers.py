"""Quantized products on tensor cores: in integers of 8 bits, or widened to fp16."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.contract.test_integers import MODELS, Graph, product
from tests.contract.test_triton import require_agreement
from tests.contract.test_triton_tenants import accesses, compiled_ptx
from tests.lib.lowered import load
from tunerd.builder.library import load_tvm
from tunerd.candidates.triton.integers import IntegerTile
from tunerd.candidates.triton.source import Recipe, Template, lowered, templates_of
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import Task

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def tvm() -> Any:
    return load_tvm()


def tasks_of(
    of: str | onnx.ModelProto, folder: Path, precision: str = "fp16"
) -> list[tuple[Task, Any]]:
    """Return the tasks of a model that multiply integers, with their templates."""
    proto = MODELS[of][0]() if isinstance(of, str) else of
    model = replace(load(folder, proto), precision=precision)
    target = cuda_target("9.0")
    graph = lower(model, target)
    assert any("integers of 8 bits" in note for note in graph.notes)
    found = []
    for task in extract_tasks(graph, target, precision=precision):
        templates = templates_of(task)
        if not isinstance(templates, str) and "integers" in templates:
            found.append((task, templates))
    assert found, of
    return found


def sample(template: Template) -> list[Any]:
    """Return a cut of each kind: of integers and widened, whole and split."""
    by_kind: dict[tuple[int, bool], list[Any]] = {}
    for cut in template.tiles():
        by_kind.setdefault((getattr(cut, "is_wide", 0), getattr(cut, "splits", 1) > 1), []).append(
            cut
        )
    return [random.Random(4).choice(cuts) for _, cuts in sorted(by_kind.items())]


@pytest.mark.parametrize("name", MODELS)
def test_a_kernel_of_integers_computes_what_tvm_does(name: str, tmp_path: Path, tvm: Any) -> None:
    for task, templates in tasks_of(name, tmp_path):
        for template in templates.values():
            for cut in sample(template):
                require_agreement(task, template, cut, tvm)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_any_precision_of_tensor_cores_has_them(precision: str, tmp_path: Path, tvm: Any) -> None:
    for task, templates in tasks_of("int8", tmp_path, precision):
        for cut in sample(templates["integers"]):
            require_agreement(task, templates["integers"], cut, tvm)


def test_instructions_are_of_8_bits_where_a_cut_says_so(
    tmp_path: Path, tvm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx = compiled_ptx(monkeypatch)
    (task, templates), *_ = tasks_of("int8", tmp_path)
    tall = [c for c in templates["integers"].tiles() if c.rows == 64 and c.splits == 1]
    for is_wide, expected in ((0, r"wgmma\S*s32\.s8\.s8"), (1, r"wgmma\S*f32\.f16\.f16")):
        cut = next(c for c in tall if c.is_wide == is_wide)
        lowered(task, templates["integers"], Recipe("integers", cut))
        assert re.search(expected, ptx[-1]), cut


def test_what_is_copied_is_multiplied_as_it_is(
    tmp_path: Path, tvm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = Graph()
    weight = b("DequantizeLinear", b.whole(64, 64, 3, 3), np.float32(0.002), np.int8(0))
    x = b.fake("x", np.uint8, 0)  # of which padding with zero points is not zero in int8
    y = b.fake(b("Conv", x, weight, pads=[1, 1, 1, 1]), np.uint8, 0)
    ptx = compiled_ptx(monkeypatch)
    ((task, templates),) = tasks_of(b.proto(y, {"x": (1, 64, 14, 14)}), tmp_path)
    cut = IntegerTile(64, 64, 64, stages=3)
    lowered(task, templates["integers"], Recipe("integers", cut))
    copies = accesses(ptx[-1])
    assert copies["copy of 0x10"] == 3 * 2 * 2  # of each thread: stages, operands, their bytes
    operands = re.findall(r"wgmma\.mma\S*s32\.s8\.s8 \{[^}]*\}, (\S+), (\S+),", ptx[-1])
    assert operands
    assert all(o.startswith("%rd") for pair in operands for o in pair)


def test_a_recipe_says_in_which_arithmetic_it_is() -> None:
    cut = IntegerTile(64, 32, 64, splits=2, is_wide=1)
    recipe = Recipe("integers", cut)
    assert Recipe.parse(recipe.text) == recipe


def test_sums_beyond_what_fp32_holds_are_never_widened(tmp_path: Path, tvm: Any) -> None:
    template = tasks_of("a product", tmp_path)[0][1]["integers"]
    assert {c.is_wide for c in template.tiles()} == {0, 1}
    axes = tuple(replace(axis, extent=4096) for axis in template.depth_axes)
    assert {c.is_wide for c in replace(template, depth_axes=axes).tiles()} == {0}


def test_fp32_computes_in_floats(tmp_path: Path, tvm: Any) -> None:
    model = load(tmp_path, product(np.uint8, 77))
    graph = lower(model, cuda_target("9.0"))
    assert not any("integers of 8 bits" in note for note in graph.notes)
