"""A file of 16 bits that is to compute in fp32: what is widened, and what keeps its type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib.artifact_fixtures import LLVM
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import load
from tunerd.builder.library import load_tvm
from tunerd.frontend.model import FixedModel, read_model, simplified
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.relax.widening import widen
from tunerd.frontend.tasks import extract_tasks
from tunerd.runs.finals.verify import verify
from tunerd.system.arrays import verification_inputs
from tunerd.vocabulary import Model
from tunerd.vocabulary.verdict import Verdict

HALF = TensorProto.FLOAT16


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose weights, input and outputs are float16, with casts, constants and a split."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(16, 8, 3, 3)) / 8,
        "b": rng.normal(size=16),
        "w2": rng.normal(size=(32, 64)) / 8,
        "scale": np.ones(64),
        "shift": np.zeros(64),
        "low": np.array(-6.0),
        "high": np.array(6.0),
    }
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Cast", ["c"], ["c32"], to=TensorProto.FLOAT),
            helper.make_node("Sigmoid", ["c32"], ["s32"]),
            helper.make_node("Cast", ["s32"], ["s"], to=HALF),
            helper.make_node("MatMul", ["s", "w2"], ["m"]),
            helper.make_node("Clip", ["m", "low", "high"], ["k"]),
            helper.make_node("LayerNormalization", ["k", "scale", "shift"], ["n"], axis=-1),
            helper.make_node("Split", ["n"], ["p", "q"], axis=2, num_outputs=2),
            helper.make_node("Greater", ["p", "q"], ["is_more"]),
            helper.make_node("Where", ["is_more", "p", "q"], ["y"]),
        ],
        "half",
        [value("x", HALF, [1, 8, 32, 32])],
        [value("y", HALF, [1, 16, 16, 64]), value("n", HALF, [1, 16, 32, 64])],
        [numpy_helper.from_array(w.astype("float16"), name) for name, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path_factory.mktemp("half") / "half.onnx"
    onnx.save(model, path)
    return path


def read(path: Path, precision: str) -> FixedModel:
    return read_model(path, precision=precision)


def compiled(model: Model, folder: Path) -> Path:
    lowered = lower(model, LLVM)
    tasks = extract_tasks(lowered, LLVM, precision=model.precision)
    return compile_artifact(lowered, tasks, {}, LLVM, folder, model=model, pct=100)


def test_in_fp32_a_file_of_16_bits_has_wide_weights_and_kernels(half: Path) -> None:
    model = simplified(read(half, "fp32"))
    lowered = lower(model, LLVM)
    assert {str(w.dtype) for w in lowered.weights.values()} == {"float32"}
    assert "operators and weights of 16 bits are widened to fp32" in lowered.notes
    tasks = extract_tasks(lowered, LLVM, precision=model.precision)
    assert {task.precision for task in tasks} == {"fp32"}
    first, last = tasks[0], tasks[-1]
    assert first.args[0].dtype == last.args[-1].dtype == "float16"  # of the model
    between = {a.dtype for t in tasks for a in t.args} - {"float16"}
    assert between <= {"float32", "bool"}
    assert all(a.dtype != "float16" for t in tasks for a in t.args if a.shape == (32, 64))


def test_as_exported_a_file_of_16_bits_stays_so(half: Path) -> None:
    lowered = lower(simplified(read(half, "")), LLVM)
    assert {str(w.dtype) for w in lowered.weights.values()} == {"float16"}


def test_in_fp16_products_of_a_file_of_16_bits_are_summed_in_fp32(half: Path) -> None:
    model = simplified(read(half, "fp16"))
    lowered = lower(model, LLVM)
    tasks = extract_tasks(lowered, LLVM, precision=model.precision)
    (product,) = (t for t in tasks if "matmul" in t.name)
    assert {a.dtype for a in product.args if len(a.shape) > 1} >= {"float16"}
    text = load_tvm().ir.load_json(product.mod_json).script()
    assert text.count('T.Cast("float32"') == 2  # both operands, and neither the sum nor its limits


def test_widened_it_is_right_and_nearer_to_the_exact_values(half: Path, tmp_path: Path) -> None:
    inputs = verification_inputs(simplified(read(half, "")).inputs, 0)
    far = {}
    for precision in ("", "fp32"):
        model = simplified(read(half, precision))
        run = load(compiled(model, tmp_path / (precision or "exported")))
        assert verify(run, model).verdict is Verdict.RIGHT
        outputs = run(inputs)
        assert {str(o.dtype) for o in outputs.values()} == {"float16"}
        exact = model.graph.ways([inputs])
        assert exact is not None
        known = exact.known[0]["n"].astype(np.float64)
        far[precision] = np.abs(outputs["n"].astype(np.float64) - known).max()
    assert far["fp32"] <= far[""]


def test_a_model_of_fp32_stays_the_same_module(tmp_path: Path) -> None:
    from tests.lib.artifact_fixtures import tiny_convnet

    mod = tiny_convnet().graph.to_relax("tiny")
    assert widen(mod) is mod


def test_a_kernel_that_the_graph_brings_along_keeps_its_types() -> None:
    load_tvm()
    from tvm import relax, te

    builder = relax.BlockBuilder()
    x = relax.Var("input_0", relax.TensorType([4, 4], "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            twice = builder.emit(relax.op.add(x, x))
            own = builder.emit_te(
                lambda a: te.compute(a.shape, lambda i, j: a[i, j] * a[i, j], "square"), twice
            )
            out = builder.emit_output(relax.op.add(own, relax.const(1.0, "float16")))
        builder.emit_func_output(out)
    main = widen(builder.get())["main"]
    types = [str(b.var.ty.dtype) for b in main.body.blocks[0].bindings]
    kernel = next(
        b.value for b in main.body.blocks[0].bindings if b.value.op.name == "relax.call_tir"
    )
    assert [str(a.ty.dtype) for a in kernel.args[1]] == ["float16"]
    assert types.count("float32") == 4  # the input, its sum, what the kernel gave, and one more
    assert str(main.ret_ty.dtype) == "float16"


def test_attributes_that_name_a_type_are_widened() -> None:
    load_tvm()
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("input_0", relax.TensorType([2, 3], "bfloat16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            ones = builder.emit(relax.op.full([2, 3], relax.const(1.0, "bfloat16"), "bfloat16"))
            out = builder.emit_output(relax.op.add(x, ones))
        builder.emit_func_output(out)
    bindings = widen(builder.get())["main"].body.blocks[0].bindings
    types = [str(b.var.ty.dtype) for b in bindings]
    assert types == [*["float32"] * 3, *["bfloat16"] * 2]  # the last is what it returns


def test_without_a_precision_nothing_is_widened(half: Path) -> None:
    model = simplified(read(half, "fp32"))
    exported = lower(replace(model, precision=""), LLVM)
    assert not any("widened" in note for note in exported.notes)
