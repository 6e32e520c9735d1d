"""Lanes of one launch: what is checked of them, what is staged for them, kernels of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import tunerd
from tests.lib.artifact_fixtures import model_of
from tests.lib.fake_driver import OK, Driver, Status, Tensor
from tests.lib.models import floats
from tests.lib.super_models import CONVNET, artifact_of, super_artifact, tenant
from tests.lib.waiting import until
from tunerd.artifacts import parts, staging
from tunerd.artifacts.batches import StagedBatch
from tunerd.artifacts.captured import Recorder
from tunerd.artifacts.lane_check import inputs_for, launches, outputs_of, pairs_of, varied
from tunerd.artifacts.lanes import StagedLanes
from tunerd.artifacts.manifest import SLOTS
from tunerd.artifacts.pieces import Pieces
from tunerd.artifacts.staging import PinnedArrays
from tunerd.artifacts.super_model import SuperModel
from tunerd.artifacts.tenants import Foreign, model_for_tenants
from tunerd.candidates.base import ENTRY, DeviceKernel, LoweredKernel
from tunerd.runs.finals.verify import expected_of, with_lanes
from tunerd.system.targets import cpu_target_json
from tunerd.vocabulary import SLOT_BYTES, Arrays, Model, TensorSpec
from tunerd.vocabulary.verdict import Verdict

pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")

Requests = list[tuple[str, Arrays]]


# --- what is checked of them -------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_launches_try_one_tenant_more_than_lanes_and_one_twice(count: int) -> None:
    tried = list(launches(count))
    assert all(len(launch) == count for launch in tried)
    assert {tenant for launch in tried for tenant in launch} == set(range(count + 1))
    assert count == 1 or any(len(set(launch)) < count for launch in tried)
    assert count == 1 or any(list(launch) != sorted(launch) for launch in tried)


def test_varied_weights_keep_their_types_signs_and_integers() -> None:
    weights = {
        "w": np.array([[1.0, -2.0]], "float32"),
        "at": np.array([0, 5], "int64"),
        "w_float16": np.array([[1.0, -2.0]], "float16"),
    }
    casts = {"w_float16": ("w", "float16")}
    one, other = varied(weights, 1, casts), varied(weights, 2, casts)
    assert np.array_equal(np.sign(one["w"]), np.sign(weights["w"]))
    assert not np.array_equal(one["w"], other["w"])
    assert np.array_equal(one["at"], weights["at"])
    assert np.array_equal(one["w_float16"], one["w"].astype("float16"))
    assert np.array_equal(varied(weights, 1, casts)["w"], one["w"])


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Arrays]:
    """A model, what its reference returns, and what its lanes and their tenants alone compute."""
    folder = tmp_path_factory.mktemp("checked")
    model = tenant(CONVNET, 0, folder)
    lanes = tunerd.load(super_artifact(model, folder / "super", (2,)))
    alone = tunerd.load(artifact_of(model, folder / "alone"))
    expected = expected_of(model)
    assert isinstance(lanes, SuperModel)
    outputs = outputs_of(lanes, alone, inputs_for(expected.inputs))
    assert lanes.tenants == (lanes.own,)  # those that were made up are gone
    return expected, expected.verify(lanes), outputs


def test_lanes_that_agree_with_their_tenants_alone_are_right(
    checked: tuple[Any, Any, Arrays],
) -> None:
    expected, own, outputs = checked
    pairs = pairs_of(outputs)
    assert len(pairs) == 4  # two launches of two lanes
    found = with_lanes(own, expected, pairs)
    assert found.verdict is Verdict.RIGHT
    assert "its tenant's weights on 4 requests" in found.message


def test_a_lane_with_anothers_weights_is_wrong(checked: tuple[Any, Any, Arrays]) -> None:
    expected, own, outputs = checked
    pairs = pairs_of(outputs)
    pairs[1] = (pairs[0][0], pairs[1][1])
    found = with_lanes(own, expected, pairs)
    assert found.verdict is Verdict.WRONG
    assert found.worst_error > 1
    assert "request 1" in found.message
    assert with_lanes(replace(own, verdict=Verdict.WRONG), expected, pairs).verdict is Verdict.WRONG


# --- what is staged ----------------------------------------------------------------------------


class Memory:
    """Pieces of one number each, on a device that is the host."""

    def __init__(self) -> None:
        self.of = np.zeros((16, SLOT_BYTES), np.uint8)
        self.made = 0

    def make(self) -> Any:
        self.made += 1
        return self.of[2 * self.made]  # others have what is between them

    def address(self, piece: Any) -> int:
        return int(piece.ctypes.data)

    def fill(self, piece: Any, data: Any) -> None:
        piece[: len(data)] = data


class Lanes:
    """A recorder of a model of two lanes: y = x times the weight of the lane's tenant."""

    def __init__(self, driver: Driver, memory: Memory) -> None:
        self.driver, self.stream, self._memory = driver, 7, memory
        self.short = driver.short
        self.input_specs = (TensorSpec("x", (2, 3), "float32"), TensorSpec(SLOTS, (2,), "int32"))
        self.output_specs = (TensorSpec("y", (2, 3), "float32"),)
        self.inputs = {s.name: Tensor(s.shape, s.dtype) for s in self.input_specs}

    entered = Recorder.entered

    def executable(self, graph: Any) -> int:
        return self.driver.ready(graph)

    def more_inputs(self) -> dict[str, Any]:
        return {s.name: Tensor(s.shape, s.dtype) for s in self.input_specs}

    def recorded(self, after: Any, before: Any) -> Any:
        outputs = {"y": Tensor((2, 3), "float32")}
        flat = self._memory.of.reshape(-1)
        base = self._memory.of[2].ctypes.data - flat.ctypes.data

        def kernel() -> None:
            for lane, slot in enumerate(self.inputs[SLOTS].array):
                weight = float(flat[base + int(slot) * SLOT_BYTES])
                outputs["y"].array[lane] = self.inputs["x"].array[lane] * weight

        self.driver.captured = []
        before()
        self.driver.captured.append(kernel)
        after(outputs)
        return self.driver.captured, outputs


