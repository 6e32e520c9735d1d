"""Quantizers of graphs for GPUs: next to what computes their values, and in int8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.contract.test_integers import IMAGE, MODELS, Graph, outputs_of, products
from tests.lib.lowered import LLVM, load
from tunerd.builder.library import load_tvm
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.relax import integers, lowering
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.system import arrays
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import TF32, Model, Task
from tunerd.vocabulary.model import INTEGER_PRODUCTS

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def exact_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out that TF32 rounds constants of several dimensions, as scales are."""
    monkeypatch.setattr(lowering, "_tf32", lambda weight: weight)


def for_gpu(model: Model) -> Lowered:
    """Return the graph for a GPU in a precision that keeps values in float32, to run it here."""
    load_tvm()
    return lower(replace(model, precision=TF32), cuda_target("9.0"))


def tasks_of(lowered: Lowered) -> list[Task]:
    return extract_tasks(lowered, cuda_target("9.0"), precision=TF32)


def linear(b: Graph, x: str, depth: int, columns: int) -> str:
    weight = b(
        "DequantizeLinear", b.whole(depth, columns), b.scales(columns),
        np.zeros(columns, np.int8), axis=1,
    )  # fmt: skip
    return b("Add", b("MatMul", x, weight), b.rng.standard_normal(columns).astype(np.float32))


def reshaped(b: Graph, x: str, zero: int, *shape: int) -> str:
    """Reshape as exporters do: between two pairs of the same scale."""
    return b.fake(b("Reshape", x, np.array(shape)), np.uint8, zero)


def block() -> onnx.ModelProto:
    """Two products of rows with a residual, in which each operator has its quantizers."""
    b = Graph()
    x = b.fake("x", np.uint8, 120)
    y = b.fake(linear(b, reshaped(b, x, 120, 12, 32), 32, 48), np.uint8, 128)
    y = reshaped(b, y, 128, 3, 4, 48)
    y = b.fake(b("Relu", y), np.uint8, 0)
    y = b.fake(linear(b, reshaped(b, y, 0, 12, 48), 48, 32), np.uint8, 7)
    y = reshaped(b, y, 7, 3, 4, 32)
    return b.proto(b.fake(b("Add", x, y), np.uint8, 119), {"x": (3, 4, 32)})


def heads() -> onnx.ModelProto:
    """A product whose columns are turned to heads and back."""
    b = Graph()
    y = b.fake(linear(b, b.fake("x", np.uint8, 100), 32, 32), np.uint8, 90)
    y = reshaped(b, y, 90, 6, 2, 16)
    y = b.fake(b("Transpose", y, perm=[1, 0, 2]), np.uint8, 90)
    y = b.fake(b("Transpose", y, perm=[1, 0, 2]), np.uint8, 90)
    return b.proto(linear(b, reshaped(b, y, 90, 6, 32), 32, 16), {"x": (6, 32)})


def projections() -> onnx.ModelProto:
    """Three products of one tensor, with scales and zero points of their own."""
    b = Graph()
    x = b.fake("x", np.uint8, 100)
    parts = [
        b.fake(linear(b, x, 32, 16), np.uint8, zero, scale)
        for zero, scale in ((90, 0.02), (128, 0.03), (3, 0.05))
    ]
    y = b.fake(b("Add", b("Mul", *parts[:2]), parts[2]), np.uint8, 100, 0.07)
    return b.proto(y, {"x": (6, 32)})


def at_edges() -> onnx.ModelProto:
    """Taps that reach far into the padding, on an image that they nearly cover."""
    b = Graph()
    weight = b("DequantizeLinear", b.whole(16, 8, 5, 3), np.float32(0.002), np.int8(0))
    how = {"pads": [2, 1, 3, 2], "strides": [2, 1], "dilations": [1, 2]}
    y = b("Conv", b.fake("x", np.uint8, 30), weight, **how)
    return b.proto(b.fake(y, np.uint8, 128, 0.05), {"x": IMAGE})


