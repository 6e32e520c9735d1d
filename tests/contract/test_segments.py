"""Models in segments: where they are cut, and what a pause does and does not do."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.lib.colocation_plans import artifact, inputs
from tunerd.artifacts.loading import LoadedModel, load
from tunerd.artifacts.manifest import LoadError
from tunerd.artifacts.segments import Pauses, SegmentedCapture, SegmentedModel, cut, merged
from tunerd.vocabulary import Arrays

NEVER, ALWAYS = 1e9, 1e-12  # limits of a segment, in seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(artifact(tmp_path_factory.mktemp("model"), 0))


class Noted(Pauses):
    """Pauses at all segments, or at none, and notes where it did."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.at: list[int] = []
        self._wanted = wanted

    def wanted(self) -> bool:
        return self._wanted

    def pause(self, segment: int) -> None:
        self.at.append(segment)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def test_segments_are_as_long_as_they_may_be() -> None:
    assert merged([1, 2, 3, 4, 5], [0.1, 0.1, 0.3, 0.1, 0.1], 0.25) == [2, 3, 5]
    assert merged([4, 9], [0.1, 0.1], 1.0) == [9]


@pytest.mark.parametrize("seed", range(5))
def test_only_single_kernels_are_longer_than_a_segment_may_be(seed: int) -> None:
    kernels = np.random.default_rng(seed).exponential(30e-6, 300)

    def timed(ends: Sequence[int]) -> list[float]:
        return [float(kernels[a:b].sum()) for a, b in itertools.pairwise([0, *ends])]

    ends = cut(len(kernels), 200e-6, timed)
    lengths = timed(ends)
    sizes = [b - a for a, b in itertools.pairwise([0, *ends])]
    assert ends[-1] == len(kernels)
    assert all(secs <= 200e-6 or size == 1 for secs, size in zip(lengths, sizes, strict=True))
    assert all(one + other > 200e-6 for one, other in itertools.pairwise(lengths))


def test_a_model_gives_the_same_answers_in_segments(model: LoadedModel) -> None:
    expected = [model(inputs(seed)) for seed in range(3)]
    made = SegmentedModel(model, inputs(), ALWAYS)
    count = len(made.segment_secs)
    assert count > 3
    for seed in range(3):
        pauses = Noted()
        assert same(made(inputs(seed), pauses), expected[seed])
        assert pauses.at == list(range(1, count))
    quiet = Noted(wanted=False)
    assert same(made(inputs(0), quiet), expected[0])
    assert not quiet.at


def test_a_short_model_is_one_segment(model: LoadedModel) -> None:
    made = SegmentedModel(model, inputs(), NEVER)
    pauses = Noted()
    made(inputs(), pauses)
    assert len(made.segment_secs) == 1
    assert not pauses.at


def test_a_model_stops_after_the_kernels_that_it_is_told(model: LoadedModel) -> None:
    kernels = SegmentedModel(model, inputs(), ALWAYS).ends
    made = SegmentedModel(model, inputs(), (1, 3))
    assert made.ends == (1, 3, kernels[-1])
    pauses = Noted()
    assert same(made(inputs(), pauses), model(inputs()))
    assert pauses.at == [1, 2]
    assert len(SegmentedModel(model, inputs(), ()).segment_secs) == 1
    for stops in ((3, 1), (2, 2), (0,), (kernels[-1],)):
        with pytest.raises(LoadError, match=f"a model of {kernels[-1]} kernels cannot stop after"):
            SegmentedModel(model, inputs(), stops)


def test_what_a_pause_raises_ends_the_run_and_the_model_serves_again(model: LoadedModel) -> None:
    class Refusing(Noted):
        def pause(self, segment: int) -> None:
            super().pause(segment)
            if segment == 2:
                raise RuntimeError("nobody waits any more")

    expected = model(inputs())
    made = SegmentedModel(model, inputs(), ALWAYS)
    refusing = Refusing()
    with pytest.raises(RuntimeError, match="nobody waits any more"):
        made(inputs(), refusing)
    assert refusing.at == [1, 2]
    assert same(made(inputs(), Noted()), expected)


def test_a_model_in_segments_is_freed_with_whoever_runs_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = load(artifact(tmp_path_factory.mktemp("model"), 0))
    made = SegmentedModel(model, inputs(), ALWAYS)
    made(inputs(), Noted())
    alive = weakref.ref(model)
    del model, made
    gc.collect()
    assert alive() is None


