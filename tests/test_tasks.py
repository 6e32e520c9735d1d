"""Lowering and task extraction: kernels agree with ONNX Runtime, weights stay outside of code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from models import ROOT, conv_net, example_models, floats, ints, model, shape_arithmetic_net
from onnx import TensorProto, helper

from tunerd.errors import ModelError
from tunerd.lowering import Lowered, lower, make_target
from tunerd.model import load_model
from tunerd.reference import Reference, agree, random_inputs
from tunerd.tasks import extract_tasks
from tunerd.vocabulary import Model, TargetSpec

if TYPE_CHECKING:
    from tvm.ir import IRModule

LLVM = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 2}))
CUDA = TargetSpec(
    "cuda",
    json.dumps(
        {
            "kind": "cuda",
            "arch": "sm_90",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
            "registers_per_block": 65536,
        }
    ),
)
EXAMPLES = example_models()


def load(tmp_path: Path, proto: onnx.ModelProto, **options: object) -> Model:
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    return load_model(path, **options)  # type: ignore[arg-type]


def innermost_output_loop(mod: IRModule) -> IRModule:
    """Return `mod` with reductions outside of the last loop of their output.

    As they are, large convolutions step through their weights column by column: VGG-19 would take
    minutes.
    """
    from tvm.s_tir import Schedule
    from tvm.tirx import IterVar, PrimFunc

    changed = mod.clone()
    for var, func in mod.functions_items():
        if not isinstance(func, PrimFunc):
            continue
        schedule = Schedule(func)
        for block in schedule.get_child_blocks(schedule.get_sblock("root")):
            loops, iters = schedule.get_loops(block), schedule.get(block).iter_vars
            reduced = [i.iter_type == IterVar.CommReduce for i in iters]
            if len(loops) == len(iters) and any(reduced) and not all(reduced):
                spatial = [
                    x for x, is_reduced in zip(loops, reduced, strict=True) if not is_reduced
                ]
                inner = [x for x, is_reduced in zip(loops, reduced, strict=True) if is_reduced]
                schedule.reorder(*spatial[:-1], *inner, spatial[-1])
        changed.update_func(var, schedule.mod["main"].without_attr("global_symbol"))
    return changed


def run(lowered: Lowered, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Compile with TVM's own lowering and run on this machine."""
    import tvm
    from tvm import relax
    from tvm.relax.backend.cpu_generic import pipeline

    target = make_target(LLVM)
    with target:
        passes = pipeline.get_default_pipeline(target)
        mod = innermost_output_loop(lowered.mod)
        executable = relax.build(mod, target, relax_pipeline=passes)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    arrays = [*feed.values(), *lowered.weights.values()]
    result = machine["main"](*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays])
    return [r.numpy() for r in ([result] if hasattr(result, "numpy") else list(result))]


def check(loaded: Model, *, reference: onnx.ModelProto | None = None) -> Lowered:
    """Assert that the lowered model agrees with ONNX Runtime, and that its input matters."""
    lowered = lower(loaded, LLVM)
    session = Reference(reference or loaded.proto)
    feeds = [random_inputs(loaded.inputs, seed) for seed in (0, 1)]
    expected = [session.run(feed) for feed in feeds]
    for spec, got in zip(loaded.outputs, run(lowered, feeds[0]), strict=True):
        assert got.shape == spec.shape
        assert agree(got, expected[0][spec.name], rtol=1e-3)
        assert not agree(expected[1][spec.name], expected[0][spec.name], rtol=0.005)
    return lowered


def operators(lowered: Lowered) -> set[str]:
    """Return the names of the kernels that `main` calls, without TVM's numbers."""
    names = [v.name_hint for v, f in lowered.mod.functions_items() if v.name_hint != "main"]
    return {n.rstrip("0123456789") for n in names}


# --- graphs ------------------------------------------------------------------------------------


def test_a_residual_network_fuses_into_one_kernel_a_convolution(tmp_path: Path) -> None:
    lowered = check(load(tmp_path, conv_net()))
    names = [t.name for t in extract_tasks(lowered, LLVM)]
    fused = [n for n in names if "conv2d" in n]
    assert len(fused) == 2
    assert all("add" in n for n in fused)
    assert not any("stack" in n or "broadcast" in n for n in names)


