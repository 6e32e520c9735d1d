"""Lowering: kernels agree with ONNX Runtime, weights stay outside of code."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm_ffi
from onnx import TensorProto, helper
from tvm import relax

from tests.lib import IS_NIGHTLY
from tests.lib.lowered import EXAMPLES, LLVM, check, load, operators, run
from tests.lib.models import conv_net, floats, ints, model, not_imported, shape_arithmetic_net
from tunerd.errors import ModelError
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.relax import lowering
from tunerd.frontend.relax.constants import remove_redundant_reshapes
from tunerd.frontend.relax.importing import import_onnx
from tunerd.frontend.relax.lowering import lower, touched_bytes
from tunerd.frontend.tasks import extract_tasks
from tunerd.system.arrays import random_inputs

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


def test_inputs_that_nothing_reads_and_outputs_that_nothing_computes_are_kept(
    tmp_path: Path,
) -> None:
    nodes = [helper.make_node("Sub", ["a", "b"], ["y"]), helper.make_node("Shape", ["a"], ["size"])]
    inputs = {"a": (2, 4), "unread": (2, 3), "b": (2, 4)}
    proto = model(nodes, inputs=inputs, outputs={"a": (2, 4), "y": (2, 4)})
    proto.graph.output.append(helper.make_tensor_value_info("size", TensorProto.INT64, (2,)))
    loaded = load(tmp_path, proto)
    feed = random_inputs(loaded.inputs, 0)
    first, second, third = run(lower(loaded, LLVM), feed)
    assert np.array_equal(first, feed["a"])
    assert np.array_equal(second, feed["a"] - feed["b"])
    assert third.tolist() == [2, 4]


def test_an_input_can_be_a_scalar(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["t", "half"], ["h"]),
        helper.make_node("Mul", ["h", "half"], ["q"]),
        helper.make_node("Div", ["x", "q"], ["y"]),
    ]
    weights = {"half": np.array(0.5, np.float32)}
    inputs, outputs = {"x": (2, 4), "t": ()}, {"y": (2, 4)}
    check(load(tmp_path, model(nodes, inputs=inputs, outputs=outputs, weights=weights)))


@pytest.mark.parametrize("is_causal", [0, 1])
def test_attention_of_onnx_itself_runs(tmp_path: Path, is_causal: int) -> None:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=is_causal)
    shape = (1, 2, 4, 8)
    inputs = {"q": shape, "k": shape, "v": shape}
    check(load(tmp_path, model([node], inputs=inputs, outputs={"y": shape}, opset=23)))


def test_a_celu_runs(tmp_path: Path) -> None:
    node = helper.make_node("Celu", ["x"], ["y"], alpha=0.7)
    check(load(tmp_path, model([node], inputs={"x": (2, 8)}, outputs={"y": (2, 8)})))


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
    monkeypatch.setattr("tunerd.frontend.onnx.simplify._slim", refuse)
    proto = model(nodes, inputs=inputs, outputs=outputs, weights=weights)
    loaded = load(tmp_path, proto)
    assert loaded.notes == ("not simplified: no",)
    as_it_was = dataclasses.replace(loaded, graph=OnnxGraph(proto))
    for each in (loaded, as_it_was):
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
    "Swish": [helper.make_node("Swish", ["c"], ["out"], alpha=1.5)],
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
    opset = 24 if name == "Swish" else 17
    proto = model(nodes, inputs=inputs, outputs=outputs, weights=weights, opset=opset)
    lowered = check(load(tmp_path, proto))
    assert lowered.notes == ()
    others = operators(lowered) - {"transpose"}
    assert len(others) == 1
    assert others.pop().startswith("fused_conv2d")


@pytest.mark.parametrize("p", [1, 2])
def test_vectors_are_normalized_and_those_of_nothing_stay_so(tmp_path: Path, p: int) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["masked"]),
        helper.make_node("LpNormalization", ["masked"], ["out"], p=p, axis=1),
    ]
    weights = {"mask": np.array([[1.0], [0.0], [1.0]], np.float32)}
    shape = (3, 8)
    check(
        load(tmp_path, model(nodes, inputs={"x": shape}, outputs={"out": shape}, weights=weights))
    )


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


@pytest.mark.parametrize("shape", [(), (1,), (6,), (4, 1, 1), (1, 4, 1, 1)], ids=str)
def test_a_constant_of_any_rank_joins_its_convolution(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Mul", ["a", "c"], ["b"]),
        helper.make_node("Conv", ["b", "w"], ["d"]),
        helper.make_node("Add", ["c", "d"], ["out"]),
    ]
    weights = {"w": floats(4, 4, 1, 1), "c": np.asarray(floats(*shape), np.float32)}
    size = (1, 4, 6, 6)
    proto = model(nodes, inputs={"x": size}, outputs={"out": size}, weights=weights)
    names = operators(check(load(tmp_path, proto)))
    assert not [n for n in names if "transpose" in n and n.startswith("fused")], names
    assert "fused_conv2d_add" in names


def test_an_image_becomes_rows_of_channels_without_a_transpose(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "flat"], ["b"]),
        helper.make_node("Transpose", ["b"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["rows", "m"], ["c"]),
        helper.make_node("Transpose", ["c"], ["d"], perm=[0, 2, 1]),
        helper.make_node("Reshape", ["d", "image"], ["e"]),
        helper.make_node("Conv", ["e", "w"], ["out"]),
    ]
    weights = {"w": floats(4, 4, 1, 1), "m": floats(4, 4)}
    weights |= {"flat": ints(1, 4, 36), "image": ints(1, 4, 6, 6)}
    size = (1, 4, 6, 6)
    proto = model(nodes, inputs={"x": size}, outputs={"out": size}, weights=weights)
    lowered = check(load(tmp_path, proto))
    assert not lowered.notes
    moved = {name for name in operators(lowered) if "transpose" in name}
    assert moved <= {"transpose", "transpose1"}  # the input and the output


def test_an_axis_that_counts_from_the_end_leaves_convolutions_in_channels_last(
    tmp_path: Path,
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Reshape", ["b", "rows"], ["c"]),
        helper.make_node("Squeeze", ["c", "axis"], ["out"]),
    ]
    weights = {"w": floats(4, 4, 1, 1), "rows": ints(4, 1, 36), "axis": ints(-2)}
    size = (1, 4, 6, 6)
    proto = model(nodes, inputs={"x": size}, outputs={"out": (4, 36)}, weights=weights)
    lowered = check(load(tmp_path, proto))
    assert not lowered.notes
    assert "fused_conv2d_relu" in operators(lowered)


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


def test_reshapes_are_removed_as_by_the_pass_of_tvm(tmp_path: Path) -> None:
    shapes = {"a": (3, 8), "b": (2, 12), "c": (2, 12), "out": (4, 6)}
    nodes = [helper.make_node("Relu", ["x"], ["start"])]
    nodes += [
        helper.make_node("Reshape", [source, f"to_{name}"], [name])
        for source, name in itertools.pairwise(["start", *shapes])
    ]
    weights = {f"to_{name}": ints(*shape) for name, shape in shapes.items()}
    inputs, outputs = {"x": (4, 6)}, {"out": (4, 6), "b": (2, 12)}
    proto = model(nodes, inputs=inputs, outputs=outputs, weights=weights)
    loaded = load(tmp_path, proto)
    mod = import_onnx(proto, loaded.name)
    assert lowering._count(mod, "relax.reshape") == 4
    ours, theirs = (
        relax.transform.DeadCodeElimination()(each(mod))
        for each in (remove_redundant_reshapes, relax.transform.RemoveRedundantReshape())
    )
    assert lowering._count(ours, "relax.reshape") == 1  # of output b; the other one is the input
    assert tvm_ffi.structural_equal(ours, theirs, map_free_vars=True)


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


# --- unsupported -------------------------------------------------------------------------------


def test_operators_without_a_converter_are_named_with_counts(tmp_path: Path) -> None:
    nodes = [helper.make_node("Det", ["x"], [f"y{i}"]) for i in range(2)]
    nodes.append(helper.make_node("Sub", ["y0", "y1"], ["out"]))
    proto = model(nodes, inputs={"x": (2, 4, 4)}, outputs={"out": (2,)})
    with pytest.raises(ModelError, match=r"operators of net: Det \([12]\)"):
        lower(load(tmp_path, proto), LLVM)


def test_what_the_importer_fails_on_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(tmp_path, not_imported())
    with pytest.raises(ModelError, match=r"TVM cannot import net: .*MaxUnpool"):
        lower(loaded, LLVM)
    assert capsys.readouterr().out == ""


def test_a_shape_that_tvm_gets_wrong_is_refused_before_anything_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.relax.frontend.onnx import onnx_frontend

    monkeypatch.setattr("tunerd.frontend.relax.converters._MaxPool", onnx_frontend.MaxPool)
    node = helper.make_node(
        "MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER"
    )
    proto = model([node], inputs={"x": (1, 4, 7, 7)}, outputs={"y": (1, 4, 4, 4)})
    with pytest.raises(ModelError) as raised:
        lower(load(tmp_path, proto), LLVM)
    assert str(raised.value) == (
        "TVM imports net wrongly: its output 'y' would be float32[1, 4, 3, 3], and in ONNX Runtime "
        "it is float32[1, 4, 4, 4]; export the model differently"
    )


# --- example models ----------------------------------------------------------------------------


def test_a_small_encoder_agrees_with_onnx_runtime(tmp_path: Path) -> None:
    proto = EXAMPLES.transformer_encoder(layers=2)
    lowered = check(load(tmp_path, proto), reference=proto)
    assert "fused_matmul_add_add" in operators(lowered)


LARGE = (("light_inception_v2", 51), ("light_densenet121", 135), ("light_bvlc_alexnet", 20))


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("light_squeezenet", 24),
        pytest.param("light_shufflenet", 32, marks=pytest.mark.slow),
        pytest.param("light_resnet50", 29, marks=pytest.mark.slow),
        pytest.param("light_inception_v1", 69, marks=pytest.mark.slow),
        pytest.param("encoder12", 11, marks=pytest.mark.slow),
        *(LARGE if IS_NIGHTLY else ()),
    ],
)
def test_an_example_model_agrees_with_onnx_runtime(tmp_path: Path, name: str, tasks: int) -> None:
    proto = EXAMPLES.make(name)
    loaded = load(tmp_path, proto)
    assert loaded.notes == ()
    lowered = check(loaded, reference=proto)
    assert lowered.notes == ()
    assert len(extract_tasks(lowered, LLVM)) == tasks


def test_windows_that_step_over_their_input_agree_with_onnx_runtime(tmp_path: Path) -> None:
    """What the example models light_vgg19 and light_zfnet512 have and the others have not."""
    large = {"strides": [2, 2], "pads": [0, 0, 0, 0]}
    pool = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 0, 0]}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], kernel_shape=[7, 7], **large),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], **pool),
        helper.make_node("Conv", ["c", "w2"], ["d"], kernel_shape=[5, 5], **large),
        helper.make_node("LRN", ["d"], ["e"], alpha=1e-4, beta=0.75, size=5),
        helper.make_node("MaxPool", ["e"], ["out"], **pool),
    ]
    weights = {"w1": floats(8, 3, 7, 7), "b1": floats(8), "w2": floats(8, 8, 5, 5)}
    dims = {"x": (1, 3, 64, 64)}, {"out": (1, 8, 2, 2)}
    proto = model(nodes, inputs=dims[0], outputs=dims[1], weights=weights)
    check(load(tmp_path, proto), reference=proto)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["light_resnet50", "light_shufflenet"])
def test_a_baked_batch_of_one_becomes_four(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path, EXAMPLES.make(name), batch=4)
    assert loaded.outputs[0].shape == (4, 1000)
    assert "Reshape target" in loaded.notes[0]


# --- what an inference touches -----------------------------------------------------------------


def chain(*widths: int) -> onnx.ModelProto:
    """Return matrix products, one after the other, of a row."""
    weights = {f"w{i}": floats(a, b) for i, (a, b) in enumerate(itertools.pairwise(widths))}
    names = ["x", *(f"h{i}" for i in range(1, len(weights))), "out"]
    nodes = [
        helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(len(weights))
    ]
    shapes = {"x": (1, widths[0])}, {"out": (1, widths[-1])}
    return model(nodes, inputs=shapes[0], outputs=shapes[1], weights=weights)


def test_an_inference_touches_all_weights_and_the_activations_of_a_time(tmp_path: Path) -> None:
    widths = (16, 64, 8, 32, 8)
    lowered = lower(load(tmp_path, chain(*widths)), LLVM)
    weights = sum(a * b for a, b in itertools.pairwise(widths))
    assert touched_bytes(lowered) == 4 * (weights + 64 + 8)  # of the first product and the second


def test_what_is_read_late_is_held_until_then(tmp_path: Path) -> None:
    halves = [helper.make_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2)]
    long_way = [
        helper.make_node("MatMul", ["a", "w"], ["c"]),
        helper.make_node("Softmax", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["e"]),
        helper.make_node("Concat", ["e", "b"], ["out"], axis=1),
    ]
    graph = model(
        [*halves, *long_way],
        inputs={"x": (1, 64)},
        outputs={"out": (1, 64)},
        weights={"w": floats(32, 32)},
        opset=18,
    )
    lowered = lower(load(tmp_path, graph), LLVM)
    # At the end the second half, the last product, and the output.
    assert touched_bytes(lowered) >= 4 * (32 * 32 + 32 + 32 + 64)
    assert touched_bytes(lowered) <= 4 * (32 * 32 + 64 + 32 + 32 + 64)