def staged(
    most: int | None = None, *, is_ahead: bool = False
) -> tuple[StagedLanes, Pieces, Driver]:
    driver, memory = Driver(), Memory()
    sources = {
        name: np.array([weight], np.uint8) for name, weight in zip("abc", (2, 3, 5), strict=True)
    }
    pieces = Pieces(memory, sources, "a", most)
    recorder: Any = Lanes(driver, memory)
    return StagedLanes(recorder, pieces, is_ahead=is_ahead), pieces, driver


def x(value: float) -> Arrays:
    return {"x": np.full(3, value, "float32")}


def test_a_launch_stages_slots_and_inputs_and_reads_each_lane() -> None:
    lanes, _, _ = staged()
    lanes.launch([("c", x(1)), ("b", x(10))], 7)
    assert [float(found["y"][0]) for found in lanes.read()] == [5, 30]
    assert lanes.count == 2
    lanes.launch([("b", x(2))], 7)  # the other lane computes the same
    assert [found["y"].tolist() for found in lanes.read()] == [[6, 6, 6]]
    lanes.launch([("a", x(1)), ("a", x(2))], 7)
    assert [float(found["y"][0]) for found in lanes.read()] == [2, 4]


def test_large_outputs_of_each_request_stay_where_its_lane_left_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)
    lanes, _, _ = staged(is_ahead=True)
    lanes.launch([("c", x(1)), ("b", x(10))], 7)
    first = lanes.read()
    lanes.launch([("a", x(1))], 7)
    assert [found["y"].tolist() for found in lanes.read()] == [[2, 2, 2]]
    assert [found["y"].tolist() for found in first] == [[5, 5, 5], [30, 30, 30]]


def test_lanes_take_requests_from_where_they_wait_beside_others() -> None:
    lanes, _, driver = staged()
    waiting = PinnedArrays(driver, (TensorSpec("x", (3,), "float32"),))
    waiting.write(x(4))
    lanes.launch([("b", x(10)), ("c", waiting)], 7)
    assert [float(found["y"][0]) for found in lanes.read()] == [30, 20]
    lanes.launch([("c", waiting)], 7)
    assert [found["y"].tolist() for found in lanes.read()] == [[20, 20, 20]]