def test_convolutions_are_lowered_to_channels_last(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, conv_net()), LLVM)
    shapes = [w.shape for w in lowered.weights.values() if w.ndim == 4 and w.shape[0] == 3]
    assert shapes == [(3, 3, 3, 8), (3, 3, 8, 8)]
    assert lowered.notes == ()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_of_open_batch_height_and_width_runs(tmp_path: Path, batch: int) -> None:
    dims = {"n": batch, "h": 20, "w": 14}
    check(load(tmp_path, conv_net(("n", 3, "h", "w")), dims=dims))


def test_a_model_with_shape_arithmetic_runs(tmp_path: Path) -> None:
    dims = {"n": 2, "h": 12, "w": 10}
    check(load(tmp_path, shape_arithmetic_net(("n", 3, "h", "w")), dims=dims))


def test_another_batch_runs(tmp_path: Path) -> None:
    loaded = load(tmp_path, conv_net(), batch=3)
    assert loaded.inputs[0].shape[0] == 3
    check(loaded)


def test_grouped_convolutions_and_channel_shuffles_run_in_channels_last(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], group=2),
        helper.make_node("Reshape", ["a", "split"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[0, 2, 1, 3, 4]),
        helper.make_node("Reshape", ["c", "join"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["out"], group=8, pads=[1, 1, 1, 1]),
    ]
    weights = {
        "w1": floats(8, 2, 1, 1),
        "w2": floats(8, 1, 3, 3),
        "split": ints(1, 2, 4, 6, 6),
        "join": ints(1, 8, 6, 6),
    }
    inputs, outputs = {"x": (1, 4, 6, 6)}, {"out": (1, 8, 6, 6)}
    lowered = check(load(tmp_path, model(nodes, inputs=inputs, outputs=outputs, weights=weights)))
    assert lowered.notes == ()


def test_local_response_normalization_dropout_and_softmax_run(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"]),
        helper.make_node("LRN", ["a"], ["b"], size=3, alpha=0.5, beta=0.75, bias=1.0),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Dropout", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "w2", "bias"], ["f"], transB=1, alpha=0.5, beta=2.0),
        helper.make_node("Softmax", ["f"], ["out"]),
    ]
    weights = {"w1": floats(6, 3, 1, 1), "w2": floats(5, 6 * 4 * 4), "bias": floats(5)}
    inputs, outputs = {"x": (1, 3, 8, 8)}, {"out": (1, 5)}
    lowered = check(load(tmp_path, model(nodes, inputs=inputs, outputs=outputs, weights=weights)))
    assert not any("dropout" in n for n in operators(lowered))


def test_several_inputs_and_outputs_keep_their_order(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["b.1", "w"], ["p"]),
        helper.make_node("Sub", ["a/0", "p"], ["second"]),
        helper.make_node("Tanh", ["p"], ["first"]),
    ]
    inputs = {"b.1": (2, 4), "a/0": (2, 3)}
    outputs = {"first": (2, 3), "second": (2, 3)}
    check(load(tmp_path, model(nodes, inputs=inputs, outputs=outputs, weights={"w": floats(4, 3)})))


def test_a_batch_norm_that_was_not_simplified_is_folded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(proto: onnx.ModelProto) -> onnx.ModelProto:
        raise RuntimeError("no")

    norm = ["c", "scale", "bias", "mean", "var"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", norm, ["n"]),
        helper.make_node("Relu", ["n"], ["out"]),
    ]
    weights = {n: np.abs(floats(4, seed=i)) + 0.5 for i, n in enumerate(norm[1:])}
    weights["w"] = floats(4, 3, 3, 3)
    inputs, outputs = {"x": (1, 3, 6, 6)}, {"out": (1, 4, 6, 6)}
    monkeypatch.setattr("tunerd.simplify._slim", refuse)
    proto = model(nodes, inputs=inputs, outputs=outputs, weights=weights)
    loaded = load(tmp_path, proto)
    assert loaded.notes == ("not simplified: no",)
    for each in (loaded, dataclasses.replace(loaded, proto=proto)):  # the latter as it was
        lowered = check(each)
        assert len(operators(lowered)) <= 3  # in, one fused convolution, out


