"""Models in segments: between two of them, whoever runs one may pause it, and go on later.

On CPUs TVM's virtual machine tells of each kernel, and the thread that runs the model waits there.
On a GPU the captured graph becomes several in the order of its kernels, and another stream's work
gets in between. Segments are cut by measured times, at the share at which the model runs: single
kernels stay whole.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakMethod

from tunerd.artifacts.manifest import LoadError
from tunerd.system.cuda_driver import NO_TIMES, checked
from tunerd.vocabulary import Arrays

if TYPE_CHECKING:
    from tunerd.artifacts.loading import LoadedModel

_TRIES = 3  # of what is timed; the fastest counts
_ROUNDS = 6  # of splitting: pieces are halved at least, as far as kernels allow
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_OF_THE_MACHINE = "vm.builtin."  # calls that are no kernels


# How long segments may be in seconds, infinite for one; or after which kernels they end.
Cut = float | Sequence[int]


class Pauses(Protocol):
    """Whoever runs a model, as the model sees it."""

    def wanted(self) -> bool:
        """Say whether the run is to pause; asked between two segments."""

    def pause(self, segment: int) -> None:
        """Return when this segment, the next one, may start. What it raises ends the run."""


class _NoPauses(Pauses):
    def wanted(self) -> bool:
        return False

    def pause(self, segment: int) -> None: ...


def merged(ends: Sequence[int], secs: Sequence[float], limit_secs: float) -> list[int]:
    """Return the ends of segments that are made of neighbouring pieces, as long as they may be.

    Args:
        ends: of the pieces, as numbers of kernels, and how long each piece takes.

    >>> merged((1, 2, 3, 4), (0.1, 0.1, 0.5, 0.1), 0.25)
    [2, 3, 4]
    """
    kept: list[int] = []
    taken_secs = 0.0
    for before, piece_secs in zip((0, *ends[:-1]), secs, strict=True):
        if before and taken_secs + piece_secs > limit_secs:
            kept.append(before)
            taken_secs = 0.0
        taken_secs += piece_secs
    return [*kept, ends[-1]]


def cut(
    count: int, limit_secs: float, timed: Callable[[Sequence[int]], Sequence[float]]
) -> list[int]:
    """Return the ends of segments of `count` kernels, none longer than the limit but single ones.

    Args:
        timed: takes the ends of pieces, and says how long each of them takes.
    """
    ends = [count]
    secs = timed(ends)
    for _ in range(_ROUNDS):
        split: list[int] = []
        for first, end, piece_secs in zip([0, *ends], ends, secs, strict=False):
            parts = min(end - first, max(1, -int(-piece_secs // limit_secs)))
            split += [first + (end - first) * i // parts for i in range(1, parts + 1)]
        if split == ends:
            break
        ends, secs = split, timed(split)
    return merged(ends, secs, limit_secs)


def ends_of(stops: Sequence[int], kernels: int) -> list[int]:
    """Return the ends of segments of a model of so many kernels that stops after some of them.

    Raises LoadError where it has no such kernels, as another compilation of a model may.
    """
    ends = [*stops, kernels]
    if any(first >= end for first, end in itertools.pairwise([0, *ends])):
        raise LoadError(
            f"a model of {kernels} kernels cannot stop after {', '.join(map(str, stops))}; these "
            "are of another artifact, or out of order: find its regulation again"
        )
    return ends


def segmented(
    model: LoadedModel, inputs: Mapping[str, Any], cut: Cut
) -> SegmentedModel | SegmentedCapture | WholeCapture:
    """Return a loaded model in segments."""
    if model.manifest["target"]["kind"] != "cuda":
        return SegmentedModel(model, inputs, cut)
    if cut == math.inf:
        return WholeCapture(model, inputs)
    return SegmentedCapture(model.captured(), inputs, cut)


# --- CPUs ---------------------------------------------------------------------------------------


class Instrumented(Protocol):
    """A LoadedModel for CPUs."""

    def __call__(self, inputs: Mapping[str, Any], /) -> Arrays: ...
    def instrument(self, seen: Callable[..., None] | None) -> None: ...


class SegmentedModel:
    """A model for CPUs that may pause between kernels. One thread at a time.

    segment_secs: of each segment, as it was tried; one where the model cannot be cut, as one that
    is a single kernel. ends: after which kernels they end.
    """

    def __init__(self, model: Instrumented, inputs: Mapping[str, Any], cut: Cut) -> None:
        """Run the model some times to find where it can be cut."""
        self._model = model
        self._starts: dict[int, int] = {}  # segments by the number of their first kernel
        self._pauses: Pauses = _NoPauses()
        self._kernels = 0
        kernel_secs = self._timed(inputs)
        ends = (
            ends_of(cut, len(kernel_secs))
            if isinstance(cut, Sequence)
            else merged(range(1, len(kernel_secs) + 1), kernel_secs, cut)
        )
        self.ends = tuple(ends)
        bounds = list(itertools.pairwise([0, *ends]))
        self.segment_secs = tuple(sum(kernel_secs[first:end]) for first, end in bounds)
        self._starts = {first: number for number, (first, _) in enumerate(bounds) if number}
        model.instrument(_weak(self._between) if self._starts else None)

    def __call__(self, inputs: Mapping[str, Any], pauses: Pauses) -> Arrays:
        """Run the model, with pauses where they are wanted."""
        self._pauses, self._kernels = pauses, 0
        return self._model(inputs)

    def _between(self, _function: Any, name: str, is_before: bool, *_: Any) -> None:
        if not is_before or name.startswith(_OF_THE_MACHINE):
            return
        segment = self._starts.get(self._kernels)
        self._kernels += 1
        if segment and self._pauses.wanted():
            self._pauses.pause(segment)

    def _timed(self, inputs: Mapping[str, Any]) -> list[float]:
        """Return the seconds from the start of each kernel to that of the next, or to the end."""
        starts: list[float] = []

        def seen(_function: Any, name: str, is_before: bool, *_: Any) -> None:
            if is_before and not name.startswith(_OF_THE_MACHINE):
                starts.append(time.perf_counter())

        self._model.instrument(seen)
        tries: list[list[float]] = []
        for _ in range(_TRIES):
            starts.clear()
            since = time.perf_counter()
            self._model(inputs)
            moments = [since, *starts[1:], time.perf_counter()]  # the first has what is before it
            tries.append([end - start for start, end in itertools.pairwise(moments)])
        return [min(times) for times in zip(*tries, strict=False)]


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a method of an object that it does not keep alive.

    TVM holds an instrument where Python's garbage collector does not look: with a strong one, a
    model that is done with would keep its weights for ever.
    """
    held = WeakMethod(method)

    def call(*given: Any) -> None:
        if known := held():
            known(*given)

    return call