class Rows(Lanes):
    """A recorder of a model with batches of two: y = 2 x."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, Memory())
        self.input_specs = (TensorSpec("x", (2, 3), "float32"),)
        self.inputs = {"x": Tensor((2, 3), "float32")}

    def recorded(self, after: Any, before: Any) -> Any:
        outputs = {"y": Tensor((2, 3), "float32")}

        def kernel() -> None:
            outputs["y"].array[...] = 2 * self.inputs["x"].array

        self.driver.captured = []
        before()
        self.driver.captured.append(kernel)
        after(outputs)
        return self.driver.captured, outputs


@pytest.mark.parametrize("large_bytes", [1, 1 << 30], ids=["beside", "on one stream"])
def test_a_batch_takes_a_row_of_each_request_and_gives_each_its_own(
    large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", large_bytes)
    driver = Driver()
    recorder: Any = Rows(driver)
    batch = StagedBatch(recorder, is_ahead=True)
    one, other = ({"x": np.full((1, 3), value, "float32")} for value in (1, 10))
    waiting = PinnedArrays(driver, (TensorSpec("x", (1, 3), "float32"),))
    waiting.write({"x": np.full((1, 3), 4, "float32")})
    batch.launch([("", one), ("", other)], 7)
    first = batch.read()
    batch.launch([("", waiting)], 7)
    assert [found["y"].tolist() for found in batch.read()] == [[[8, 8, 8]]]
    assert [found["y"].tolist() for found in first] == [[[2, 2, 2]], [[20, 20, 20]]]
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"{count} requests for 2 lanes"):
            batch.launch([("", one)] * count, 7)


def test_a_tenant_that_is_gone_leaves_nothing_to_the_next_of_its_name() -> None:
    _, pieces, _ = staged()
    pieces.hold(["b"])
    with pytest.raises(RuntimeError, match="in use"):
        pieces.forget("b")
    pieces.release(["b"])
    pieces.forget("b")
    assert not pieces.is_resident("b")
    with pytest.raises(KeyError):  # also for who had asked for it before
        pieces.hold(["b"])
    assert pieces.resident == ("a",)


def test_weights_stay_until_the_launch_is_seen_to_have_ended() -> None:
    lanes, pieces, driver = staged(most=2)
    lanes.launch([("b", x(1))], 7)
    driver.status = Status.CUDA_ERROR_NOT_READY
    assert not lanes.is_done()
    with pytest.raises(RuntimeError, match="all 2 pieces"):
        pieces.hold(["c"])
    driver.status = OK
    assert lanes.is_done()
    pieces.hold(["c"])
    assert pieces.resident == ("a", "c")


def test_a_launch_that_is_refused_holds_nothing() -> None:
    lanes, pieces, _ = staged(most=2)
    with pytest.raises(KeyError):
        lanes.launch([("b", x(1)), ("d", x(1))], 7)
    with pytest.raises(TypeError):
        lanes.launch([("b", {"x": np.zeros(3, "float64")})], 7)
    with pytest.raises(ValueError, match="3 requests for 2 lanes"):
        lanes.launch([("a", x(1))] * 3, 7)
    pieces.hold(["c"])
    assert pieces.resident == ("a", "c")


def test_requests_whose_inputs_are_large_together_are_brought_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)
    monkeypatch.setattr(parts, "PART_BYTES", 7)  # bytes; a request has 12
    lanes, pieces, driver = staged(is_ahead=True)
    assert not lanes.goes_in_parts([("b", x(1))])
    assert lanes.goes_in_parts([("c", x(1)), ("b", x(10))])
    write, *made = lanes.begin([("c", x(1)), ("b", x(10))], None)
    with pytest.raises(RuntimeError, match="in use"):
        pieces.forget("b")
    write.queue(8)
    until(write.is_done, every=0)
    assert [sum(size for _, _, size in part.copies) for part in made] == [7, 7, 7, 7, 4]
    for part in made:
        part.queue(8)
    lanes.follow(7)
    assert [float(found["y"][0]) for found in lanes.read()] == [5, 30]
    assert {stream for to, stream in driver.copied_on if to == "device"} == {8}
    assert driver.waits == [(7, made[-1].event)]
    assert lanes.is_done()
    pieces.forget("b")


def test_requests_that_are_not_launched_let_the_weights_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)
    monkeypatch.setattr(parts, "PART_BYTES", 7)
    lanes, pieces, _ = staged(is_ahead=True)
    lanes.begin([("c", x(1)), ("b", x(10))], None)
    lanes.give_up()
    with pytest.raises(KeyError):
        lanes.begin([("b", x(1)), ("none", x(1))], None)
    write, *_ = lanes.begin([("c", x(1)), ("b", {"x": np.zeros(3, "float64")})], None)
    write.queue(8)
    with pytest.raises(TypeError):
        until(write.is_done, every=0)
    lanes.give_up()
    pieces.forget("b")
    pieces.forget("c")


@pytest.fixture(params=[7, 1 << 20], ids=["large inputs", "small ones"])
def lacking(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[StagedLanes, Pieces, Requests]:
    """Lanes with room for two tenants' weights, and requests of which one lacks its own."""
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)
    monkeypatch.setattr(parts, "PART_BYTES", request.param)
    lanes, pieces, _ = staged(most=2, is_ahead=True)
    return lanes, pieces, [("a", x(1)), ("c", x(10))]