def test_an_operator_without_a_kernel_in_channels_last_keeps_the_model_in_its_layout(
    tmp_path: Path,
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"]),
        helper.make_node("ConvTranspose", ["a", "w2"], ["out"], strides=[2, 2]),
    ]
    weights = {"w1": floats(4, 3, 1, 1), "w2": floats(4, 2, 2, 2)}
    inputs, outputs = {"x": (1, 3, 6, 6)}, {"out": (1, 2, 12, 12)}
    proto = model(nodes, inputs=inputs, outputs=outputs, weights=weights)
    lowered = check(load(tmp_path, proto))
    assert lowered.notes[0].endswith("no NHWC kernel for nn.conv2d_transpose (1)")


ACTIVATIONS = {
    "Clip": [helper.make_node("Clip", ["c", "zero", "six"], ["out"])],
    "Clip without an upper bound": [helper.make_node("Clip", ["c", "zero"], ["out"])],
    "HardSigmoid": [helper.make_node("HardSigmoid", ["c"], ["out"], alpha=0.3)],
    "HardSwish": [helper.make_node("HardSwish", ["c"], ["out"])],
    "LeakyRelu": [helper.make_node("LeakyRelu", ["c"], ["out"], alpha=0.1)],
    "Max": [helper.make_node("Max", ["c", "zero", "c"], ["out"])],
    "Min": [helper.make_node("Min", ["c", "six"], ["out"])],
    "PRelu": [helper.make_node("PRelu", ["c", "slope"], ["out"])],
    "Sigmoid": [helper.make_node("Sigmoid", ["c"], ["out"])],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_joins_its_convolution(tmp_path: Path, name: str) -> None:
    weights = {
        "w": floats(4, 3, 3, 3) * 4,
        "zero": np.array(0, np.float32),
        "six": np.array(6, np.float32),
        "slope": floats(4, 1, 1),
    }
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), *ACTIVATIONS[name]]
    inputs, outputs = {"x": (1, 3, 6, 6)}, {"out": (1, 4, 6, 6)}
    proto = model(nodes, inputs=inputs, outputs=outputs, weights=weights)
    lowered = check(load(tmp_path, proto))
    assert lowered.notes == ()
    others = operators(lowered) - {"transpose"}
    assert len(others) == 1
    assert others.pop().startswith("fused_conv2d")


def test_a_layout_that_would_add_transposes_is_not_used(tmp_path: Path) -> None:
    nodes = []
    x = "x"
    for i in range(4):
        nodes += [
            helper.make_node("Conv", [x, "w"], [f"c{i}"]),
            helper.make_node("Reshape", [f"c{i}", "rows"], [f"r{i}"]),  # mixes channels and space
            helper.make_node("Tanh", [f"r{i}"], [f"t{i}"]),
            helper.make_node("Reshape", [f"t{i}", "image"], [f"o{i}"]),
        ]
        x = f"o{i}"
    weights = {"w": floats(4, 4, 1, 1), "rows": ints(16, 9), "image": ints(1, 4, 6, 6)}
    shape = (1, 4, 6, 6)
    proto = model(nodes, inputs={"x": shape}, outputs={x: shape}, weights=weights)
    lowered = check(load(tmp_path, proto))
    assert lowered.notes == ("convolutions stay in NCHW: NHWC would add 8 transposes",)


def test_a_graph_that_tvm_cannot_convert_stays_in_its_layout(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"]),
        helper.make_node("Conv", ["x", "w2"], ["b"]),
        helper.make_node("Mean", ["a", "b"], ["out"]),
    ]
    weights = {"w1": floats(4, 4, 1, 1), "w2": floats(4, 4, 1, 1, seed=1)}
    shape = (1, 4, 6, 6)
    proto = model(nodes, inputs={"x": shape}, outputs={"out": shape}, weights=weights)
    lowered = check(load(tmp_path, proto))
    assert lowered.notes[0].startswith("convolutions stay in NCHW: TVM cannot convert them")


# --- weights -----------------------------------------------------------------------------------


