"""Layer norms as part of the products that read them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.contract.test_attention import TOKENS, WIDTH, Builder, of_torchvision
from tests.contract.test_cuda_build import needs_nvrtc
from tests.contract.test_triton import require_agreement
from tests.contract.test_triton_tenants import accesses, compiled_ptx, require_equal_bits
from tests.lib.build_fixtures import built
from tests.lib.lowered import CUDA, LLVM, load, operators, run
from tests.lib.models import floats, model
from tests.lib.on_a_gpu import disagreements, in_own_process
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.triton.compile import UnsafePipeline, compile_kernel
from tunerd.candidates.triton.source import Recipe, Template, lowered, templates_of
from tunerd.candidates.triton.summed import SummedTile
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.slices import plan
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import (
    METASCHEDULE,
    TRITON,
    Build,
    Candidate,
    Model,
    SliceRequest,
    TargetSpec,
    Task,
    default_candidate,
)

Form = Callable[[Builder], str]
BATCH = 4  # so that rows are more than a few values


def exported(form: Form, tmp_path: Path, precision: str, batch: int = BATCH) -> Model:
    b = Builder()
    out = form(b)
    inputs = {"x": (batch, TOKENS, WIDTH)}
    proto = model(b.nodes, inputs=inputs, outputs={out: None}, weights=b.weights, opset=18)
    loaded = load(tmp_path, onnx.shape_inference.infer_shapes(proto))
    return replace(loaded, precision=precision)


def norm(b: Builder, x: str, depth: int = WIDTH, **scales: float) -> str:
    scale = floats(depth, seed=7) * np.float32(0.3) + np.float32(scales.get("scale", 1.0))
    shift = floats(depth, seed=8) * np.float32(scales.get("shift", 0.3))
    return b("LayerNormalization", x, scale, shift, axis=-1)


def feed_forward(b: Builder, x: str) -> str:
    h = b("Relu", b.linear(x, 4 * WIDTH, seed=3))
    return b.linear(h, WIDTH, depth=4 * WIDTH, seed=4)


def norm_first(b: Builder) -> str:
    """A part of a transformer as ViT has it."""
    x = b.linear("x", WIDTH, seed=1)
    return b("Add", x, feed_forward(b, norm(b, x)))


def norm_of_many(b: Builder) -> str:
    """Rows so long that a product may be split."""
    x = b.linear("x", 4 * WIDTH, seed=1)
    return b.linear(norm(b, x, 4 * WIDTH), WIDTH, depth=4 * WIDTH, seed=4)


def norm_last(b: Builder) -> str:
    """A part of a transformer as BERT has it."""
    x = norm(b, b.linear("x", WIDTH, seed=1))
    return b("Add", x, feed_forward(b, x))


def of_an_input(b: Builder) -> str:
    return feed_forward(b, norm(b, "x"))


def of_an_output(b: Builder) -> str:
    x = b("Relu", "x")
    b.linear(norm(b, x), WIDTH)
    return x


def with_an_offset(b: Builder) -> str:
    """Rows whose mean is some 20 times their deviation."""
    x = b("Add", b("Mul", b.linear("x", WIDTH, seed=1), np.float32(0.1)), np.float32(4.0))
    return feed_forward(b, norm(b, x))


def before_attention(b: Builder) -> str:
    x = norm(b, b("Relu", "x"))
    first = len(b.nodes)
    out = of_torchvision(b, BATCH)
    b.nodes[first].input[0] = x  # that which the residual is not taken from
    return out


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("form", [norm_first, with_an_offset, before_attention])
def test_a_norm_is_part_of_the_products_that_read_it(
    form: Form, precision: str, tmp_path: Path
) -> None:
    loaded = exported(form, tmp_path, precision)
    found = lower(loaded, CUDA)
    names = operators(found)
    assert not {n for n in names if "layer_norm" in n}, names
    assert {n for n in names if "norm_matmul" in n}, names
    feed = random_inputs(loaded.inputs, 0)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (got,) = run(found, feed)
    bound = {"fp16": 2e-3, "bf16": 2e-2}[precision]
    assert np.abs(got - expected).max() < bound * np.abs(expected).max()


def test_what_a_norm_shifts_is_part_of_the_bias(tmp_path: Path) -> None:
    task = norm_task(exported(norm_first, tmp_path, "fp16"))
    columns = [a for a in task.args if a.shape == (4 * WIDTH,)]
    assert len(columns) == 2  # the sums of the weights, and one bias
    assert task.weight_args == (1, 2, 3)


@pytest.mark.parametrize("form", [norm_last, of_an_input, of_an_output])
def test_a_norm_stays_that_something_else_reads_or_that_is_of_fp32(
    form: Form, tmp_path: Path
) -> None:
    names = operators(lower(exported(form, tmp_path, "fp16"), CUDA))
    assert not {n for n in names if "norm_matmul" in n}, names


@pytest.mark.parametrize("precision", ["tf32", "fp32", ""])
def test_a_norm_stays_where_what_it_is_of_has_all_its_digits(
    precision: str, tmp_path: Path
) -> None:
    names = operators(lower(exported(norm_first, tmp_path, precision), CUDA))
    assert "layer_norm" in names


def test_a_norm_stays_where_no_template_takes_the_product(tmp_path: Path) -> None:
    old = TargetSpec("cuda", CUDA.json.replace("sm_90", "sm_75"))
    assert "layer_norm" in operators(lower(exported(norm_first, tmp_path, "fp16"), old))


def test_a_norm_stays_on_cpus_and_of_few_rows(tmp_path: Path) -> None:
    assert "layer_norm" in operators(lower(exported(norm_first, tmp_path, "fp16"), LLVM))
    assert "layer_norm" in operators(lower(exported(norm_first, tmp_path, "fp16", 1), CUDA))


# --- the kernel --------------------------------------------------------------------------------


def norm_task(loaded: Model) -> Task:
    tasks = extract_tasks(lower(loaded, CUDA), CUDA, precision=loaded.precision)
    return next(t for t in tasks if "norm_matmul" in t.name)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_rows_are_summed_by_the_product_or_by_a_kernel_before_it(
    precision: str, tmp_path: Path
) -> None:
    task = norm_task(exported(norm_of_many, tmp_path, precision))
    template, inside, ahead = ways_of(task)
    assert not [c for c in inside if c.splits > 1]  # no block would see a whole row
    split = [c for c in ahead if c.splits > 1]
    draw = random.Random(0)
    for cut in (*draw.sample(inside, 3), *draw.sample(ahead, 3), *draw.sample(split, 2)):
        assert len(template.launches(cut, "k")) == 1 + cut.is_ahead
        require_agreement(task, template, cut, load_tvm())


def ways_of(task: Task) -> tuple[Template, list[SummedTile], list[SummedTile]]:
    """Return a task's template, and its ways to cut it by where rows are summed."""
    found = templates_of(task)
    assert not isinstance(found, str), found
    assert set(found) == {"summed"}
    cuts: list[SummedTile] = list(found["summed"].tiles())
    inside, ahead = ([c for c in cuts if c.is_ahead == is_ahead] for is_ahead in (0, 1))
    return found["summed"], inside, ahead


