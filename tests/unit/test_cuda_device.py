"""Which copies of weights a sample takes on a GPU. No GPU: the driver does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tvm

from tunerd.runner.arguments import Arguments
from tunerd.runner.cuda_device import CudaDevice, _Graphs, graphs_of_a_sample
from tunerd.runner.profiles import final_profile, range_of, within
from tunerd.vocabulary import METASCHEDULE, Build, Candidate, TensorSpec

COPIES = 64


class DryDevice(CudaDevice):
    """Notes the calls that graphs would make, by the number of the copy."""

    def __init__(self) -> None:
        self._next_copy = 0
        self._stream = None
        self.called: list[int] = []
        self._driver = SimpleNamespace(cuGraphLaunch=lambda made, _: self.called.extend(made))

    def _time(self, work: Callable[[], Any]) -> float:
        before = len(self.called)
        work()
        return float(len(self.called) - before)

    def _checked(self, answer: Any) -> Any:
        return answer


def graphs_of(each: int) -> _Graphs:
    def capture(first: int) -> Any:
        return SimpleNamespace(executable=[i % COPIES for i in range(first, first + each)])

    return _Graphs(capture, each, COPIES)


@pytest.mark.parametrize("once_us", [(200, 45), (20, 90), (900, 16), (30, 30), (1900, 40)])
def test_rivals_find_none_of_their_weights_where_another_has_just_left_them(
    once_us: tuple[int, int],
) -> None:
    device = DryDevice()
    rivals = []
    for once in once_us:
        each, count = graphs_of_a_sample(-(-2000 // once), COPIES, once * 1e-6)
        rivals.append((graphs_of(each), count))
    used_at: dict[int, int] = {}
    nearest = COPIES
    for turn in range(200):
        for graphs, count in rivals:
            start = len(device.called)
            assert device._time_graphs(graphs, count) == 1.0  # a mean over the calls it made
            for at, copy in enumerate(device.called[start:], start):
                if turn:
                    nearest = min(nearest, at - used_at.get(copy, -COPIES))
                used_at[copy] = at
    assert nearest >= COPIES // 2  # as many others since: the size of the cache at least


def test_one_graph_begins_with_the_same_copy_each_time() -> None:
    device = DryDevice()
    graphs = graphs_of(COPIES)  # or more: all copies are in each
    for _ in range(3):
        device._time_graphs(graphs, 1)
    assert device.called == list(range(COPIES)) * 3


@pytest.mark.parametrize("once_us", [1, 5, 16, 40, 333, 1500, 2000])
@pytest.mark.parametrize("copies", [1, 2, 17, 64, 290, 350, 512])
def test_a_sample_has_about_the_calls_that_it_needs(once_us: int, copies: int) -> None:
    calls = min(400, -(-2000 // once_us))
    each, count = graphs_of_a_sample(calls, copies, once_us * 1e-6)
    assert each * count >= 2 / 3 * calls
    assert each * count <= max(2 * calls, copies)
    if count > 1:
        assert each < copies


# --- whole kernels ---------------------------------------------------------------------------

MIB = 1 << 20


class DryGpu(DryDevice):
    """Notes the weights of each call that would run, in a graph or not."""

    def __init__(self) -> None:
        super().__init__()
        self.once_secs = 0.0
        self._capturing: list[int] | None = None
        self._l2_bytes = 60 * MIB
        self._arguments = Arguments(tvm.runtime.empty, lambda: None, max_bytes=1 << 30)
        self._driver = SimpleNamespace(
            CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
            cuStreamSynchronize=lambda stream: None,
            cuStreamBeginCapture=self._begin_capture,
            cuStreamEndCapture=self._end_capture,
            cuGraphInstantiate=lambda graph, flags: graph,
            cuGraphDestroy=lambda graph: None,
            cuGraphUpload=lambda executable, stream: None,
            cuGraphLaunch=lambda executable, stream: self.called.extend(executable),
            cuGraphExecDestroy=lambda executable: None,
        )

    def _begin_capture(self, stream: Any, mode: int) -> None:
        self._capturing = []

    def _end_capture(self, stream: Any) -> list[int]:
        captured, self._capturing = self._capturing, None
        assert captured is not None
        return captured

    def _kernel(self, path: Path) -> Any:
        def call(activation: Any, weight: Any) -> None:
            called = self.called if self._capturing is None else self._capturing
            called.append(weight.data_ptr())

        return call

    def _time(self, work: Callable[[], Any]) -> float:
        return super()._time(work) * self.once_secs

    def _on_stream(self) -> Any:
        return contextlib.nullcontext()


def kernel_with(weight_bytes: int) -> Build:
    return Build(
        candidate=Candidate("task", "id", METASCHEDULE),
        library=b"",
        library_sha256="",
        build_secs=0.0,
        args=(TensorSpec("x", (1,), "float32"), TensorSpec("w", (weight_bytes // 4,), "float32")),
        weight_args=(1,),
        compiler="nvrtc",
    )


@pytest.mark.parametrize("once_us", [(2, 3, 2.5), (5, 7, 6), (50, 40, 90), (300, 800, 500)])
@pytest.mark.parametrize("model_mib", [20, 36, 97, 500])
@pytest.mark.parametrize("weight_kib", [257, 1025, 9000])
def test_rivals_find_their_weights_as_far_away_as_in_the_model(
    weight_kib: int, model_mib: int, once_us: tuple[float, ...]
) -> None:
    device, build = DryGpu(), kernel_with(weight_kib << 10)
    profile = within(final_profile("model"), model_mib * MIB)
    range_bytes = range_of(profile, device._l2_bytes)
    rivals = []
    for once in once_us:
        device.once_secs = once * 1e-6
        rivals.append((once, device.prepare(build, Path("kernel.so"), profile)))
    device.called.clear()
    for _ in range(20):
        for once, rival in rivals:
            device.once_secs = once * 1e-6
            assert rival.sample() == pytest.approx(once * 1e-6)
    last: dict[int, int] = {}
    near = 0
    for at, weight in enumerate(device.called):
        passed = (at - last[weight]) * (weight_kib << 10) if weight in last else range_bytes
        near += passed < range_bytes / 2
        last[weight] = at
    assert near <= 0.02 * len(device.called)
