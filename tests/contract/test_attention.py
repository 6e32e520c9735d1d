"""Attention as one kernel: matched in what exporters write, right, and cut by a template."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.contract.test_triton import require_agreement
from tests.lib import triton_in_numpy
from tests.lib.lowered import CUDA, LLVM, load, operators, run
from tests.lib.models import floats, ints, model
from tunerd.builder.library import load_tvm
from tunerd.candidates.triton.source import templates_of
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Model, TargetSpec, Task

TOKENS, HEADS, SIZE = 21, 2, 32
WIDTH = HEADS * SIZE


class Builder:
    """The nodes and weights of a graph, as an exporter writes them."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def __call__(self, op: str, *inputs: str | np.ndarray, **attributes: Any) -> str:
        names = [i if isinstance(i, str) else self.weight(i) for i in inputs]
        out = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [out], **attributes))
        return out

    def weight(self, values: np.ndarray) -> str:
        name = f"w_{len(self.weights)}"
        self.weights[name] = values
        return name

    def split(self, x: str, axis: int) -> list[str]:
        outs = [f"split_{len(self.nodes)}_{i}" for i in range(3)]
        self.nodes.append(helper.make_node("Split", [x], outs, axis=axis, num_outputs=3))
        return outs

    def linear(self, x: str, columns: int, *, depth: int = WIDTH, seed: int = 0) -> str:
        product = self("MatMul", x, floats(depth, columns, seed=seed) * np.float32(0.3))
        return self("Add", product, floats(columns, seed=seed + 50))


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def of_torchvision(b: Builder, batch: int = 1) -> str:
    """Batch second, Q, K and V gathered from one product, the scale on both sides."""
    x = b("Transpose", "x", perm=[1, 0, 2])
    x = b.linear(x, 3 * WIDTH)
    x = b("Reshape", x, ints(TOKENS, batch, 3, WIDTH))
    x = b("Unsqueeze", x, ints(0))
    x = b("Transpose", x, perm=[3, 1, 2, 0, 4])
    x = b("Squeeze", x, ints(-2))
    parts = [b("Gather", x, np.array(n, np.int64), axis=0) for n in range(3)]
    heads = [b("Reshape", p, ints(TOKENS, batch * HEADS, SIZE)) for p in parts]
    q, v = (b("Transpose", heads[n], perm=[1, 0, 2]) for n in (0, 2))
    k = b("Transpose", heads[1], perm=[1, 2, 0])
    q, v = (b("Reshape", t, ints(batch, HEADS, TOKENS, SIZE)) for t in (q, v))
    k = b("Reshape", k, ints(batch, HEADS, SIZE, TOKENS))
    root = np.full(1, SIZE**-0.25, np.float32)
    w = b("Softmax", b("MatMul", b("Mul", q, root), b("Mul", k, root)), axis=-1)
    x = b("Transpose", b("MatMul", w, v), perm=[2, 0, 1, 3])
    x = b.linear(b("Reshape", x, ints(TOKENS * batch, WIDTH)), WIDTH, seed=1)
    x = b("Transpose", b("Reshape", x, ints(TOKENS, batch, WIDTH)), perm=[1, 0, 2])
    return b("Add", x, "x")


def of_torchvision_in_batches(b: Builder) -> str:
    return of_torchvision(b, 2)