# --- GPUs ---------------------------------------------------------------------------------------


class Recorded(Protocol):
    """A CapturedModel: `graph` is what was captured, as the driver's handle."""

    graph: Any
    stream: int

    def write(self, inputs: Mapping[str, Any]) -> None: ...
    def wait(self) -> None: ...
    def read(self) -> dict[str, Any]: ...


class GraphPieces:
    """A captured graph as several in sequence.

    ends: after which nodes they end. segment_secs: of each, as it was tried. graphs: ready to be
    launched, the caller's.
    """

    def __init__(self, driver: Any, graph: Any, stream: int, limits: Cut) -> None:
        """Run pieces of the graph on a stream some times to find where it is to be cut."""
        self._driver, self._graph, self._stream = driver, graph, stream
        self._made: dict[tuple[int, int], Any] = {}
        self._nodes = _in_order(driver, graph)
        count = len(self._nodes)
        ends = (
            ends_of(limits, count)
            if isinstance(limits, Sequence)
            else cut(count, limits, self._timed)
        )
        self.ends = tuple(ends)
        self.segment_secs = tuple(self._timed(ends))
        self.graphs = [self._piece(*bounds) for bounds in itertools.pairwise([0, *ends])]
        for bounds in self._made.keys() - set(itertools.pairwise([0, *ends])):
            driver.cuGraphExecDestroy(self._made.pop(bounds))

    def _timed(self, ends: Sequence[int]) -> list[float]:
        driver, stream = self._driver, self._stream
        pieces = [self._piece(*bounds) for bounds in itertools.pairwise([0, *ends])]
        events = [checked(driver.cuEventCreate(0)) for _ in range(len(pieces) + 1)]
        best = [float("inf")] * len(pieces)
        for _ in range(_TRIES):
            checked(driver.cuEventRecord(events[0], stream))
            for piece, event in zip(pieces, events[1:], strict=True):
                checked(driver.cuGraphLaunch(piece, stream))
                checked(driver.cuEventRecord(event, stream))
            checked(driver.cuStreamSynchronize(stream))
            for i, (one, other) in enumerate(itertools.pairwise(events)):
                best[i] = min(best[i], checked(driver.cuEventElapsedTime(one, other)) / 1e3)
        for event in events:
            driver.cuEventDestroy(event)
        return best

    def _piece(self, first: int, end: int) -> Any:
        """Return an executable graph of some nodes in a row: a copy without the others."""
        if (first, end) not in self._made:
            driver = self._driver
            graph = checked(driver.cuGraphClone(self._graph))
            for node in (*self._nodes[:first], *self._nodes[end:]):
                copied = checked(driver.cuGraphNodeFindInClone(node, graph))
                checked(driver.cuGraphDestroyNode(copied))
            self._made[first, end] = made = checked(driver.cuGraphInstantiate(graph, 0))
            checked(driver.cuGraphDestroy(graph))
            checked(driver.cuGraphUpload(made, self._stream))
        return self._made[first, end]