def test_no_array_is_left_inside_the_code(tmp_path: Path) -> None:
    import tvm

    lowered = lower(load(tmp_path, conv_net()), LLVM)
    main = lowered.mod["main"]
    names = [p.name for p in main.params]
    assert lowered.num_inputs == 1
    assert names[1:] == list(lowered.weights)
    assert int(main.attrs["num_input"]) == 1
    for param, weight in zip(main.params[1:], lowered.weights.values(), strict=True):
        assert tuple(int(d) for d in param.ty.shape.values) == weight.shape
    held = []
    tvm.relax.analysis.post_order_visit(
        main, lambda e: held.append(e) if isinstance(e, tvm.ir.GenericConst) else None
    )
    assert all(not c.value.shape for c in held)


def test_weight_arguments_are_the_hoisted_ones(tmp_path: Path) -> None:
    tasks = extract_tasks(lower(load(tmp_path, conv_net()), LLVM), LLVM)
    first = next(t for t in tasks if "conv2d" in t.name)
    assert [first.args[i].shape for i in first.weight_args] == [(3, 3, 3, 8), (1, 1, 1, 8)]
    assert first.args[-1].shape == (1, 16, 16, 8)
    assert len(first.args) - 1 not in first.weight_args


# --- unsupported -------------------------------------------------------------------------------


def test_operators_without_a_converter_are_named_with_counts(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("LSTM", [x, "w", "r"], [f"y{i}"], hidden_size=3)
        for i, x in enumerate(("x", "x"))
    ]
    nodes.append(helper.make_node("Sub", ["y0", "y1"], ["out"]))
    weights = {"w": floats(1, 12, 4), "r": floats(1, 12, 3)}
    outputs = {"out": (2, 1, 1, 3)}
    proto = model(nodes, inputs={"x": (2, 1, 4)}, outputs=outputs, weights=weights)
    with pytest.raises(ModelError, match=r"operators of net: LSTM \([12]\)"):
        lower(load(tmp_path, proto), LLVM)


def test_what_the_importer_fails_on_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["values", "indices"], kernel_shape=[2, 2]),
        helper.make_node("Cast", ["indices"], ["out"], to=TensorProto.FLOAT),
    ]
    inputs, outputs = {"x": (1, 2, 4, 4)}, {"out": (1, 2, 3, 3)}
    loaded = load(tmp_path, model(nodes, inputs=inputs, outputs=outputs))
    with pytest.raises(ModelError, match=r"TVM cannot import net: .*MaxPool"):
        lower(loaded, LLVM)
    assert capsys.readouterr().out == ""


# --- tasks -------------------------------------------------------------------------------------


def test_tasks_cover_every_call_and_come_in_the_order_of_the_model(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, EXAMPLES.transformer_encoder(layers=2)), LLVM)
    tasks = extract_tasks(lowered, LLVM)
    calls = [
        b.value.args[0].name_hint
        for block in lowered.mod["main"].body.blocks
        for b in block.bindings
        if getattr(getattr(b.value, "op", None), "name", "") == "relax.call_tir"
    ]
    assert sum(t.weight for t in tasks) == len(calls)
    positions = [calls.index(t.name) for t in tasks]
    assert positions == sorted(positions)
    assert len({t.task_id for t in tasks}) == len(tasks) == 11
    assert all(t.flops > 0 for t in tasks if "matmul" in t.name)


def test_a_reshape_is_no_task(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Softmax", ["r"], ["s"], axis=-1),
        helper.make_node("Reshape", ["s", "target"], ["out"]),
    ]
    weights = {"target": ints(8, 4)}
    proto = model(nodes, inputs={"x": (2, 16)}, outputs={"out": (8, 4)}, weights=weights)
    names = [t.name for t in extract_tasks(lower(load(tmp_path, proto), LLVM), LLVM)]
    assert "reshape" not in names
    assert names


def test_the_same_kernel_has_the_same_id_in_another_model(tmp_path: Path) -> None:
    short, long = (
        {
            t.task_id
            for t in extract_tasks(
                lower(load(tmp_path, EXAMPLES.transformer_encoder(layers=n)), LLVM), LLVM
            )
        }
        for n in (1, 3)
    )
    assert short == long