def _three(b: Builder) -> tuple[str, str, str]:
    """Q [1, head, token, size], K [1, head, size, token], V as Q, of three products."""
    q, k, v = (
        b("Reshape", b.linear("x", WIDTH, seed=n), ints(1, TOKENS, HEADS, SIZE)) for n in range(3)
    )
    q, v = (b("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
    return q, b("Transpose", k, perm=[0, 2, 3, 1]), v


def _joined(b: Builder, x: str) -> str:
    x = b("Reshape", b("Transpose", x, perm=[0, 2, 1, 3]), ints(1, TOKENS, WIDTH))
    return b("Add", b.linear(x, WIDTH, seed=9), "x")


def of_transformers(b: Builder) -> str:
    """A mask that is added, a guard against rows without a key, the scale on both sides."""
    seen = b("Unsqueeze", b("Cast", "mask", to=TensorProto.BOOL), ints(1, 2))
    mask = b("Where", seen, scalar(0.0), scalar(np.finfo(np.float32).min))
    q, k, v = _three(b)
    root = scalar(SIZE**-0.25)
    scores = b("MatMul", b("Mul", q, root), b("Mul", k, root))
    w = b("Softmax", b("Add", scores, mask), axis=-1)
    w = b("Where", b("IsNaN", w), scalar(0.0), w)
    return _joined(b, b("MatMul", w, v))


def with_scores_divided(b: Builder) -> str:
    """The scale as a division of the scores, and keys of the future left out by a constant."""
    q, k, v = _three(b)
    scores = b("Div", b("MatMul", q, k), scalar(SIZE**0.5))
    future = np.triu(np.full((1, 1, TOKENS, TOKENS), -np.inf, np.float32), 1)
    return _joined(b, b("MatMul", b("Softmax", b("Add", scores, future), axis=-1), v))


def with_scores_replaced(b: Builder) -> str:
    """Scores of the future replaced by a number."""
    q, k, v = _three(b)
    scores = b("Mul", b("MatMul", q, k), scalar(SIZE**-0.5))
    seen = np.tril(np.ones((TOKENS, TOKENS), bool))[None, None]
    scores = b("Where", seen, scores, scalar(-1e9))
    return _joined(b, b("MatMul", b("Softmax", scores, axis=-1), v))


def of_timm(b: Builder) -> str:
    """One product that is reshaped to five dimensions and split."""
    x = b("Reshape", b.linear("x", 3 * WIDTH), ints(1, TOKENS, 3, HEADS, SIZE))
    x = b("Transpose", x, perm=[2, 0, 3, 1, 4])
    q, k, v = (b("Squeeze", part, ints(0)) for part in b.split(x, 0))
    k = b("Transpose", k, perm=[0, 1, 3, 2])
    w = b("Softmax", b("MatMul", b("Mul", q, scalar(SIZE**-0.5)), k), axis=-1)
    return _joined(b, b("MatMul", w, v))


def with_heads_in_the_batch(b: Builder) -> str:
    """Three dimensions, as of the exporters before scaled_dot_product_attention."""
    q, k, v = (b.linear("x", WIDTH, seed=n) for n in range(3))
    q = b("Mul", q, scalar(SIZE**-0.5))
    parts = [
        b("Reshape", b("Reshape", t, ints(TOKENS, HEADS, SIZE)), ints(TOKENS, HEADS, SIZE))
        for t in (q, k, v)
    ]
    q, k, v = (b("Transpose", p, perm=[1, 0, 2]) for p in parts)
    w = b("Softmax", b("MatMul", q, b("Transpose", k, perm=[0, 2, 1])), axis=-1)
    x = b("Transpose", b("MatMul", w, v), perm=[1, 0, 2])
    x = b("Reshape", x, ints(1, TOKENS, WIDTH))
    return b("Add", b.linear(x, WIDTH, seed=9), "x")


def with_slices(b: Builder) -> str:
    """Q, K and V sliced from one product, and nothing scaled."""
    x = b.linear("x", 3 * WIDTH)
    parts = [b("Slice", x, ints(n * WIDTH), ints((n + 1) * WIDTH), ints(2)) for n in range(3)]
    shaped = [b("Reshape", p, ints(1, TOKENS, HEADS, SIZE)) for p in parts]
    q, k, v = (b("Transpose", p, perm=[0, 2, 1, 3]) for p in shaped)
    scores = b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2]))
    return _joined(b, b("MatMul", b("Softmax", scores, axis=-1), v))


