"""What verification says about right, wrong and pointless comparisons with ONNX Runtime."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib.artifact_fixtures import model_of, tiny_convnet
from tunerd.errors import InfrastructureError, ModelError
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.onnx.reference import Reference
from tunerd.runs.finals.faults import Results
from tunerd.runs.finals.onnxruntime import in_turns
from tunerd.runs.finals.verify import expected_of, verify
from tunerd.system.arrays import rounded, verification_inputs
from tunerd.vocabulary import (
    Arrays,
    Failure,
    Kind,
    Measurement,
    Model,
    Profile,
    Stage,
    TensorSpec,
    Ways,
)
from tunerd.vocabulary.outcome import BY_ONNX_RUNTIME, TUNED_BESIDE_ONNX_RUNTIME
from tunerd.vocabulary.verdict import Correctness, Verdict

Run = Callable[[Arrays], Arrays]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_convnet()


@pytest.fixture(scope="module")
def right(model: Model) -> Run:
    return Reference(model.graph.proto, optimize=True).run


def changed(run: Run, change: Callable[[Arrays], Arrays]) -> Run:
    return lambda inputs: change(run(inputs))


def test_a_model_that_agrees_is_right(model: Model, right: Run) -> None:
    result = verify(right, model)
    assert result.verdict is Verdict.RIGHT
    assert result.worst_error < 0.1
    assert result.seeds == 3


def test_a_kernel_that_returns_a_constant_is_wrong(model: Model, right: Run) -> None:
    first = right(verification_inputs(model.inputs, 0))
    result = verify(lambda _inputs: first, model)
    assert result.verdict is Verdict.WRONG
    assert result.worst_error > 1


def test_zeros_are_wrong(model: Model, right: Run) -> None:
    zeros = changed(right, lambda outputs: {n: np.zeros_like(o) for n, o in outputs.items()})
    assert verify(zeros, model).verdict is Verdict.WRONG


def test_one_element_that_is_wrong_by_little_is_caught(model: Model, right: Run) -> None:
    def nudge(outputs: Arrays) -> Arrays:
        outputs["features"].flat[17] += 0.004 * np.abs(outputs["features"]).max()
        return outputs

    result = verify(changed(right, nudge), model)
    assert result.verdict is Verdict.WRONG
    assert "features" in result.message


def test_rounding_of_a_reordered_sum_is_right(model: Model, right: Run) -> None:
    noise = np.random.default_rng(0)

    def round_off(outputs: Arrays) -> Arrays:
        return {
            n: (o * (1 + 1e-5 * noise.standard_normal(o.shape))).astype(o.dtype)
            for n, o in outputs.items()
        }

    assert verify(changed(right, round_off), model).verdict is Verdict.RIGHT


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_element_that_is_no_number_never_passes(model: Model, right: Run, value: float) -> None:
    def poison(outputs: Arrays) -> Arrays:
        outputs["scores"].flat[0] = value
        return outputs

    result = verify(changed(right, poison), model)
    assert result.verdict is Verdict.WRONG
    assert result.worst_error == math.inf


def test_a_missing_output_and_a_wrong_shape_are_named(model: Model, right: Run) -> None:
    missing = verify(changed(right, lambda o: {"scores": o["scores"]}), model)
    assert missing.verdict is Verdict.WRONG
    assert "no output 'features'" in missing.message
    turned = verify(changed(right, lambda o: o | {"scores": o["scores"].T}), model)
    assert "float32[10, 2]" in turned.message


def test_a_reference_that_ignores_its_input_proves_nothing() -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    ignoring = model_of(nodes, {"w": np.zeros((4,))}, inputs={"x": (2, 4)}, outputs={"y": (2, 4)})
    result = verify(Reference(ignoring.graph.proto).run, ignoring)
    assert result.verdict is Verdict.CANNOT_TELL
    assert "output 'y' hardly depends on the input" in result.message


def test_a_reference_that_hardly_depends_on_its_input_proves_nothing() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["small"]),
        helper.make_node("Add", ["small", "one"], ["y"]),
    ]
    weights = {"w": np.full((4,), 1e-5), "one": np.ones((4,))}
    flat = model_of(nodes, weights, inputs={"x": (2, 4)}, outputs={"y": (2, 4)})
    constant = {"y": np.ones((2, 4), "float32")}
    result = verify(lambda _inputs: constant, flat)
    assert result.verdict is Verdict.CANNOT_TELL
    assert "output 'y' hardly depends on the input" in result.message
    assert verify(lambda _inputs: off_in("y")(constant), flat).verdict is Verdict.WRONG


def test_a_reference_that_is_not_finite_proves_nothing() -> None:
    nodes = [helper.make_node("Sqrt", ["x"], ["y"])]
    model = model_of(nodes, {}, inputs={"x": (2, 4)}, outputs={"y": (2, 4)})
    result = verify(Reference(model.graph.proto).run, model)
    assert result.verdict is Verdict.CANNOT_TELL
    assert "NaN or infinity" in result.message


def test_integer_outputs_must_be_equal() -> None:
    nodes = [helper.make_node("ArgMax", ["x"], ["y"], axis=1, keepdims=0)]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "argmax",
        [value("x", TensorProto.FLOAT, [8, 50])],
        [value("y", TensorProto.INT64, [8])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    model = Model(
        "argmax",
        "0" * 64,
        (TensorSpec("x", (8, 50), "float32"),),
        (TensorSpec("y", (8,), "int64"),),
        OnnxGraph(proto),
    )
    right = Reference(proto).run
    assert verify(right, model).verdict is Verdict.RIGHT
    off_by_one = changed(right, lambda o: {"y": o["y"] + np.eye(1, 8, 3, dtype="int64")[0]})
    assert verify(off_by_one, model).verdict is Verdict.WRONG


def test_a_model_that_onnx_runtime_cannot_run_is_refused_by_name() -> None:
    nodes = [helper.make_node("MatMul", ["x", "x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "bad",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    spec = TensorSpec("x", (2, 3), "float32")
    model = Model("bad", "0" * 64, (spec,), (TensorSpec("y", (2, 3), "float32"),), OnnxGraph(proto))
    with pytest.raises(ModelError, match="cannot run bad"):
        verify(lambda inputs: inputs, model)


def test_inputs_repeat_by_seed_and_indices_stay_small() -> None:
    specs = (TensorSpec("image", (1, 3, 8, 8), "float16"), TensorSpec("ids", (1, 64), "int64"))
    one, again, other = (verification_inputs(specs, seed) for seed in (1, 1, 2))
    assert np.array_equal(one["image"], again["image"])
    assert not np.array_equal(one["image"], other["image"])
    assert one["image"].dtype == np.float16
    assert set(np.unique(one["ids"])) == {0, 1}


def test_onnxruntime_is_sampled_on_the_cores_given_and_the_caller_keeps_its_own(
    model: Model,
) -> None:
    before = os.sched_getaffinity(0)
    profile = Profile("test", min_samples=3, max_samples=6, min_sample_secs=1e-4)
    asked: list[Profile] = []

    def tuned(of: Profile) -> Results:
        asked.append(of)
        return [timed(2e-3, of)]

    found = in_turns(model, tuned, cores=(min(before),), profile=profile)
    assert os.sched_getaffinity(0) == before
    theirs, ours = found
    assert (theirs.name, ours.name) == (BY_ONNX_RUNTIME, TUNED_BESIDE_ONNX_RUNTIME)
    assert len(theirs.run_secs) == len(ours.run_secs) == 8  # 6 at most, by 4 in a turn
    assert len(asked) == 2
    assert all(secs > 0 for secs in theirs.run_secs)


def timed(secs: float, of: Profile) -> Measurement:
    return Measurement((secs,) * of.max_samples, 1, of.name, "a slice", 1)


def test_onnxruntime_runs_as_many_requests_as_a_launch_of_the_artifact_has(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    usual = Reference.run
    monkeypatch.setattr(Reference, "run", lambda *given: ran.append(1) or usual(*given))
    profile = Profile("test", max_samples=4, min_sample_secs=0.0)
    cores = (min(os.sched_getaffinity(0)),)
    in_turns(model, lambda of: [timed(1e-3, of)], cores=cores, requests=3, profile=profile)
    assert len(ran) == 3 * (2 + 1 + 4)  # to know what a call takes, to wake its threads, samples


@pytest.mark.parametrize("secs", [10.0, 1e-9])
def test_where_time_is_over_a_turn_is_enough_of_what_is_far_from_onnxruntime(
    model: Model, secs: float
) -> None:
    profile = Profile("test", max_samples=60, min_sample_secs=1e-4, max_total_secs=0.0)
    cores = (min(os.sched_getaffinity(0)),)
    found = in_turns(model, lambda of: [timed(secs, of)], cores=cores, profile=profile)
    assert [len(each.run_secs) for each in found] == [4, 4]


def test_a_tuned_model_that_fails_beside_onnxruntime_is_said(model: Model) -> None:
    failed = Failure(Stage.RUN, Kind.CRASH, "the runner ended")
    with pytest.raises(InfrastructureError, match="could not be timed: the runner ended"):
        in_turns(model, lambda _: [failed], cores=(min(os.sched_getaffinity(0)),))


def test_cores_that_are_not_there_are_an_error(model: Model) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        in_turns(model, lambda _: [], cores=(10_000,), profile=Profile("test"))


# --- outputs that tell nothing -----------------------------------------------------------------


def with_a_constant() -> Model:
    """One output of a product, and one that is a constant."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Identity", ["one"], ["k"]),
    ]
    weights = {"w": np.random.default_rng(0).normal(size=(4, 4)), "one": np.ones((3,))}
    return model_of(nodes, weights, inputs={"x": (2, 4)}, outputs={"y": (2, 4), "k": (3,)})