def all_edges() -> onnx.ModelProto:
    """An image of which no place is without padding."""
    b = Graph()
    weight = b("DequantizeLinear", b.whole(16, 8, 5, 5), np.float32(0.002), np.int8(0))
    y = b("Conv", b.fake("x", np.uint8, 30), weight, pads=[2, 2, 2, 2])
    return b.proto(b.fake(y, np.uint8, 128, 0.05), {"x": (1, 8, 3, 3)})


OWN: dict[str, Callable[[], onnx.ModelProto]] = {
    "a block": block,
    "heads": heads,
    "projections": projections,
    "edges": at_edges,
    "all edges": all_edges,
    **{name: MODELS[name][0] for name in ("uint8", "strides", "operators of integers")},
}


@pytest.mark.parametrize("name", OWN)
def test_a_gpu_computes_the_bits_of_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integers, "has_instructions", lambda _: True)
    model = load(tmp_path, OWN[name]())
    feed = arrays.random_inputs(model.inputs, 0)
    on_gpu, on_cpu = for_gpu(model), lower(model, LLVM)
    assert products(on_gpu)
    assert products(on_cpu)
    found = outputs_of(on_gpu, feed)
    np.testing.assert_array_equal(found, outputs_of(on_cpu, feed))
    assert agree(found, next(iter(Reference(OWN[name]()).run(feed).values())), rtol=1e-3)


@pytest.mark.parametrize("name", [n for n in OWN if n != "operators of integers"])
def test_no_product_of_a_gpu_reads_uint8(name: str, tmp_path: Path) -> None:
    found = tasks_of(for_gpu(load(tmp_path, OWN[name]())))
    assert {a.dtype for t in found for a in t.args} <= {"int8", "int32", "float32"}


def test_what_is_quantized_is_part_of_the_product_before_it(tmp_path: Path) -> None:
    found = tasks_of(for_gpu(load(tmp_path, block())))
    assert sum(t.weight for t in found) == 3  # the input, and the products


def test_products_of_one_tensor_are_one(tmp_path: Path) -> None:
    found = tasks_of(for_gpu(load(tmp_path, projections())))
    assert sum(t.weight for t in found if INTEGER_PRODUCTS in t.name) == 1


def test_layers_that_differ_in_zero_points_alone_are_one_task(tmp_path: Path) -> None:
    b = Graph()
    x = b.fake("x", np.uint8, 100)
    for zero in (128, 70, 80):  # the first one is none in int8
        x = b.fake(linear(b, x, 32, 32), np.uint8, zero)
    found = tasks_of(for_gpu(load(tmp_path, b.proto(x, {"x": (6, 32)}))))
    assert sorted(t.weight for t in found if INTEGER_PRODUCTS in t.name) == [1, 2]


def test_convolutions_that_differ_in_scales_alone_are_one_task(tmp_path: Path) -> None:
    b = Graph()
    x = b.fake("x", np.uint8, 100)
    for scale in (0.03, 0.05, 0.07):
        weight = b("DequantizeLinear", b.whole(8, 8, 3, 3), np.float32(scale / 9), np.int8(0))
        x = b.fake(b("Conv", x, weight, pads=[1, 1, 1, 1]), np.uint8, 90, scale)
    found = tasks_of(for_gpu(load(tmp_path, b.proto(x, {"x": (1, 8, 6, 6)}))))
    assert sorted(t.weight for t in found if INTEGER_PRODUCTS in t.name) == [1, 2]


def test_a_cpu_keeps_uint8(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, MODELS["uint8"][0]()), LLVM)
    assert "uint8" in lowered.mod.script()


def test_an_output_of_uint8_stays_so(tmp_path: Path) -> None:
    b = Graph()
    q = b.quantized(linear(b, b.fake("x", np.uint8, 100), 32, 16), np.uint8, 90)
    proto = b.proto(q, {"x": (6, 32)})
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    model = load(tmp_path, proto)
    feed = arrays.random_inputs(model.inputs, 0)
    found = outputs_of(for_gpu(model), feed)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, next(iter(Reference(proto).run(feed).values())))
