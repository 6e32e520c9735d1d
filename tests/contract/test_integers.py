"""Quantized products in integer arithmetic, and how AVX-512 VNNI's template cuts them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.lib.build_fixtures import WITH_VNNI, built, random_inputs, vnni_target
from tests.lib.lowered import LLVM, check, load, operators, run
from tests.lib.models import model
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates.base import BATCH, SearchSettings
from tunerd.candidates.registers.source import TEMPLATE, Recipe, VnniSource
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax import integers
from tunerd.frontend.relax.joins import joins_of
from tunerd.frontend.relax.lowering import Lowered, lower, make_target
from tunerd.frontend.tasks import extract_tasks
from tunerd.system import arrays
from tunerd.vocabulary import Arrays, Candidate, TargetSpec, Task, default_candidate
from tunerd.vocabulary.model import INTEGER_PRODUCTS

IMAGE = (1, 8, 11, 11)


class Graph:
    """Writes nodes; `b(op, ...)` returns what a node makes, arrays become weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(5)

    def __call__(self, op: str, *inputs: object, outputs: int = 1, **attributes: object) -> str:
        names = []
        for value in inputs:
            if not isinstance(value, str):
                self.weights[f"w{len(self.weights)}"] = np.asarray(value)
                value = f"w{len(self.weights) - 1}"
            names.append(value)
        made = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, names, made, **attributes))
        return made[0]

    def quantized(self, x: str, dtype: type, zero: int, scale: float = 0.02) -> str:
        return self("QuantizeLinear", x, np.float32(scale), dtype(zero))

    def dequantized(self, q: str, dtype: type, zero: int, scale: float = 0.02) -> str:
        return self("DequantizeLinear", q, np.float32(scale), dtype(zero))

    def fake(self, x: str, dtype: type, zero: int, scale: float = 0.02) -> str:
        return self.dequantized(self.quantized(x, dtype, zero, scale), dtype, zero, scale)

    def whole(self, *shape: int) -> np.ndarray:
        return self.rng.integers(-127, 128, shape).astype(np.int8)

    def scales(self, count: int) -> np.ndarray:
        return (self.rng.random(count) * 1e-3 + 1e-4).astype(np.float32)

    def proto(self, y: str, inputs: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
        made = model(self.nodes, inputs=inputs, outputs={y: None}, weights=self.weights)
        return onnx.shape_inference.infer_shapes(made)


def convolution(dtype: type, zero: int, **attributes: object) -> onnx.ModelProto:
    """Two convolutions with a residual, as QDQ."""
    b = Graph()
    x = b.fake("x", dtype, zero)
    for taps in (3, 1):
        depth = 8 if taps == 3 else 32
        weight = b(
            "DequantizeLinear", b.whole(32, depth, taps, taps), b.scales(32),
            np.zeros(32, np.int8), axis=0,
        )  # fmt: skip
        bias = b.rng.standard_normal(32).astype(np.float32)
        own = attributes if taps == 3 else {}
        y = b("Conv", x, weight, bias, **own)
        x = b.fake(b("Relu", y), dtype, zero if dtype is np.int8 else 0, 0.05)
    return b.proto(x, {"x": IMAGE})


def product(dtype: type, zero: int, rows: int = 5, depth: int = 24) -> onnx.ModelProto:
    b = Graph()
    weight = b("DequantizeLinear", b.whole(depth, 48), np.float32(0.002), np.int8(0))
    y = b("MatMul", b.fake("x", dtype, zero), weight)
    return b.proto(
        b("Add", y, b.rng.standard_normal(48).astype(np.float32)), {"x": (2, rows, depth)}
    )


def transposed(dtype: type, zero: int) -> onnx.ModelProto:
    b = Graph()
    weight = b("DequantizeLinear", b.whole(32, 24), b.scales(32), np.zeros(32, np.int8), axis=0)
    return b.proto(b("Gemm", b.fake("x", dtype, zero), weight, transB=1), {"x": (6, 24)})


def dynamic() -> onnx.ModelProto:
    """What dynamic quantization makes of a product."""
    b = Graph()
    q = b("DynamicQuantizeLinear", "x", outputs=3)
    scale, zero = q.replace("_0", "_1"), q.replace("_0", "_2")
    total = b("MatMulInteger", q, b.whole(24, 32), zero, np.int8(0))
    y = b("Mul", b("Cast", total, to=onnx.TensorProto.FLOAT), scale)
    return b.proto(b("Mul", y, np.float32(0.01)), {"x": (1, 7, 24)})


def joined(dtype: type, zero: int, *, pooled: bool = False) -> onnx.ModelProto:
    """Two convolutions whose results are joined and quantized together, for one that reads both."""
    b = Graph()

    def weight(depth: int) -> str:
        given = b.whole(16, depth, 1, 1), b.scales(16), np.zeros(16, np.int8)
        return b("DequantizeLinear", *given, axis=0)

    x = b.fake("x", dtype, zero)
    parts = [b.fake(b("Relu", b("Conv", x, weight(8))), dtype, zero, 0.03) for _ in range(2)]
    y = b.fake(b("Concat", *parts, axis=1), dtype, zero, 0.05)
    if pooled:
        y = b("MaxPool", y, kernel_shape=[3, 3])
        y = b.fake(y, dtype, zero, 0.05)
    return b.proto(b("Conv", y, weight(32)), {"x": IMAGE})


def with_operators() -> onnx.ModelProto:
    """A convolution as QLinearConv and a product as QLinearMatMul."""
    b = Graph()
    q = b.quantized("x", np.uint8, 120)
    y = b(
        "QLinearConv", q, np.float32(0.02), np.uint8(120), b.whole(16, 8, 3, 3), b.scales(16),
        np.zeros(16, np.int8), np.float32(0.05), np.uint8(3),
        b.rng.integers(-900, 900, 16).astype(np.int32), pads=[1, 0, 1, 2],
    )  # fmt: skip
    flat = b("Reshape", y, np.array([11, 16 * 11]))
    y = b(
        "QLinearMatMul", flat, np.float32(0.05), np.uint8(3), b.whole(176, 32),
        np.float32(0.004), np.int8(0), np.float32(0.3), np.uint8(100),
    )  # fmt: skip
    return b.proto(b.dequantized(y, np.uint8, 100, 0.3), {"x": IMAGE})


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], int]] = {
    "uint8": (lambda: convolution(np.uint8, 128, pads=[1, 1, 1, 1]), 2),
    "int8": (lambda: convolution(np.int8, 0, pads=[1, 1, 1, 1]), 2),
    "an odd zero point": (lambda: convolution(np.int8, -37, pads=[0, 2, 1, 0]), 2),
    "strides": (lambda: convolution(np.uint8, 9, strides=[2, 2], pads=[1, 1, 0, 0]), 2),
    "dilation": (lambda: convolution(np.uint8, 0, dilations=[2, 3]), 2),
    "a product": (lambda: product(np.uint8, 77), 1),
    "a product of int8": (lambda: product(np.int8, 5), 1),
    "rows that cannot be cut": (lambda: product(np.uint8, 77, rows=19), 1),
    "a transposed weight": (lambda: transposed(np.uint8, 128), 1),
    "dynamic": (dynamic, 1),
    "operators of integers": (with_operators, 2),
    "joined": (lambda: joined(np.uint8, 3), 2),
    "joined and pooled": (lambda: joined(np.int8, -5, pooled=True), 2),
}