def with_a_root() -> Model:
    """One output of a product, and one that is NaN where the input is negative."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Sqrt", ["x"], ["root"]),
    ]
    weights = {"w": np.random.default_rng(0).normal(size=(4, 4))}
    return model_of(nodes, weights, inputs={"x": (2, 4)}, outputs={"y": (2, 4), "root": (2, 4)})


def off_in(name: str) -> Callable[[Arrays], Arrays]:
    return lambda outputs: outputs | {name: outputs[name] + np.float32(1)}


def test_a_constant_output_beside_one_that_tells_is_compared_and_spoils_nothing() -> None:
    model = with_a_constant()
    run = Reference(model.graph.proto).run
    assert verify(run, model).verdict is Verdict.RIGHT
    for name in ("y", "k"):
        result = verify(changed(run, off_in(name)), model)
        assert result.verdict is Verdict.WRONG
        assert f"output '{name}'" in result.message


@pytest.mark.parametrize("name", ["y", "root"])
def test_what_is_finite_beside_nan_is_compared(name: str) -> None:
    model = with_a_root()
    run = Reference(model.graph.proto).run
    right = verify(run, model)
    assert right.verdict is Verdict.CANNOT_TELL
    assert "output 'root' holds NaN" in right.message
    assert verify(changed(run, off_in(name)), model).verdict is Verdict.WRONG


def test_a_model_of_constants_alone_proves_nothing() -> None:
    nodes = [helper.make_node("Identity", ["one"], ["k"])]
    model = model_of(nodes, {"one": np.ones((3,))}, inputs={"x": (2, 4)}, outputs={"k": (3,)})
    run = Reference(model.graph.proto).run
    result = verify(run, model)
    assert result.verdict is Verdict.CANNOT_TELL
    assert "'k'" in result.message
    assert "trained weights" not in result.message
    assert verify(changed(run, off_in("k")), model).verdict is Verdict.WRONG


def test_an_input_without_axes_is_drawn_as_an_array() -> None:
    nodes = [helper.make_node("Mul", ["x", "t"], ["y"])]
    model = model_of(nodes, {}, inputs={"x": (2, 4), "t": ()}, outputs={"y": (2, 4)})
    for seed in range(3):
        assert isinstance(verification_inputs(model.inputs, seed)["t"], np.ndarray)
    assert verify(Reference(model.graph.proto).run, model).verdict is Verdict.RIGHT


# --- types on the way --------------------------------------------------------------------------


def half_inside() -> Model:
    """Two outputs in float32: one of a product in float16, and one of a product in float32."""
    value = helper.make_tensor_value_info
    weights = np.random.default_rng(0).normal(size=(64, 64))
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16),
            helper.make_node("MatMul", ["x16", "w16"], ["y16"]),
            helper.make_node("Cast", ["y16"], ["half"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "w"], ["single"]),
        ],
        "half",
        [value("x", TensorProto.FLOAT, [8, 64])],
        [value(name, TensorProto.FLOAT, [8, 64]) for name in ("half", "single")],
        [
            numpy_helper.from_array(weights.astype("float16"), "w16"),
            numpy_helper.from_array(weights.astype("float32"), "w"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    specs = {name: TensorSpec(name, (8, 64), "float32") for name in ("x", "half", "single")}
    return Model(
        "half", "0" * 64, (specs["x"],), (specs["half"], specs["single"]), OnnxGraph(proto)
    )


def off_by(share: float, name: str) -> Callable[[Arrays], Arrays]:
    """Add a share of the scale to an output."""

    def change(outputs: Arrays) -> Arrays:
        array = outputs[name]
        return outputs | {name: array + np.float32(share) * np.abs(array).max()}

    return change


@pytest.mark.parametrize(
    ("name", "share", "verdict"),
    [
        ("half", 0.006, Verdict.RIGHT),
        ("half", 0.2, Verdict.WRONG),
        ("single", 0.0005, Verdict.RIGHT),
        ("single", 0.006, Verdict.WRONG),
    ],
)
def test_an_output_is_judged_by_the_lowest_type_that_it_is_computed_in(
    name: str, share: float, verdict: Correctness
) -> None:
    model = half_inside()
    run = changed(Reference(model.graph.proto).run, off_by(share, name))
    assert verify(run, model).verdict is verdict


def test_a_sum_that_overflows_in_half_precision_is_wrong() -> None:
    model = half_inside()

    def overflow(outputs: Arrays) -> Arrays:
        outputs["half"].flat[3] = np.inf
        return outputs

    result = verify(changed(Reference(model.graph.proto).run, overflow), model)
    assert result.verdict is Verdict.WRONG


def test_a_type_inside_a_branch_counts() -> None:
    value = helper.make_tensor_value_info
    then = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["x16"], ["then"], to=TensorProto.FLOAT),
        ],
        "then",
        [],
        [value("then", TensorProto.FLOAT, [8, 64])],
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["other"])],
        "other",
        [],
        [value("other", TensorProto.FLOAT, [8, 64])],
    )
    yes = numpy_helper.from_array(np.array(True), "yes")
    graph = helper.make_graph(
        [helper.make_node("If", ["yes"], ["y"], then_branch=then, else_branch=other)],
        "branches",
        [value("x", TensorProto.FLOAT, [8, 64])],
        [value("y", TensorProto.FLOAT, [8, 64])],
        [yes],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x, y = (TensorSpec(name, (8, 64), "float32") for name in ("x", "y"))
    branching = Model("branches", "0" * 64, (x,), (y,), OnnxGraph(proto))
    run = changed(Reference(proto).run, off_by(0.006, "y"))
    assert verify(run, branching).verdict is Verdict.RIGHT


# --- another precision than the file's ---------------------------------------------------------


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_rounding_to_a_precision_is_right_where_it_was_asked_for(
    model: Model, precision: str
) -> None:
    asked = replace(model, precision=precision)
    reference = Reference(asked.graph.with_rounded_weights(precision).proto)
    assert verify(reference.run, asked).verdict is not Verdict.WRONG


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_a_wrong_model_is_wrong_in_any_precision(model: Model, right: Run, precision: str) -> None:
    def without_a_part(outputs: Arrays) -> Arrays:
        return {name: array * np.float32(0.5) for name, array in outputs.items()}

    asked = replace(model, precision=precision)
    assert verify(changed(right, without_a_part), asked).verdict is Verdict.WRONG


@pytest.mark.parametrize(("precision", "bits"), [("tf32", 11), ("fp16", 11), ("bf16", 8)])
def test_values_are_rounded_to_nearest(precision: str, bits: int) -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    near = rounded(values, precision)
    assert np.abs(near - values).max() > 0
    assert (np.abs(near - values) <= np.maximum(np.abs(values) * 2.0**-bits, 2.0**-25)).all()
    assert np.array_equal(rounded(near, precision), near)


# --- accuracy ----------------------------------------------------------------------------------


def test_each_output_says_how_near_it_is_and_whether_the_same_class_is_first(
    model: Model, right: Run
) -> None:
    def second_first(outputs: Arrays) -> Arrays:
        scores = outputs["scores"].copy()
        best, next_ = np.argsort(scores[0])[[-1, -2]]
        scores[0, [best, next_]] = scores[0, [next_, best]]
        return outputs | {"scores": scores}

    rows = verify(right, model).accuracy
    assert [of.output for of in rows] == ["scores", "features"]
    scores, features = rows
    assert scores.same_first == scores.rows == 2 * 3
    assert features.rows == 0
    assert max(scores.error, features.error) < 1e-4
    scores, _ = verify(changed(right, second_first), model).accuracy
    assert scores.same_first < scores.rows
    assert scores.error > 1e-4


@pytest.mark.parametrize(("moving", "verdict"), [(0.002, Verdict.WRONG), (0.1, Verdict.RIGHT)])
def test_steps_beyond_one_are_right_where_rounding_moves_many_values(
    moving: float, verdict: Verdict
) -> None:
    """A quantised model of many layers: what one value of them is depends on each rounding."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    weights = {"s": np.array(0.05, np.float32), "z": np.array(0, np.int8)}
    same = [helper.make_node("Identity", ["x"], ["y"])]
    given = model_of(same, {}, inputs={"x": (1, 2000)}, outputs={"y": (1, 2000)})
    proto = given.graph.proto
    proto.graph.ClearField("node")
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in weights.items())
    expected = expected_of(replace(given, graph=OnnxGraph(proto)))
    known = tuple(first for first, *_ in expected.answers)

    def off(outputs: Arrays, steps: int, every: int) -> Arrays:
        moved = outputs["y"].copy()
        moved[0, ::every] += np.float32(0.05 * steps)
        return {"y": moved}

    other = tuple(off(one, 1, round(1 / moving)) for one in known)
    knowing = replace(expected, ways=lambda _: Ways(known, (other,), {"y": 0.05}))
    run = Reference(proto).run
    assert knowing.verify(lambda inputs: off(run(inputs), 4, 1999)).verdict is verdict
    assert knowing.verify(lambda inputs: off(run(inputs), 9, 1999)).verdict is Verdict.WRONG
