"""Which copies of weights a sample takes on a GPU. No GPU: the driver does nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tunerd.measuring.cuda_device import CudaDevice, _Graphs, graphs_of_a_sample

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
@pytest.mark.parametrize("copies", [1, 2, 17, 64])
def test_a_sample_has_the_calls_that_it_needs_and_hardly_more(once_us: int, copies: int) -> None:
    calls = min(400, -(-2000 // once_us))
    each, count = graphs_of_a_sample(calls, copies, once_us * 1e-6)
    assert each * count >= calls
    assert each * count <= max(2 * calls, copies)
    if count > 1:
        assert each < copies