def test_weights_that_lack_are_brought_by_a_thread_before_the_launch(
    lacking: tuple[StagedLanes, Pieces, Requests],
) -> None:
    lanes, pieces, requests = lacking
    assert lanes.goes_in_parts(requests)
    weights, *made = lanes.begin(requests, 7)
    assert weights.goes_alone
    assert pieces.resident == ("a",)  # nobody waits for them here
    weights.queue(8)
    until(weights.is_done, every=0)
    for part in made:  # each when those before have ended, as far as they go alone
        part.queue(8)
        until(part.is_done, every=0)
    lanes.follow(7)
    assert [float(found["y"][0]) for found in lanes.read()] == [2, 50]
    with pytest.raises(RuntimeError, match="all 2 pieces"):
        pieces.hold(["b"])
    assert lanes.is_done()
    assert pieces.brought == 1
    assert lanes.goes_in_parts(requests) == (parts.PART_BYTES == 7)  # they are there now
    pieces.hold(["b"])
    assert lanes.goes_in_parts([("c", x(1))])


def test_weights_that_another_launch_has_brought_meanwhile_are_held(
    lacking: tuple[StagedLanes, Pieces, Requests],
) -> None:
    lanes, pieces, requests = lacking
    assert lanes.goes_in_parts(requests)  # when it was started; it has its turn later
    pieces.hold(["c"])
    made = lanes.begin(requests, 7)
    pieces.release(["c"])
    with pytest.raises(RuntimeError, match="all 2 pieces"):
        pieces.hold(["b"])
    for part in made:
        part.queue(8)
        until(part.is_done, every=0)
    lanes.follow(7)
    assert [float(found["y"][0]) for found in lanes.read()] == [2, 50]
    assert lanes.is_done()
    pieces.hold(["b"])
    assert pieces.brought == 2


def test_weights_that_were_brought_for_what_is_given_up_may_go() -> None:
    lanes, pieces, _ = staged(most=2)
    for brought_first in (True, False):
        weights, _ = lanes.begin([("b", x(1))], None)
        if brought_first:
            weights.queue(8)
            until(weights.is_done, every=0)
            lanes.give_up()
        else:
            lanes.give_up()
            weights.queue(8)
            until(weights.is_done, every=0)
        pieces.hold(["c"])  # for which another one has to go
        pieces.release(["c"])
    assert pieces.brought == 4


def test_weights_for_which_there_is_no_room_are_an_error_of_their_launch() -> None:
    lanes, pieces, _ = staged(most=2)
    pieces.hold(["b"])
    weights, _ = lanes.begin([("c", x(1))], None)
    weights.queue(8)
    with pytest.raises(RuntimeError, match="all 2 pieces"):
        until(weights.is_done, every=0)
    lanes.give_up()


# --- kernels that TVM did not make -------------------------------------------------------------


