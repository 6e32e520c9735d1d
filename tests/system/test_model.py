"""Loading ONNX files: open shapes, other batches, simplification."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib import ROOT
from tests.lib.models import (
    conv_net,
    flattening_net,
    floats,
    ints,
    load_model,
    model,
    shape_arithmetic_net,
)
from tunerd.errors import InputError, ModelError
from tunerd.frontend.onnx.inference import weights_aside, weights_back
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.system.arrays import random_inputs


def save(tmp_path: Path, proto: onnx.ModelProto, name: str = "net.onnx") -> Path:
    path = tmp_path / name
    onnx.save(proto, path)
    return path


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node)


# --- files -------------------------------------------------------------------------------------


def test_a_model_of_fixed_shapes_loads_as_the_file_says(tmp_path: Path) -> None:
    loaded = load_model(save(tmp_path, conv_net()))
    assert loaded.name == "net"
    assert [(i.name, i.shape, i.dtype) for i in loaded.inputs] == [
        ("images", (1, 3, 16, 16), "float32")
    ]
    assert [(o.name, o.shape) for o in loaded.outputs] == [("scores", (1, 5))]
    assert loaded.notes == ()


# --- external data -----------------------------------------------------------------------------


def test_weights_beside_the_model_load_and_give_the_same_digest(tmp_path: Path) -> None:
    inline = load_model(save(tmp_path, conv_net()))
    (tmp_path / "external").mkdir()
    path = tmp_path / "external" / "net.onnx"
    onnx.save(conv_net(), path, save_as_external_data=True, location="net.data", size_threshold=0)
    assert (path.parent / "net.data").exists()
    assert load_model(path).digest == inline.digest


# --- shapes ------------------------------------------------------------------------------------


def test_open_dimensions_are_listed_with_the_flags_that_close_them(tmp_path: Path) -> None:
    path = save(tmp_path, conv_net(("batch", 3, "height", 16)))
    with pytest.raises(ModelError) as raised:
        load_model(path)
    assert "images:batch,3,height,16" in str(raised.value)
    assert "--dim batch=1 --dim height=N" in str(raised.value)


@pytest.mark.parametrize("name", [None, "", "?", "-1", "None"])
def test_open_dimensions_without_a_name_ask_for_the_whole_shape(
    tmp_path: Path, name: str | None
) -> None:
    path = save(tmp_path, conv_net((name, 3, 16, name)))
    with pytest.raises(ModelError, match=re.escape("--shape images:N,3,16,N")):
        load_model(path)


def test_dimensions_are_closed_by_name_or_by_shape_alike(tmp_path: Path) -> None:
    path = save(tmp_path, conv_net(("batch", 3, "height", "width")))
    by_name = load_model(path, dims={"batch": 2, "height": 20, "width": 24})
    by_shape = load_model(path, shapes={"images": (2, 3, 20, 24)})
    assert by_name.inputs[0].shape == (2, 3, 20, 24)
    assert by_name.outputs[0].shape == (2, 5)
    assert by_name.digest == by_shape.digest


def test_unknown_names_of_inputs_and_dimensions_list_the_known_ones(tmp_path: Path) -> None:
    path = save(tmp_path, conv_net(("batch", 3, "height", 16)))
    with pytest.raises(InputError, match=r"no input 'image'; its inputs are 'images'"):
        load_model(path, shapes={"image": (1, 3, 16, 16)})
    with pytest.raises(InputError, match=r"'hight': the open ones are 'batch', 'height'"):
        load_model(path, dims={"batch": 1, "hight": 16})


@pytest.mark.parametrize(
    ("shapes", "dims", "found"),
    [
        ({"images": (1, 3, 16)}, {}, "has 3 dimensions"),
        ({"images": (1, 4, 16, 16)}, {}, "in dimension 1"),
        ({"images": (0, 3, 16, 16)}, {}, "below 1"),
        ({}, {"batch": 0}, "must be 1 or more"),
        ({"images": (2, 3, 16, 16)}, {"batch": 3}, "'batch' is given as 3"),
    ],
)
def test_shapes_that_do_not_fit_the_file_are_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], dims: dict[str, int], found: str
) -> None:
    path = save(tmp_path, conv_net(("batch", 3, 16, 16)))
    with pytest.raises(InputError, match=found):
        load_model(path, shapes=shapes, dims=dims)


def test_a_shape_the_graph_cannot_take_is_refused(tmp_path: Path) -> None:
    proto = flattening_net(target=(1, 64))
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    with pytest.raises(
        ModelError, match="ONNX Runtime cannot run the model with inputs images:1x3x9"
    ):
        load_model(save(tmp_path, proto), dims={"height": 9})


def test_an_output_whose_shape_depends_on_values_is_refused(tmp_path: Path) -> None:
    proto = model(
        [
            helper.make_node("NonZero", ["x"], ["where"]),
            helper.make_node("Cast", ["where"], ["out"], to=TensorProto.FLOAT),
        ],
        inputs={"x": (4,)},
        outputs={"out": (1, "n")},
    )
    with pytest.raises(ModelError, match="shape of output 'out' depends on the values"):
        load_model(save(tmp_path, proto))


def test_an_output_keeps_a_shape_that_inference_does_not_know(tmp_path: Path) -> None:
    node = helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["out"], num_groups=2)
    proto = model(
        [node],
        inputs={"x": (1, 4, 5, 5)},
        outputs={"out": (1, 4, 5, 5)},
        weights={"scale": floats(4), "bias": floats(4)},
        opset=21,
    )
    loaded = load_model(save(tmp_path, proto))
    assert [(o.name, o.shape, o.dtype) for o in loaded.outputs] == [
        ("out", (1, 4, 5, 5), "float32")
    ]


def test_an_output_without_a_declared_shape_needs_no_inference(tmp_path: Path) -> None:
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["out"])
    proto = model([node], inputs={"x": (2, 4, 5, 5)}, outputs={"out": None})
    loaded = load_model(save(tmp_path, proto))
    assert [(o.name, o.shape) for o in loaded.outputs] == [("out", (2, 4, 5, 5))]


def test_an_output_that_is_a_sequence_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("SequenceConstruct", ["x"], ["out"])
    proto = model([node], inputs={"x": (2,)}, outputs={})
    proto.graph.output.append(helper.make_tensor_sequence_value_info("out", TensorProto.FLOAT, [2]))
    with pytest.raises(ModelError, match="output 'out' is not a tensor; only tensors can be outp"):
        load_model(save(tmp_path, proto))


# --- batch -------------------------------------------------------------------------------------


def rows_agree(one: onnx.ModelProto, many: onnx.ModelProto, shape: tuple[int, ...]) -> bool:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    (batched,) = Reference(many).run({"images": x}).values()
    single = Reference(one)
    rows = [next(iter(single.run({"images": x[i : i + 1]}).values())) for i in range(len(x))]
    return agree(batched, np.concatenate(rows))


@pytest.mark.parametrize("target", [(1, 64), (1, -1), (-1, 64), (0, 64)])
def test_constant_reshape_targets_follow_the_batch(tmp_path: Path, target: tuple[int, ...]) -> None:
    path = save(tmp_path, flattening_net(target=target))
    one, four = load_model(path), load_model(path, batch=4)
    assert four.outputs[0].shape == (4, 5)
    assert rows_agree(one.graph.proto, four.graph.proto, (4, 3, 6, 6))
    assert four.digest != one.digest


def test_the_note_says_what_the_batch_was_checked_against(tmp_path: Path) -> None:
    loaded = load_model(save(tmp_path, flattening_net(target=(1, 64))), batch=4)
    assert loaded.notes[0] == (
        "batch 4: agrees with 4 runs at batch 1 in ONNX Runtime; 1 Reshape target held batch 1"
    )


def test_a_check_on_outputs_that_ignore_the_input_says_so(tmp_path: Path) -> None:
    proto = flattening_net(target=(1, 64))
    weight = next(i for i in proto.graph.initializer if i.name == "w1")
    weight.CopyFrom(onnx.numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), "w1"))
    loaded = load_model(save(tmp_path, proto), batch=4)
    assert "the outputs are the same for every input" in loaded.notes[0]


def test_a_batch_can_shrink_and_need_not_divide(tmp_path: Path) -> None:
    path = save(tmp_path, flattening_net(target=(4, 64), batch=4))
    assert load_model(path, batch=1).outputs[0].shape == (1, 5)
    assert load_model(path, batch=6).outputs[0].shape == (6, 5)


def test_an_open_batch_is_set_by_the_batch(tmp_path: Path) -> None:
    path = save(tmp_path, conv_net(("n", 3, 16, 16)))
    assert load_model(path, batch=3).inputs[0].shape == (3, 3, 16, 16)
    with pytest.raises(InputError, match="either --batch or --dim n"):
        load_model(path, batch=3, dims={"n": 2})


def test_a_batch_that_a_node_cannot_take_is_refused_with_its_name(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["images", "halves"], ["h"], name="two_halves"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Reshape", ["r", "whole"], ["out"], name="whole_again"),
    ]
    weights = {"halves": ints(2, 4), "whole": ints(1, 8)}
    inputs, outputs = {"images": (1, 8)}, {"out": (1, 8)}
    path = save(tmp_path, model(nodes, inputs=inputs, outputs=outputs, weights=weights))
    with pytest.raises(ModelError, match=r"batch 4: it fails at node 'two_halves'"):
        load_model(path, batch=4)


def test_a_model_that_mixes_its_rows_is_refused_with_the_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["images"], ["r"]),
        helper.make_node("Softmax", ["r"], ["out"], axis=0, name="over_the_batch"),
    ]
    proto = model(nodes, inputs={"images": (1, 8)}, outputs={"out": (1, 8)})
    with pytest.raises(ModelError, match=r"'out' differs .* first after node 'over_the_batch'"):
        load_model(save(tmp_path, proto), batch=4)


# --- simplification ----------------------------------------------------------------------------


def test_shape_arithmetic_disappears(tmp_path: Path) -> None:
    path = save(tmp_path, shape_arithmetic_net(("n", 3, "h", "w")))
    loaded = load_model(path, dims={"n": 2, "h": 12, "w": 10})
    assert loaded.outputs[0].shape == (2, 4 * 6 * 5)
    assert not {"Shape", "Gather", "Concat", "Unsqueeze"} & set(operators(loaded.graph.proto))


def test_an_input_that_nothing_reads_stays_an_input_of_the_simpler_model(tmp_path: Path) -> None:
    proto = shape_arithmetic_net((2, 3, 12, 10))
    mask = helper.make_tensor_value_info("mask", TensorProto.FLOAT, (2, 7))
    proto.graph.input.insert(0, mask)
    loaded = load_model(save(tmp_path, proto))
    assert loaded.notes == ()
    assert [i.name for i in loaded.inputs] == ["mask", "images"]
    assert [i.name for i in loaded.graph.proto.graph.input] == ["mask", "images"]
    assert not {"Shape", "Gather"} & set(operators(loaded.graph.proto))


def test_a_chain_of_scalars_stays_a_scalar(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "a"], ["b"]),
        helper.make_node("Mul", ["b", "a"], ["out"]),
    ]
    weights = {"a": np.array(3, np.float32)}
    proto = model(nodes, inputs={"x": ()}, outputs={"out": ()}, weights=weights)
    loaded = load_model(save(tmp_path, proto))
    assert loaded.notes == ()
    assert operators(loaded.graph.proto) == {"Mul": 1}


def test_sums_become_additions(tmp_path: Path) -> None:
    nodes = [helper.make_node("Sum", ["a", "b", "c"], ["out"])]
    shape = (2, 3)
    proto = model(nodes, inputs=dict.fromkeys("abc", shape), outputs={"out": shape})
    assert operators(load_model(save(tmp_path, proto)).graph.proto) == {"Add": 2}


def test_a_batch_norm_and_the_scale_after_it_become_one_factor_and_one_term(tmp_path: Path) -> None:
    norm = ["x", "scale", "bias", "mean", "var"]
    nodes = [
        helper.make_node("BatchNormalization", norm, ["n"], epsilon=1e-3),
        helper.make_node("Mul", ["n", "factor"], ["m"]),
        helper.make_node("Add", ["m", "term"], ["a"]),
        helper.make_node("Relu", ["a"], ["out"]),
    ]
    weights = {n: floats(4, seed=i) for i, n in enumerate(norm[1:])}
    weights["var"] = np.abs(weights["var"]) + 0.5
    weights |= {"factor": floats(4, 1, 1), "term": floats(4, 1, 1, seed=9)}
    shape = (1, 4, 5, 5)
    proto = model(nodes, inputs={"x": shape}, outputs={"out": shape}, weights=weights)
    loaded = load_model(save(tmp_path, proto))
    assert operators(loaded.graph.proto) == {"Mul": 1, "Add": 1, "Relu": 1}
    feed = random_inputs(loaded.inputs, seed=3)
    got, expected = (Reference(p).run(feed)["out"] for p in (loaded.graph.proto, proto))
    assert agree(got, expected, rtol=1e-5)


def test_factors_that_are_read_twice_are_kept(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "a"], ["m"]),
        helper.make_node("Mul", ["m", "b"], ["n"]),
        helper.make_node("Sub", ["m", "n"], ["out"]),
    ]
    weights = {"a": floats(3), "b": floats(3, seed=1)}
    proto = model(nodes, inputs={"x": (2, 3)}, outputs={"out": (2, 3)}, weights=weights)
    loaded = load_model(save(tmp_path, proto))
    feed = random_inputs(loaded.inputs, seed=0)
    got, expected = (Reference(p).run(feed)["out"] for p in (loaded.graph.proto, proto))
    assert agree(got, expected, rtol=1e-5)


def test_a_simplification_that_changes_values_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(proto: onnx.ModelProto) -> None:
        weight = next(i for i in proto.graph.initializer if len(i.dims) == 2)
        values = onnx.numpy_helper.to_array(weight) * 2
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))

    monkeypatch.setattr("tunerd.frontend.onnx.simplify.rewrite_graph", corrupt)
    loaded = load_model(save(tmp_path, conv_net()))
    assert loaded.notes == (
        "not simplified: that gave other values for output 'scores'",
        "not cleaned up: that gave other values for output 'scores'",
    )
    feed = random_inputs(loaded.inputs, seed=0)
    got, expected = (Reference(p).run(feed)["scores"] for p in (loaded.graph.proto, conv_net()))
    assert agree(got, expected, rtol=1e-5)


# --- digest ------------------------------------------------------------------------------------


def test_the_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    path = save(tmp_path, conv_net())
    code = (
        "import sys, pathlib; from tunerd.frontend.model import read_model; "
        "print(read_model(pathlib.Path(sys.argv[1])).digest)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert other.stdout.strip() == load_model(path).digest


def test_the_digest_sees_weights_and_structure_but_not_comments(tmp_path: Path) -> None:
    plain = load_model(save(tmp_path, conv_net())).digest
    described = conv_net()
    described.producer_name, described.graph.doc_string = "someone", "hello"
    described.graph.node[0].doc_string = "hello"
    assert load_model(save(tmp_path, described)).digest == plain
    changed = conv_net()
    values = onnx.numpy_helper.to_array(changed.graph.initializer[0]).copy()
    values.flat[0] += 1
    changed.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "w1"))
    assert load_model(save(tmp_path, changed)).digest != plain
    padded = conv_net()
    padded.graph.node[0].attribute[0].ints[:] = [1, 1, 1, 2]
    assert load_model(save(tmp_path, padded)).digest != plain


# --- weights aside -----------------------------------------------------------------------------


def heavy(after: list[onnx.NodeProto], constants: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """A convolution with large weights, and what comes after it."""
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 64, 3, 3), **constants}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), *after],
        "heavy",
        [value("x", TensorProto.FLOAT, [1, 64, 8, 8])],
        [value("y", TensorProto.FLOAT, [1, 64, 8, 8])],
        [
            numpy_helper.from_array(0.5 + rng.random(shape).astype("float32"), name)
            for name, shape in shapes.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


NORM = [helper.make_node("BatchNormalization", ["c", *"sbmv"], ["y"])]
RELU = [helper.make_node("Relu", ["c"], ["y"])]
OF_THE_NORM = dict.fromkeys("sbmv", (64,))


def test_large_weights_are_aside_unless_something_folds_into_them() -> None:
    light, aside = weights_aside(heavy(RELU, {}))
    assert aside.keys() == {"w"}
    assert [i.name for i in light.graph.input] == ["x", "w"]
    assert not light.graph.initializer
    weights_back(light, aside)
    assert [i.name for i in light.graph.input] == ["x"]
    assert [t.name for t in light.graph.initializer] == ["w"]
    assert not weights_aside(heavy(NORM, OF_THE_NORM))[1]


def test_a_norm_is_folded_into_large_weights_all_the_same(tmp_path: Path) -> None:
    onnx.save(heavy(NORM, OF_THE_NORM), tmp_path / "net.onnx")
    simple = load_model(tmp_path / "net.onnx").graph.proto
    assert [n.op_type for n in simple.graph.node] == ["Conv"]