@pytest.fixture
def with_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the graph be that for a CPU with the instructions, and run without them."""
    load_tvm()
    monkeypatch.setattr(integers, "has_instructions", lambda _: True)


def products(of: Lowered) -> int:
    return sum(INTEGER_PRODUCTS in name for name in operators(of))


def outputs_of(lowered: Lowered, feed: Arrays) -> np.ndarray:
    (found,) = run(lowered, feed)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_quantized_products_in_integers_agree_with_onnx_runtime(
    name: str, tmp_path: Path, with_integers: None
) -> None:
    make, count = MODELS[name]
    assert products(check(load(tmp_path, make()))) == count


@pytest.mark.parametrize("name", ["uint8", "an odd zero point", "dynamic"])
def test_a_device_without_instructions_computes_in_floats(name: str, tmp_path: Path) -> None:
    make, _ = MODELS[name]
    assert products(check(load(tmp_path, make()))) == 0


@pytest.mark.parametrize(("pooled", "dtype"), [(False, "uint8"), (True, "float32")])
def test_parts_are_quantized_before_they_are_joined(
    pooled: bool, dtype: str, tmp_path: Path, with_integers: None
) -> None:
    lowered = lower(load(tmp_path, joined(np.uint8, 3, pooled=pooled)), LLVM)
    assert [name for name in operators(lowered) if "concat" in name] == ["concatenate"]
    (whole,) = joins_of(lowered.mod).joined
    assert str(whole.ty.dtype) == dtype


def test_a_join_that_is_read_as_it_is_stays(tmp_path: Path, with_integers: None) -> None:
    proto = joined(np.uint8, 3)
    (join,) = [node for node in proto.graph.node if node.op_type == "Concat"]
    proto.graph.output.append(helper.make_tensor_value_info(join.output[0], 1, (1, 32, 11, 11)))
    lowered = check(load(tmp_path, proto))
    (whole,) = joins_of(lowered.mod).joined
    assert str(whole.ty.dtype) == "float32"


def changed(proto: onnx.ModelProto, weight: int) -> onnx.ModelProto:
    """Change one number of one weight of int8."""
    of_int8 = [t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    tensor = max(of_int8, key=lambda t: len(t.raw_data))
    values = bytearray(tensor.raw_data)
    values[weight] ^= 0x40
    tensor.raw_data = bytes(values)
    return proto


@pytest.mark.parametrize("name", ["uint8", "dynamic"])
def test_one_changed_weight_is_seen(name: str, tmp_path: Path, with_integers: None) -> None:
    make, _ = MODELS[name]
    loaded = load(tmp_path, changed(make(), 100))
    feed = arrays.random_inputs(loaded.inputs, 0)
    right = Reference(make()).run(feed)
    got = outputs_of(lower(loaded, LLVM), feed)
    assert not np.allclose(got, next(iter(right.values())), rtol=1e-3, atol=1e-4)


def grouped() -> onnx.ModelProto:
    b = Graph()
    weight = b("DequantizeLinear", b.whole(32, 2, 3, 3), np.float32(0.002), np.int8(0))
    return b.proto(b("Conv", b.fake("x", np.uint8, 128), weight, group=4), {"x": IMAGE})


def of_few_columns() -> onnx.ModelProto:
    b = Graph()
    weight = b("DequantizeLinear", b.whole(24, 10), np.float32(0.002), np.int8(0))
    return b.proto(b("MatMul", b.fake("x", np.uint8, 128), weight), {"x": (6, 24)})


def of_two_values() -> onnx.ModelProto:
    b = Graph()
    a, c = b.fake("x", np.uint8, 128), b.fake("y", np.int8, 0)
    return b.proto(b("MatMul", a, c), {"x": (6, 16), "y": (16, 32)})


def of_wide_weights() -> onnx.ModelProto:
    """Unsigned weights whose zero point leaves more than eight bits."""
    b = Graph()
    weight = b.rng.integers(0, 256, (24, 32)).astype(np.uint8)
    weight[0, 0] = 255
    dequantized = b("DequantizeLinear", weight, np.float32(0.002), np.uint8(3))
    return b.proto(b("MatMul", b.fake("x", np.uint8, 128), dequantized), {"x": (6, 24)})


@pytest.mark.parametrize("make", [grouped, of_few_columns, of_two_values, of_wide_weights])
def test_what_an_instruction_does_not_take_stays_in_floats(
    make: Callable[[], onnx.ModelProto], tmp_path: Path, with_integers: None
) -> None:
    assert products(check(load(tmp_path, make()))) == 0


def test_layers_that_differ_in_scales_alone_are_one_task(
    tmp_path: Path, with_integers: None
) -> None:
    b = Graph()
    x = b.fake("x", np.uint8, 128)
    for scale in (0.03, 0.05, 0.07):
        weight = b("DequantizeLinear", b.whole(8 * 4, 32), np.float32(scale / 9), np.int8(0))
        x = b.fake(b("MatMul", x, weight), np.uint8, round(1000 * scale), scale)
    loaded = load(tmp_path, b.proto(x, {"x": (4, 32)}))
    found = [t for t in extract_tasks(lower(loaded, LLVM), LLVM) if INTEGER_PRODUCTS in t.name]
    assert sorted(t.weight for t in found) == [1, 2]  # the last one dequantizes as well
    names = [t.name for t in found]
    assert len(set(names)) == len(names)
    assert all(len(name) < 70 for name in names)


def test_dynamic_layers_that_differ_in_scales_alone_are_one_task(
    tmp_path: Path, with_integers: None
) -> None:
    b = Graph()
    x = "x"
    for number in range(3):
        q = b("DynamicQuantizeLinear", x, outputs=3)
        scale, zero = q.replace("_0", "_1"), q.replace("_0", "_2")
        total = b("MatMulInteger", q, b.whole(32, 32), zero, np.int8(0))
        by = b("Mul", scale, np.float32(0.01 + 0.003 * number))
        x = b("Mul", b("Cast", total, to=onnx.TensorProto.FLOAT), by)
    loaded = load(tmp_path, b.proto(x, {"x": (4, 32)}))
    lowered = check(loaded)
    found = [t for t in extract_tasks(lowered, LLVM) if INTEGER_PRODUCTS in t.name]
    assert [t.weight for t in found] == [3]


def test_weights_lie_as_an_instruction_reads_them() -> None:
    weight = np.arange(2 * 3 * 6 * 32).reshape(2, 3, 6, 32).astype(np.int8)
    packed = integers.packed(weight)
    assert packed.shape == (2, 2, 3, 2, 16, 4)
    for y, x, k, column in ((0, 0, 0, 0), (1, 2, 5, 31), (0, 1, 3, 17)):
        assert packed[column // 16, y, x, k // 4, column % 16, k % 4] == weight[y, x, k, column]
    assert not packed[:, :, :, 1, :, 2:].any()


# --- the template -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> TargetSpec:
    """That of this CPU; where it lacks the instructions kernels are built, and not run."""
    load_tvm()
    return vnni_target() or WITH_VNNI


def tasks_of(proto: onnx.ModelProto, tmp_path: Path, target: TargetSpec) -> list[Task]:
    loaded = load(tmp_path, proto)
    tasks = extract_tasks(lower(loaded, target), target, precision=loaded.precision)
    found = [t for t in tasks if VnniSource().takes(t) is None]
    assert found
    return found


def result_of(task: Task, candidate: Candidate, folder: Path) -> np.ndarray:
    path = folder / f"{candidate.candidate_id}.so"
    path.write_bytes(built(build_candidate(task, candidate)).library)
    tvm = load_tvm()
    output = tvm.runtime.empty(task.args[-1].shape, task.args[-1].dtype)
    given = map(tvm.runtime.tensor, random_inputs(task).values())
    tvm.runtime.load_module(str(path))["main"](*given, output)
    return np.asarray(output.numpy())


@pytest.mark.parametrize(
    "name", ["int8", "strides", "a product", "rows that cannot be cut", "dynamic"]
)
def test_each_way_to_cut_computes_what_the_default_does(
    name: str, tmp_path: Path, target: TargetSpec
) -> None:
    for task in tasks_of(MODELS[name][0](), tmp_path, target):
        templates = VnniSource().templates_of(task)
        assert not isinstance(templates, str)
        cuts = list(templates[TEMPLATE].tiles())
        sample = random.Random(3).sample(cuts, min(4, len(cuts)))
        can_run = vnni_target() is not None
        right = result_of(task, default_candidate(task), tmp_path) if can_run else None
        for cut in {*sample, max(cuts)}:
            recipe = Recipe(TEMPLATE, cut).text
            candidate = Candidate.of_recipe(task.task_id, recipe, source="vnni")
            if right is None:
                assert built(build_candidate(task, candidate))
                continue
            # The sums are exact; a product and a sum behind them may be rounded once or twice.
            got = result_of(task, candidate, tmp_path).astype(np.float64)
            np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-6)


def test_the_instruction_is_in_the_code(tmp_path: Path) -> None:
    (task, *_) = tasks_of(product(np.uint8, 128), tmp_path, WITH_VNNI)
    assert any("vpdpbusd" in line for line in code_of(task, WITH_VNNI))


@pytest.mark.parametrize("cores", [1, 2])
def test_sums_are_in_registers_and_in_no_workspace(cores: int, tmp_path: Path) -> None:
    of = on(cores)
    (task, *_) = tasks_of(product(np.uint8, 128, rows=8, depth=512), tmp_path, of)
    code = code_of(task, of)
    assert sum("vpdpbusd" in line for line in code) > 8
    assert not [line for line in code if "AllocWorkspace" in line]


def test_what_is_quantized_is_rounded_by_vectors(tmp_path: Path) -> None:
    of = on(1)
    (task, *_) = tasks_of(MODELS["int8"][0](), tmp_path, of)
    rounded = [line for line in code_of(task, of) if re.search("round|rndscale", line)]
    assert rounded
    assert all("vrndscaleps" in line and "%zmm" in line for line in rounded)


def on(cores: int) -> TargetSpec:
    load_tvm()
    return TargetSpec("llvm", json.dumps({**json.loads(WITH_VNNI.json), "num-cores": cores}))


def code_of(task: Task, target: TargetSpec) -> list[str]:
    """Return the assembly of what is tried first."""
    import tvm

    first = VnniSource().search(SearchSettings(seed=1, threads=1)).propose(task, 1).candidates[0]
    mod = VnniSource().lower(task, first.recipe).mod
    built = tvm.tirx.build(mod, target=make_target(target))
    return str(built.inspect_source("asm")).splitlines()


def test_proposals_are_unlike_and_end(tmp_path: Path, target: TargetSpec) -> None:
    (task, *_) = tasks_of(product(np.uint8, 128), tmp_path, target)
    search = VnniSource().search(SearchSettings(seed=1, threads=1))
    seen: set[str] = set()
    while found := search.propose(task, BATCH).candidates:
        assert not seen & {c.recipe for c in found}
        seen |= {c.recipe for c in found}
    templates = VnniSource().templates_of(task)
    assert not isinstance(templates, str)
    assert len(seen) == sum(len(list(template.tiles())) for template in templates.values())


def test_other_tasks_are_left_to_other_sources(tmp_path: Path, target: TargetSpec) -> None:
    (task, *_) = tasks_of(product(np.uint8, 128), tmp_path, target)
    on_gpu = replace(task, target=TargetSpec("cuda", json.dumps({"kind": "cuda", "arch": "sm_90"})))
    assert VnniSource().takes(on_gpu) == "VNNI is a CPU's"
    assert VnniSource().takes(replace(task, mod_json="{}")) == "it has no products of 8 bits"