def test_a_kernel_of_others_gets_a_weight_gathered_where_it_takes_an_activation() -> None:
    import tvm
    from tvm import relax, te

    def product(a: Any, b: Any) -> Any:
        k = te.reduce_axis((0, 4), name="k")
        return te.compute((4, 4), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")

    square = ((4, 4), "float32")
    a, b = te.placeholder(*square, name="a"), te.placeholder(*square, name="b")
    function = te.create_prim_func([a, b, product(a, b)]).without_attr("global_symbol")
    builder = relax.BlockBuilder()
    x, w, v = (relax.Var(name, relax.TensorType(*square)) for name in ("x", "w", "v"))
    with builder.function("main", [x, w, v]):
        with builder.dataflow():
            kernel = builder.add_func(function, "product")
            of_type = relax.TensorType(*square)
            first = builder.emit(relax.call_tir(kernel, relax.Tuple([x, w]), of_type))
            flat = builder.emit(relax.op.reshape(v, (2, 8)))
            back = builder.emit(relax.op.reshape(flat, (4, 4)))
            second = builder.emit(relax.call_tir(kernel, relax.Tuple([back, w]), of_type))
            shared = builder.emit(relax.call_tir(kernel, relax.Tuple([first, w]), of_type))
            out = builder.emit_output(relax.Tuple([second, shared, v]))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_func(mod.get_global_var("main"), mod["main"].with_attr("num_input", 1))
    cubin = DeviceKernel("symbol", b"", (), "")
    foreign = Foreign(LoweredKernel(tvm.IRModule({ENTRY: function}), (cubin,)), frozenset((1,)))
    made = model_for_tenants(mod, {"product": foreign}, 2, tvm.target.Target("llvm"))
    text = made.mod["main"].script()
    assert text.count("R.call_tir(gather") == 2  # a view of v for the kernel, and the output
    assert [str(var.name_hint) for var in made.foreign] == ["product"]
    calls = [line for line in text.splitlines() if "call_tir(product," in line]
    assert len(calls) == 3
    assert all("tunerd_slots" in call and ", w)" in call for call in calls)
    own = model_for_tenants(mod, {}, 2, tvm.target.Target("llvm"))
    text = own.mod["main"].script()
    assert "v: R.Tensor((16,)" in text
    kernels = [v.name_hint for v, _ in own.mod.functions_items() if "product" in v.name_hint]
    assert len(kernels) == 2  # with one argument as a weight, and with both
    assert text.count("R.call_tir(gather") == 1  # of the output


def test_each_lane_gets_the_constants_of_the_model(tmp_path: Path) -> None:
    def constant(name: str, value: Any) -> Any:
        of = numpy_helper.from_array(np.array(value, "int64"))
        return helper.make_node("Constant", [], [name], value=of)

    nodes = [  # one of three parts of a product, as exported attention takes its queries
        constant("parts", [6, 3, 8]),
        constant("second", 1),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "parts"], ["b"]),
        helper.make_node("Gather", ["b", "second"], ["y"], axis=1),
    ]
    weights = {"w": floats(8, 24, seed=1)}
    model = model_of(nodes, weights, inputs={"x": (6, 8)}, outputs={"y": (6, 8)})
    require_lanes_as_alone(model, tmp_path)


def test_lanes_are_compared_with_a_model_whose_weights_are_packed(tmp_path: Path) -> None:
    weights = {"w": floats(512, 8, 1, 1, seed=1), "v": floats(4, 512, 1, 1, seed=2) / 20}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["y"]),
    ]
    model = model_of(nodes, weights, inputs={"x": (1, 8, 6, 6)}, outputs={"y": (1, 4, 6, 6)})
    alone = require_lanes_as_alone(model, tmp_path, target=cpu_target_json(2))
    assert alone.manifest["layouts"]


def require_lanes_as_alone(model: Model, folder: Path, **compiled: Any) -> Any:
    """Check two lanes of a model against it alone, which is returned."""
    lanes = tunerd.load(super_artifact(model, folder / "super", (2,), **compiled))
    alone = tunerd.load(artifact_of(model, folder / "alone", **compiled))
    expected = expected_of(model)
    pairs = pairs_of(outputs_of(lanes, alone, inputs_for(expected.inputs)))
    found = with_lanes(expected.verify(lanes), expected, pairs)
    assert found.verdict is Verdict.RIGHT, found.message
    return alone
