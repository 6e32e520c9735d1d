"""What a staged model tells a driver, where the driver is a stand-in that works on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.lib.fake_driver import OK, Driver, Status, Tensor
from tunerd.artifacts import captured, staging
from tunerd.artifacts.captured import Recorder, StagedModel
from tunerd.artifacts.manifest import SLOTS
from tunerd.artifacts.staging import PinnedArrays
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import TensorSpec


class Doubling:
    """A recorder of a model with two inputs, the second of them a scalar: y = 2x, z = offset."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.stream = driver, 7
        self.short = driver.short
        self.input_specs = (TensorSpec("x", (2, 3), "float16"), TensorSpec("offset", (), "int64"))
        self.output_specs = (
            TensorSpec("y", (2, 3), "float16"),
            TensorSpec("z", (), "int64"),
            TensorSpec("none", (0, 4), "float32"),
        )
        self.inputs = {s.name: Tensor(s.shape, s.dtype) for s in self.input_specs}

    entered = Recorder.entered

    def executable(self, graph: Any) -> int:
        return self.driver.ready(graph)

    def more_inputs(self) -> dict[str, Any]:
        return {s.name: Tensor(s.shape, s.dtype) for s in self.input_specs}

    def recorded(self, after: Callable[[dict[str, Any]], None], before: Callable[[], None]) -> Any:
        outputs = {s.name: Tensor(s.shape, s.dtype) for s in self.output_specs}

        def kernel() -> None:
            np.multiply(self.inputs["x"].array, 2, out=outputs["y"].array)
            np.copyto(outputs["z"].array, self.inputs["offset"].array)

        self.driver.captured = []
        before()
        self.driver.captured.append(kernel)
        after(outputs)
        return self.driver.captured, outputs


def inputs(value: float) -> dict[str, Any]:
    return {"x": np.full((2, 3), value, "float16"), "offset": np.array(int(value), "int64")}


def test_a_launch_brings_the_inputs_and_fetches_the_outputs() -> None:
    driver = Driver()
    recorder: Any = Doubling(driver)
    one, two = StagedModel(recorder), StagedModel(recorder)
    one.launch(inputs(1), 7)
    two.launch(inputs(5), 7)
    for staged, value in ((two, 5), (one, 1)):  # each has host memory of its own
        outputs = staged.read()
        assert np.array_equal(outputs["y"], np.full((2, 3), 2 * value, "float16"))
        assert outputs["z"] == value
        assert outputs["none"].shape == (0, 4)
    assert one.secs() == 1.0
    assert driver.recorded == [(1, 7), (2, 7), (5, 7), (6, 7)]
    assert {stream for _, stream in driver.copied_on} == {7}


def test_large_arrays_are_copied_beside_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)
    driver = Driver()
    recorder: Any = Doubling(driver)
    one, two = StagedModel(recorder, is_ahead=True), StagedModel(recorder, is_ahead=True)
    one.launch(inputs(1), 7, fetch=9)  # nothing runs: its inputs need no stream of their own
    assert driver.waits == [(9, 2)]
    read_by_one = recorder.inputs["x"].array.copy()
    two._marked._bring(two._copies_of(inputs(5)), 8)
    assert np.array_equal(recorder.inputs["x"].array, read_by_one)  # brought, and not yet taken
    driver.copied_on.clear()
    driver.waits.clear()
    driver.recorded.clear()
    two.launch(inputs(5), 7, bring=8, fetch=9)
    assert driver.copied_on == [("device", 8)] * 2 + [("host", 9)] * 2
    assert driver.recorded == [(8, 8), (5, 7), (6, 7), (7, 9)]
    assert driver.waits == [(7, 8), (9, 6)]
    for staged, value in ((two, 5), (one, 1)):
        assert np.array_equal(staged.read()["y"], np.full((2, 3), 2 * value, "float16"))
    assert one.fetches_apart


def test_small_arrays_stay_on_the_stream_of_the_graph() -> None:
    driver = Driver()
    recorder: Any = Doubling(driver)
    staged = StagedModel(recorder, is_ahead=True)
    staged.launch(inputs(3), 7, bring=8)
    assert {stream for _, stream in driver.copied_on} == {7}
    assert driver.waits == []
    assert staged.read()["z"] == 3
    assert not staged.fetches_apart


def test_inputs_in_pinned_memory_are_taken_from_there() -> None:
    driver = Driver()
    recorder: Any = Doubling(driver)
    staged = StagedModel(recorder)
    waiting = PinnedArrays(driver, recorder.input_specs)
    waiting.write(inputs(3))
    staged.launch(inputs(1), 7)
    staged.launch(waiting, 7)
    assert staged.read()["z"] == 3
    assert staged._inputs["offset"] == 1


