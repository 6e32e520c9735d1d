"""Kernels of Triton's templates on a GPU: each kind of kernel computes what the default does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.test_attention import FORMS, attention_task, exported
from tests.contract.test_triton import CASES, task_of
from tests.contract.test_triton_tma import FORMS as TMA_FORMS
from tests.lib.on_a_gpu import disagreements, in_own_process
from tunerd.candidates.triton.bulk import LEAST_ARCH
from tunerd.candidates.triton.source import Recipe, capability, templates_of
from tunerd.frontend.relax.lowering import lower
from tunerd.slices import plan
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import TRITON, Candidate, SliceRequest, TargetSpec, Task

pytestmark = pytest.mark.gpu

PRECISIONS = ("fp16", "bf16", "tf32")


def target() -> TargetSpec:
    return plan(SliceRequest("whole", 100)).target


def candidates_of(task: Task, only: str = "") -> Iterator[Candidate]:
    """Yield of each template the best cuts by its estimate, one by chance, and one that splits.

    only: the name of one template.
    """
    templates = templates_of(task, has_tma=True)
    assert not isinstance(templates, str), templates
    for name in [only] if only else templates:
        template = templates[name]
        ranked = sorted(template.tiles(), key=lambda cut: template.estimated_secs(cut, 132))
        chosen = [*ranked[:2], random.Random(0).choice(ranked)]
        chosen += [cut for cut in ranked if getattr(cut, "splits", 1) > 1][:1]
        for cut in dict.fromkeys(chosen):
            recipe = Recipe(name, cut).text
            yield Candidate.of_recipe(task.task_id, recipe, source=TRITON)


def case_of(task: Task, on: TargetSpec, only: str = "") -> tuple[Task, list[Candidate]]:
    placed = replace(task, target=on)
    return placed, list(candidates_of(placed, only))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_kind_of_kernel_computes_what_the_default_computes(precision: str) -> None:
    pytest.importorskip("triton")
    on = target()
    tasks = [
        task_of(nodes, inputs, weights, precision=precision)
        for nodes, inputs, weights in CASES.values()
    ]
    assert in_own_process(disagreements, [case_of(task, on) for task in tasks]) == []


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("form", TMA_FORMS)
def test_operands_by_tma_make_what_the_default_computes(form: str, precision: str) -> None:
    pytest.importorskip("triton")
    on = target()
    if capability(on) < LEAST_ARCH:
        pytest.skip("the GPU has no TMA")
    case = case_of(task_of(*TMA_FORMS[form], precision=precision), on, "tma")
    assert in_own_process(disagreements, [case]) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_computes_what_the_default_computes(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    on = target()
    cases = []
    for nth, form in enumerate(FORMS):
        (folder := tmp_path / str(nth)).mkdir()
        lowered = lower(exported(FORMS[form], folder, precision), cuda_target("9.0"))
        cases.append(case_of(attention_task(lowered, precision), on))
    assert in_own_process(disagreements, cases) == []
