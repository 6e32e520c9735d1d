"""Products read an operand that was transposed for them where it lies, on GPUs."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.contract.test_triton import require_agreement
from tests.lib.lowered import CUDA, LLVM, load, operators, run
from tests.lib.models import model
from tunerd.builder.library import load_tvm
from tunerd.candidates.triton.source import templates_of
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Model

HEADS = [0, 2, 1, 3]
# Shapes of x and z, how each is transposed (None: not), and the shape of the product.
FORMS: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "rows of both": ((64, 32), None, (48, 32), [1, 0], (64, 48)),
    "columns of the left": ((32, 64), [1, 0], (32, 48), None, (64, 48)),
    "both": ((32, 64), [1, 0], (48, 32), [1, 0], (64, 48)),
    "in a batch": ((4, 64, 32), None, (4, 48, 32), [0, 2, 1], (4, 64, 48)),
    "one for a batch": ((4, 64, 32), None, (48, 32), [1, 0], (4, 64, 48)),
    "a batch of one": ((4, 64, 32), None, (1, 48, 32), [0, 2, 1], (4, 64, 48)),
    "a batch for one": ((64, 32), None, (4, 48, 32), [0, 2, 1], (4, 64, 48)),
    "heads": ((2, 64, 3, 32), HEADS, (2, 48, 3, 32), [0, 2, 3, 1], (2, 3, 64, 48)),
}


def exported(form: str, tmp_path: Path, precision: str = "") -> Model:
    x, x_perm, z, z_perm, out = FORMS[form]
    nodes, names = [], []
    for name, perm in (("x", x_perm), ("z", z_perm)):
        if perm is not None:
            nodes.append(helper.make_node("Transpose", [name], [f"{name}t"], perm=perm))
        names.append(name if perm is None else f"{name}t")
    nodes += [
        helper.make_node("MatMul", names, ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    loaded = load(tmp_path, model(nodes, inputs={"x": x, "z": z}, outputs={"y": out}))
    return dataclasses.replace(loaded, precision=precision)


@pytest.mark.parametrize("form", FORMS)
def test_a_product_reads_what_was_transposed_for_it_where_it_lies(
    form: str, tmp_path: Path
) -> None:
    loaded = exported(form, tmp_path)
    lowered = lower(loaded, CUDA)
    assert operators(lowered) == {"fused_matmul_relu"}
    feed = random_inputs(loaded.inputs, 0)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (found,) = run(lowered, feed)
    assert agree(found, expected, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("form", FORMS)
def test_templates_compute_it(form: str, precision: str, tmp_path: Path) -> None:
    lowered = lower(exported(form, tmp_path, precision), CUDA)
    task = max(extract_tasks(lowered, CUDA, precision=precision), key=lambda t: t.flops)
    found = templates_of(task)
    assert not isinstance(found, str), found
    cuts = list(found["product"].tiles())
    for cut in random.Random(0).sample(cuts, 2):
        require_agreement(task, found["product"], cut, load_tvm())


def test_what_others_read_too_is_transposed_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["z"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["m"]),
        helper.make_node("Add", ["m", "t"], ["y"]),
    ]
    shapes = {"x": (32, 32), "z": (48, 32)}
    loaded = load(tmp_path, model(nodes, inputs=shapes, outputs={"y": (32, 48)}))
    assert any("transpose" in name for name in operators(lower(loaded, CUDA)))


def test_on_cpus_columns_stay_together(tmp_path: Path) -> None:
    names = operators(lower(exported("rows of both", tmp_path), LLVM))
    assert any("transpose" in name for name in names)


def test_two_products_may_read_one_tensor_each_in_its_way(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["z"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["m"]),
        helper.make_node("MatMul", ["t", "x"], ["n"]),
        helper.make_node("Transpose", ["n"], ["nt"], perm=[1, 0]),
        helper.make_node("Add", ["m", "nt"], ["y"]),
    ]
    shapes: dict[str, tuple[int, ...]] = {"x": (32, 32), "z": (32, 32)}
    loaded = load(tmp_path, model(nodes, inputs=shapes, outputs={"y": (32, 32)}))
    lowered = lower(loaded, CUDA)
    feed: dict[str, np.ndarray] = random_inputs(loaded.inputs, 0)
    (expected,) = Reference(loaded.graph.proto).run(feed).values()
    (found,) = run(lowered, feed)
    assert agree(found, expected, rtol=1e-4)


def test_a_transposed_tensor_that_is_an_output_stays_one(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["z"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    proto = model(nodes, inputs={"x": (64, 32), "z": (48, 32)}, outputs={"y": (64, 48), "t": None})
    loaded = load(tmp_path, onnx.shape_inference.infer_shapes(proto))
    feed = random_inputs(loaded.inputs, 0)
    expected = Reference(loaded.graph.proto).run(feed)
    found = run(lower(loaded, CUDA), feed)
    for spec, values in zip(loaded.outputs, found, strict=True):
        assert agree(values, expected[spec.name], rtol=1e-4)