@pytest.mark.parametrize("large_bytes", [1, 1 << 20])
def test_outputs_that_were_read_stay_when_it_is_launched_again(
    monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", large_bytes)
    recorder: Any = Doubling(Driver())
    staged = StagedModel(recorder, is_ahead=True)
    read = []
    for value in range(20):  # more than there are blocks for
        staged.launch(inputs(value), 7)
        read.append(staged.read())
    for value, outputs in enumerate(read):
        assert np.array_equal(outputs["y"], np.full((2, 3), 2 * value, "float16"))
        assert outputs["z"] == value


def test_events_are_of_the_context_of_their_stream() -> None:
    driver = Driver()
    recorder: Any = Doubling(driver)
    StagedModel(recorder)
    assert driver.events == ["green", "green", "green", "primary"]  # the last: of what is brought
    assert driver.current == ["primary"]


def test_what_the_device_met_is_raised_by_its_name() -> None:
    driver = Driver()
    recorder: Any = Doubling(driver)
    staged = StagedModel(recorder)
    staged.launch(inputs(1), 7)
    driver.status = Status.CUDA_ERROR_NOT_READY
    assert not staged.is_done()
    driver.status = OK
    assert staged.is_done()
    driver.status = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match="CUDA: CUDA_ERROR_ILLEGAL_ADDRESS"):
        staged.is_done()
    with pytest.raises(RuntimeError, match="CUDA: CUDA_ERROR_ILLEGAL_ADDRESS"):
        staged.launch(inputs(1), 7)


def test_inputs_of_another_type_are_not_converted_on_the_way() -> None:
    recorder: Any = Doubling(Driver())
    with pytest.raises(TypeError):
        StagedModel(recorder).launch(inputs(1) | {"x": np.zeros((2, 3), "float32")}, 7)


def test_what_it_had_of_the_driver_is_given_back() -> None:
    driver = Driver()
    recorder: Any = Doubling(driver)
    del recorder, driver.captured
    staged = StagedModel(Doubling(driver))  # type: ignore[arg-type]
    memory = {address for address, _ in (staged._inputs.places["x"], staged._outputs.places["y"])}
    del staged
    assert driver.freed[:5] == ["graph", 1, 2, 3, 4]
    assert {*driver.freed[5:]} == memory


class Machine:
    """A model that keeps what it is called with."""

    def __init__(self, library: list[Any], devices: object) -> None:
        self._calls = library

    def __getitem__(self, name: str) -> Callable[..., None]:
        return lambda *given: self._calls.append([each.numpy() for each in given])


def test_before_it_is_captured_a_model_runs_on_zeros_and_not_on_what_memory_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers of rows and slots of tenants that are nowhere end all that runs on the GPU."""
    cuda_bindings = pytest.importorskip("cuda.bindings")
    import tvm
    import tvm.runtime.vm

    empty = tvm.runtime.empty

    def used_before(shape: Any, dtype: str, device: Any) -> Any:
        made = empty(shape, dtype, device)
        if 0 not in shape:
            made.copyfrom(np.full(shape, 77).astype(dtype_of(dtype)))
        return made

    driver, runs = Driver(), list[list[Any]]()
    monkeypatch.setattr(cuda_bindings, "driver", driver, raising=False)
    monkeypatch.setattr(tvm.runtime, "empty", used_before)
    monkeypatch.setattr(tvm.runtime.vm, "VirtualMachine", Machine)
    running = contextlib.nullcontext(SimpleNamespace())
    monkeypatch.setattr(captured, "_kernels_one_by_one", lambda tvm: running)
    monkeypatch.setattr(Recorder, "queued", lambda self: contextlib.nullcontext())
    specs = (
        TensorSpec("row", (), "int64"),
        TensorSpec("x", (2, 3), "bfloat16"),
        TensorSpec("none", (0, 4), "float32"),
        TensorSpec(SLOTS, (4,), "int32"),
    )
    weight = tvm.runtime.tensor(np.full(2, 5, "float32"))
    Recorder(runs, tvm.cpu(), specs, (), [weight], 7)
    ((*given, kept),) = runs
    assert [(array.shape, str(array.dtype)) for array in given] == [
        (s.shape, s.dtype) for s in specs
    ]
    assert not any(array.any() for array in given)
    assert kept.tolist() == [5, 5]