class SegmentedCapture:
    """A captured model as several graphs in sequence. One thread at a time.

    Two segments at most are queued on the stream, so that the GPU does not wait for the host and a
    pause has not much before it.
    """

    def __init__(self, captured: Recorded, inputs: Mapping[str, Any], limits: Cut) -> None:
        """Run pieces of the graph some times to find where it is to be cut."""
        from cuda.bindings import driver

        self._driver, self._captured = driver, captured
        self._events = [checked(driver.cuEventCreate(NO_TIMES)) for _ in range(2)]
        captured.write(inputs)
        pieces = GraphPieces(driver, captured.graph, captured.stream, limits)
        self.ends, self.segment_secs = pieces.ends, pieces.segment_secs
        self._graphs = pieces.graphs

    def __call__(self, inputs: Mapping[str, Any], pauses: Pauses) -> dict[str, Any]:
        """Run the model, with pauses where they are wanted; return its outputs as NumPy arrays."""
        driver, captured, last = self._driver, self._captured, len(self._graphs) - 1
        captured.write(inputs)
        queued = 0  # since the last pause
        for segment, graph in enumerate(self._graphs):
            checked(driver.cuGraphLaunch(graph, captured.stream))
            if segment == last:
                break
            checked(driver.cuEventRecord(self._events[segment % 2], captured.stream))
            queued += 1
            if queued > 1 and not pauses.wanted():
                checked(driver.cuEventSynchronize(self._events[(segment - 1) % 2]))
            if pauses.wanted():
                captured.wait()
                pauses.pause(segment + 1)
                queued = 0
        return captured.read()

    def __del__(self) -> None:
        for made in getattr(self, "_graphs", ()):
            self._driver.cuGraphExecDestroy(made)
        for event in getattr(self, "_events", ()):
            self._driver.cuEventDestroy(event)


class WholeCapture:
    """A model for a GPU in one segment: a StagedModel that is waited for. One thread at a time."""

    ends = (1,)  # its graph is one

    def __init__(self, model: LoadedModel, inputs: Mapping[str, Any]) -> None:
        from cuda.bindings import driver

        self._stream = int(checked(driver.cuStreamCreate(_NON_BLOCKING)))
        (self._staged,) = model.staged(self._stream)
        secs = []
        for _ in range(_TRIES):
            self(inputs, _NoPauses())
            secs.append(self._staged.secs())
        self.segment_secs = (min(secs),)

    def __call__(self, inputs: Mapping[str, Any], pauses: Pauses) -> Arrays:
        """Run the model; return its outputs by name."""
        self._staged.launch(inputs, self._stream)
        self._staged.wait()
        return self._staged.read()


def _in_order(driver: Any, graph: Any) -> list[Any]:
    """Return a graph's nodes, each after those that it waits for.

    One stream carries out the pieces one after the other: what waits for a node of an earlier
    piece waits for it there.
    """
    _, _, count = driver.cuGraphGetNodes(graph)
    nodes = list(_listed(driver.cuGraphGetNodes(graph, count), count)[0])
    edges = driver.cuGraphGetEdges(graph)[-1]
    if not edges:
        return nodes
    sources, targets = _listed(driver.cuGraphGetEdges(graph, edges), edges)[:2]
    after: dict[int, list[int]] = {int(node): [] for node in nodes}
    waits = dict.fromkeys(after, 0)
    for source, target in zip(sources, targets, strict=True):
        after[int(source)].append(int(target))
        waits[int(target)] += 1
    by_handle = {int(node): node for node in nodes}
    ready = [handle for handle in after if not waits[handle]]
    ordered = []
    while ready:
        handle = ready.pop()
        ordered.append(by_handle[handle])
        for follower in after[handle]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    return ordered


def _listed(answer: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Return the lists of an answer of the driver, as long as it said."""
    checked(answer[:1])
    return [part[:count] for part in answer[1:-1]]