def test_task_ids_and_modules_are_the_same_in_another_process(tmp_path: Path) -> None:
    tasks = extract_tasks(lower(load(tmp_path, conv_net()), LLVM), LLVM)
    code = f"""
import hashlib, json, sys
from pathlib import Path
from tunerd.lowering import lower
from tunerd.model import load_model
from tunerd.tasks import extract_tasks
from tunerd.vocabulary import TargetSpec
target = TargetSpec("llvm", {LLVM.json!r})
tasks = extract_tasks(lower(load_model(Path(sys.argv[1])), target), target)
mods = [hashlib.sha256(t.mod_json.encode()).hexdigest() for t in tasks]
print(json.dumps([[t.task_id for t in tasks], mods, "tvm.s_tir.tensor_intrin" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "net.onnx")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "11"},
    )
    ids, mods, slow_import = json.loads(done.stdout.splitlines()[-1])
    assert ids == [t.task_id for t in tasks]
    assert mods == [hashlib.sha256(t.mod_json.encode()).hexdigest() for t in tasks]
    assert not slow_import  # it takes 22 s and only tensor cores need it


def test_a_tasks_module_loads_as_the_function_that_the_model_calls(tmp_path: Path) -> None:
    import tvm
    import tvm_ffi

    lowered = lower(load(tmp_path, conv_net()), LLVM)
    normalize = tvm.get_global_func("tvm.s_tir.meta_schedule.normalize_mod")
    for task in extract_tasks(lowered, LLVM):
        mod = tvm.ir.load_json(task.mod_json)
        assert [v.name_hint for v in mod.get_global_vars()] == ["main"]
        assert tvm_ffi.structural_equal(mod, normalize(lowered.mod[task.name]))


def test_cuda_tasks_are_extracted_without_a_gpu(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, conv_net()), CUDA)
    tasks = extract_tasks(lowered, CUDA)
    assert sum("conv2d" in t.name for t in tasks) == 2
    assert all(t.target is CUDA for t in tasks)


def test_integer_inputs_reach_an_embedding(tmp_path: Path) -> None:
    proto = model(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("ReduceSum", ["rows", "axis"], ["out"], keepdims=0),
        ],
        inputs={"ids": (1, 6)},
        outputs={"out": (1, 6)},
        weights={"table": floats(10, 8), "axis": ints(2)},
    )
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    check(load(tmp_path, proto))


# --- example models ----------------------------------------------------------------------------


def test_a_small_encoder_agrees_with_onnx_runtime(tmp_path: Path) -> None:
    proto = EXAMPLES.transformer_encoder(layers=2)
    lowered = check(load(tmp_path, proto), reference=proto)
    assert "fused_matmul_add_add" in operators(lowered)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("light_squeezenet", 28),
        pytest.param("light_shufflenet", 32, marks=pytest.mark.slow),
        pytest.param("light_resnet50", 29, marks=pytest.mark.slow),
        pytest.param("light_inception_v1", 78, marks=pytest.mark.slow),
        pytest.param("light_inception_v2", 60, marks=pytest.mark.slow),
        pytest.param("light_densenet121", 189, marks=pytest.mark.slow),
        pytest.param("light_bvlc_alexnet", 20, marks=pytest.mark.slow),
        pytest.param("light_zfnet512", 19, marks=pytest.mark.slow),
        pytest.param("light_vgg19", 20, marks=pytest.mark.slow),
        pytest.param("encoder12", 11, marks=pytest.mark.slow),
    ],
)
def test_an_example_model_agrees_with_onnx_runtime(tmp_path: Path, name: str, tasks: int) -> None:
    proto = EXAMPLES.make(name)
    loaded = load(tmp_path, proto)
    assert loaded.notes == ()
    lowered = check(loaded, reference=proto)
    assert lowered.notes == ()
    assert len(extract_tasks(lowered, LLVM)) == tasks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["light_resnet50", "light_shufflenet"])
def test_a_baked_batch_of_one_becomes_four(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path, EXAMPLES.make(name), batch=4)
    assert loaded.outputs[0].shape == (4, 1000)
    assert "Reshape target" in loaded.notes[0]