def candidate_of(task: Task, cut: SummedTile) -> Candidate:
    return Candidate.of_recipe(task.task_id, Recipe("summed", cut).text, source=TRITON)


def test_the_first_candidates_have_both_ways_to_sum(tmp_path: Path) -> None:
    task = norm_task(exported(norm_first, tmp_path, "fp16"))
    search = registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1, sms=52))
    proposed = search.propose(task, 12).candidates
    assert {Recipe.parse(c.recipe).cut.is_ahead for c in proposed} == {0, 1}


def test_lanes_of_several_tenants_sum_their_own_rows(tmp_path: Path) -> None:
    task = norm_task(exported(norm_of_many, tmp_path, "fp16"))
    template, inside, ahead = ways_of(task)
    for cut in (inside[0], ahead[0], next(c for c in ahead if c.splits > 1)):
        require_equal_bits(task, template, cut)


@needs_nvrtc
def test_a_candidate_of_two_kernels_is_built_for_one_model_and_for_several(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    task = norm_task(exported(norm_first, tmp_path, "fp16"))
    _, _, ahead = ways_of(task)
    for own in (task, task.for_tenants(2)):
        made = build_candidate(own, candidate_of(own, ahead[0]))
        assert [each.name for each in built(made).scratch] == ["counters", "workspace"]


def test_sums_of_rows_leave_copies_and_products_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx = compiled_ptx(monkeypatch)

    def plain(b: Builder) -> str:
        return b("Add", (x := b.linear("x", WIDTH, seed=1)), feed_forward(b, x))

    tasks = extract_tasks(lower(exported(plain, tmp_path, "fp16"), CUDA), CUDA, precision="fp16")
    shapes = [(BATCH, TOKENS, WIDTH), (WIDTH, 4 * WIDTH)]
    product = next(t for t in tasks if [a.shape for a in t.args[:2]] == shapes)
    normed = norm_task(exported(norm_first, tmp_path, "fp16"))
    for task, is_ahead in ((product, 0), (normed, 0), (normed, 1)):
        ((name, template),) = templates_of(task).items()  # type: ignore[union-attr]
        cut = next(
            c
            for c in template.tiles()
            if (c.rows, c.columns, c.depth, c.splits) == (64, 64, 32, 1)
            and getattr(c, "is_ahead", 0) == is_ahead
        )
        lowered(task, template, Recipe(name, cut))
    plain, inside, sums, ahead = map(accesses, ptx)
    assert [n for n in plain if "wgmma" in n]
    for other in (inside, ahead):
        assert all(plain[n] == other[n] for n in plain if "copy" in n or "wgmma" in n)
    assert [n for n in sums if n.startswith("ld.global") and ".v4" in n], sums  # 16 bytes at a time


SUMMED = """
def k(x, w, y, sums):
    rows, columns, depth = tl.arange(0, 64), tl.arange(0, 64), tl.arange(0, 64)
    acc, total = tl.zeros((64, 64), tl.float32), tl.zeros((64, 1), tl.float32)
    for step in range(12):
        k = step * 64 + depth
        left = tl.load(x + rows[:, None] * 768 + k[None, :])
        acc = tl.dot(left, tl.load(w + k[:, None] * 64 + columns[None, :]), acc)
        total += tl.sum(tl.cast({summed}, tl.float32), axis=1, keep_dims=True)
    tl.store(y + rows[:, None] * 64 + columns[None, :], acc)
    tl.store(sums + rows[:, None], total)
""".lstrip()


def test_a_kernel_that_triton_makes_unsafe_is_refused() -> None:
    def compiled(summed: str) -> object:
        types = ("float16", "float16", "float32", "float32")
        text = SUMMED.format(summed=summed)
        return compile_kernel(text, "k", types, arch="sm_90a", warps=4, stages=3)

    with pytest.raises(UnsafePipeline, match="one step too early"):
        compiled("left")
    own = 'tl.load(x + rows[:, None] * 768 + k[None, :], eviction_policy="evict_last")'
    assert compiled(own)


@needs_nvrtc
def test_the_other_sources_compute_it_too(tmp_path: Path) -> None:
    task = norm_task(exported(norm_first, tmp_path, "fp16"))
    search = registry.SOURCES[METASCHEDULE].search(SearchSettings(seed=0, threads=1))
    proposed = search.propose(task, 2)
    assert proposed.candidates, proposed.message
    for candidate in (default_candidate(task), *proposed.candidates):
        built(build_candidate(task, candidate, lowered=search.lowered(candidate)))
    several = task.for_tenants(2)
    assert isinstance(build_candidate(several, default_candidate(several)), Build)


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_norms_in_products_compute_what_the_default_computes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    target, draw, cases = plan(SliceRequest("whole", 100)).target, random.Random(0), []
    for form in (norm_first, norm_of_many):
        task = replace(norm_task(exported(form, tmp_path, "fp16")), target=target)
        _, inside, ahead = ways_of(task)
        split = [c for c in ahead if c.splits > 1]
        cuts = [draw.choice(each) for each in (inside, ahead, split) if each]
        cases.append((task, [candidate_of(task, cut) for cut in cuts]))
    assert in_own_process(disagreements, cases) == []