def with_columns_by_indices(b: Builder) -> str:
    """Q, K and V as columns of one product that indices in a row take."""
    x = b.linear("x", 3 * WIDTH)
    places = np.arange(3 * WIDTH).reshape(3, HEADS, SIZE)
    q, k, v = (b("Transpose", b("Gather", x, p, axis=2), perm=[0, 2, 1, 3]) for p in places)
    scores = b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2]))
    return _joined(b, b("MatMul", b("Softmax", scores, axis=-1), v))


FORMS: dict[str, Callable[[Builder], str]] = {
    f.__name__.replace("_", " "): f
    for f in (
        of_torchvision,
        of_torchvision_in_batches,
        of_transformers,
        with_scores_divided,
        with_scores_replaced,
        of_timm,
        with_heads_in_the_batch,
        with_slices,
        with_columns_by_indices,
    )
}


def exported(form: Callable[[Builder], str], tmp_path: Path, precision: str) -> Model:
    b = Builder()
    out = form(b)
    batch = 2 if form is of_torchvision_in_batches else 1
    inputs: dict[str, tuple[int, ...]] = {"x": (batch, TOKENS, WIDTH)}
    if any("mask" in node.input for node in b.nodes):
        inputs["mask"] = (1, TOKENS)
    proto = model(b.nodes, inputs=inputs, outputs={out: None}, weights=b.weights, opset=18)
    loaded = load(tmp_path, onnx.shape_inference.infer_shapes(proto))
    return dataclasses.replace(loaded, precision=precision)


def feed_of(loaded: Model, seed: int = 0) -> dict[str, np.ndarray]:
    feed = random_inputs(loaded.inputs, seed)
    if "mask" in feed:
        feed["mask"][0, 5:9] = 0
    return feed


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_one_kernel_between_two_products(form: str, tmp_path: Path) -> None:
    loaded = exported(FORMS[form], tmp_path, "tf32")
    lowered = lower(loaded, CUDA)
    names = operators(lowered)
    assert "attention" in names, names
    moved = {n for n in names if "transpose" in n or "take" in n or "softmax" in n}
    assert not moved, names
    products = [n for n in names if "matmul" in n]
    assert len(products) == 2, names  # of Q, K and V together, and of what comes out
    feed = feed_of(loaded)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (got,) = run(lowered, feed)
    assert agree(got, expected, rtol=1e-3)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("form", ["of torchvision", "of transformers"])
def test_attention_is_right_in_16_bits(form: str, precision: str, tmp_path: Path) -> None:
    loaded = exported(FORMS[form], tmp_path, precision)
    feed = feed_of(loaded)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (got,) = run(lower(loaded, CUDA), feed)
    assert agree(got, expected, rtol=0.02 if precision == "bf16" else 0.004)


def test_weights_that_others_read_are_kept(tmp_path: Path) -> None:
    def form(b: Builder) -> str:
        q, k, v = _three(b)
        w = b("Softmax", b("MatMul", q, k), axis=-1)
        most = b("ReduceMax", w, ints(1, 3), keepdims=0)
        x = _joined(b, b("MatMul", w, v))
        return b("Mul", x, b("Unsqueeze", most, ints(2)))

    lowered = lower(exported(form, tmp_path, "fp16"), CUDA)
    assert "attention" not in operators(lowered)


@pytest.mark.parametrize(("target", "precision"), [(LLVM, "fp16"), (CUDA, "fp32"), (CUDA, "")])
def test_without_tensor_cores_attention_stays_in_parts(
    target: TargetSpec, precision: str, tmp_path: Path
) -> None:
    lowered = lower(exported(of_timm, tmp_path, precision), target)
    assert "attention" not in operators(lowered)


# --- the template ------------------------------------------------------------------------------