# --- graphs, without a GPU ----------------------------------------------------------------------

SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
EDGES = [(10, 11), (11, 12), (10, 13), (13, 14), (12, 14), (14, 15)]
NODE_SECS = {10: 1e-4, 11: 1e-4, 12: 5e-5, 13: 5e-5, 14: 4e-4, 15: 1e-4}


class FakeDriver:
    """Graphs are dicts of nodes; a launch notes them, and time passes as they say."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.live: set[int] = set()
        self._graphs: dict[int, list[int]] = {1: [14, 10, 12, 15, 11, 13]}
        self._moments: dict[int, float] = {}
        self._numbers = itertools.count(100)
        self._now = 0.0

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> Any:
        nodes = self._graphs[graph]
        return SUCCESS, nodes[:count], len(nodes)

    def cuGraphGetEdges(self, graph: int, count: int = 0) -> Any:
        sources, targets = zip(*EDGES[:count], strict=True) if count else ((), ())
        return SUCCESS, sources, targets, [None] * count, len(EDGES)

    def cuGraphClone(self, graph: int) -> Any:
        number = next(self._numbers)
        self._graphs[number] = list(self._graphs[graph])
        return SUCCESS, number

    def cuGraphNodeFindInClone(self, node: int, graph: int) -> Any:
        return SUCCESS, (graph, node)

    def cuGraphDestroyNode(self, found: tuple[int, int]) -> Any:
        self._graphs[found[0]].remove(found[1])
        return (SUCCESS,)

    def cuGraphInstantiate(self, graph: int, _: int) -> Any:
        made = self.cuGraphClone(graph)
        self.live.add(made[1])
        return made

    def cuGraphLaunch(self, graph: int, _: int) -> Any:
        self.ran += sorted(self._graphs[graph])  # which is an order that the edges allow
        self._now += sum(NODE_SECS[node] for node in self._graphs[graph])
        return (SUCCESS,)

    def cuGraphExecDestroy(self, graph: int) -> Any:
        self.live.remove(graph)
        return (SUCCESS,)

    def cuEventCreate(self, _: int) -> Any:
        return SUCCESS, next(self._numbers)

    def cuEventRecord(self, event: int, _: int) -> Any:
        self._moments[event] = self._now
        return (SUCCESS,)

    def cuEventElapsedTime(self, one: int, other: int) -> Any:
        return SUCCESS, 1e3 * (self._moments[other] - self._moments[one])

    def __getattr__(self, name: str) -> Any:
        if name not in (
            "cuGraphDestroy",
            "cuGraphUpload",
            "cuEventSynchronize",
            "cuEventDestroy",
            "cuStreamSynchronize",
        ):
            raise AttributeError(name)
        return lambda *_: (SUCCESS,)


class FakeCaptured:
    graph, stream = 1, 7

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.written: list[Any] = []

    def write(self, given: Any) -> None:
        self.written.append(given)

    def wait(self) -> None: ...

    def read(self) -> dict[str, Any]:
        return {"ran": list(self._driver.ran)}


def test_a_graph_is_cut_in_the_order_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.bindings

    driver = FakeDriver()
    monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
    made = SegmentedCapture(FakeCaptured(driver), {}, 2.1e-4)
    assert sum(made.segment_secs) == pytest.approx(sum(NODE_SECS.values()))
    assert [secs for secs in made.segment_secs if secs > 2.1e-4] == [pytest.approx(4e-4)]
    assert len(driver.live) == len(made.segment_secs)
    driver.ran.clear()
    pauses = Noted()
    ran = made({"x": 1}, pauses)["ran"]
    assert pauses.at == list(range(1, len(made.segment_secs))) != []
    assert sorted(ran) == sorted(NODE_SECS)
    assert all(ran.index(source) < ran.index(target) for source, target in EDGES)
    driver.ran.clear()
    assert made({"x": 1}, Noted(wanted=False))["ran"] == ran
    del made
    assert not driver.live
    told = SegmentedCapture(FakeCaptured(driver), {}, (2, 5))
    assert told.ends == (2, 5, 6)
    driver.ran.clear()
    assert sorted(told({"x": 1}, Noted())["ran"]) == sorted(NODE_SECS)