def attention_task(lowered: Lowered, precision: str) -> Task:
    tasks = extract_tasks(lowered, CUDA, precision=precision)
    return next(t for t in tasks if t.name.startswith("attention"))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_computes_its_attention(form: str, precision: str, tmp_path: Path) -> None:
    lowered = lower(exported(FORMS[form], tmp_path, precision), CUDA)
    task = attention_task(lowered, precision)
    found = templates_of(task)
    assert not isinstance(found, str), found
    assert set(found) == {"attention"}
    cuts = list(found["attention"].tiles())
    tvm = load_tvm()
    for cut in random.Random(0).sample(cuts, 4):
        require_agreement(task, found["attention"], cut, tvm)


@pytest.mark.parametrize("size", [32, 40, 64, 96, 128])
def test_heads_of_any_size_are_computed_with_padding_if_need_be(size: int, tmp_path: Path) -> None:
    def form(b: Builder) -> str:
        parts = [b.linear("x", HEADS * size, seed=n) for n in range(3)]
        shaped = [b("Reshape", p, ints(1, TOKENS, HEADS, size)) for p in parts]
        q, k, v = (b("Transpose", p, perm=[0, 2, 1, 3]) for p in shaped)
        scores = b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2]))
        x = b("MatMul", b("Softmax", scores, axis=-1), v)
        return b("Reshape", b("Transpose", x, perm=[0, 2, 1, 3]), ints(1, TOKENS, HEADS * size))

    task = attention_task(lower(exported(form, tmp_path, "fp16"), CUDA), "fp16")
    template = templates_of(task)["attention"]
    for cut in random.Random(1).sample(list(template.tiles()), 4):
        require_agreement(task, template, cut, load_tvm())


def test_a_row_without_a_key_is_zero_where_the_graph_says_so(tmp_path: Path) -> None:
    loaded = exported(of_transformers, tmp_path, "fp16")
    task = attention_task(lower(loaded, CUDA), "fp16")
    template = templates_of(task)["attention"]
    given = [
        np.zeros(a.shape, a.dtype)
        if i
        else np.random.default_rng(0).standard_normal(a.shape).astype(a.dtype)
        for i, a in enumerate(task.args)
    ]
    given[1][...] = -np.inf  # the mask
    cut = next(iter(template.tiles()))
    given[-1][...] = 7
    triton_in_numpy.run_all(template.launches(cut, "k"), given)
    assert not given[-1].any()


def test_attention_is_compiled_to_products_of_tensor_cores(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tunerd.builder.build import build_candidate
    from tunerd.candidates import registry
    from tunerd.candidates.base import SearchSettings
    from tunerd.vocabulary import TRITON, Build

    task = attention_task(lower(exported(of_torchvision, tmp_path, "fp16"), CUDA), "fp16")
    search = registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1, sms=52))
    for candidate in search.propose(task, 2).candidates:
        build = build_candidate(task, candidate)
        assert isinstance(build, Build), build
        assert build.scratch == ()


# --- rows --------------------------------------------------------------------------------------


def test_a_residual_is_added_where_its_product_is_computed(tmp_path: Path) -> None:
    names = operators(lower(exported(of_torchvision, tmp_path, "fp16"), CUDA))
    assert not {n for n in names if "reshape" in n and "add" in n}, names


def test_of_rows_that_are_dropped_nothing_is_computed(tmp_path: Path) -> None:
    def form(b: Builder) -> str:
        x = b.linear("x", 48)
        x = b("Add", x, b.linear(b("Relu", x), 48, depth=48, seed=1))
        x = b("LayerNormalization", x, floats(48), floats(48, seed=2), axis=-1)
        return b.linear(b("Gather", x, np.array(0, np.int64), axis=1), 7, depth=48, seed=3)

    loaded = exported(form, tmp_path, "fp32")
    lowered = lower(loaded, CUDA)
    tasks = extract_tasks(lowered, CUDA)
    products = [t for t in tasks if "matmul" in t.name]
    assert all(np.prod(t.args[-1].shape) <= 48 for t in products), products
    feed = feed_of(loaded)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (got,) = run(lowered, feed)
    assert agree(got, expected, rtol=1e-3)
