"""A GPU without a driver: graphs are calls of a model on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.lib.colocation_plans import Script, ScriptedModel
from tests.lib.fake_driver import CaptureModes
from tunerd.artifacts.batches import BatchedModel
from tunerd.artifacts.parts import Nothing, Written
from tunerd.artifacts.segments import Cut
from tunerd.artifacts.super_model import SuperModel
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.colocation.places.green_contexts import Part, units_of
from tunerd.vocabulary import Arrays

SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")


class HostMemory(CaptureModes):
    """A driver whose pinned memory is any."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return SUCCESS, 1

    def cuCtxPushCurrent(self, context: int) -> tuple[Any]:
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        return SUCCESS, 1

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Any, int]:
        made = (ctypes.c_uint8 * size)()
        self._made[ctypes.addressof(made)] = made
        return SUCCESS, ctypes.addressof(made)

    def cuMemFreeHost(self, address: int) -> tuple[Any]:
        del self._made[address]
        return (SUCCESS,)


class FakeGpu(GpuContext):
    """A GPU without a driver."""

    def __init__(self, *, is_mps_client: bool = False) -> None:
        self.is_mps_client = is_mps_client
        self.name, self.uuid, self.sm_count, self.dead = "a GPU", "GPU-0", 132, False
        self._driver = HostMemory()

    def make_current(self) -> None: ...

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stream(self) -> int:
        return 0

    def destroy_stream(self, stream: int) -> None: ...

    def free_bytes(self) -> int:
        return 80 << 30

    def is_dead(self) -> bool:
        return self.dead


class FakePart:
    """A part of inputs or outputs, which ends when it was asked some times."""

    goes_alone = False

    def __init__(self) -> None:
        self.is_queued, self._asked = False, 0

    def queue(self, stream: int) -> None:
        self.is_queued = True

    def is_done(self) -> bool:
        assert self.is_queued
        self._asked += 1
        return self._asked > 2


class FakeInParts:
    """What is launched at once, or has its inputs and outputs brought in three parts each."""

    fetches_apart = False
    may_go_in_parts = False
    comes_in_parts = False

    def move_in_parts(self, does: bool) -> None:
        self.fetches_apart = self.may_go_in_parts = self.comes_in_parts = does

    def goes_in_parts(self, given: Any) -> bool:
        return self.may_go_in_parts

    def begin(self, given: Any, stream: Any) -> list[FakePart]:
        self._given, self._parts = given, [FakePart() for _ in range(3)]
        return self._parts

    def follow(self, stream: Any, *, fetch: int | None = None, leaves: bool = False) -> None:
        assert all(part.is_queued for part in self._parts)
        self.launch(self._given, stream)

    def give_up(self) -> None: ...

    def parts_back(self) -> list[FakePart]:
        self._parts = [FakePart() for _ in range(3)]
        return self._parts

    def is_readable(self) -> bool:
        return all(part.is_queued for part in self._parts)

    def launch(self, given: Any, stream: Any) -> None:
        raise NotImplementedError


class FakeStaged(FakeInParts):
    """What stands for a graph: the model runs on the CPU, in the order of launches of its seat."""

    def __init__(self, model: ScriptedModel, worker: Executor, stream: Any) -> None:
        self._model, self._worker = model, worker
        self.captured_on, self.launched_on = stream, set[Any]()
        self._buffer: dict[str, Any] = {}
        self._launched: Future[Arrays] = Future()

    def launch(self, given: Mapping[str, Any], stream: Any, **_: Any) -> None:
        self.launched_on.add(stream)
        self._buffer = {name: np.array(array) for name, array in given.items()}
        self._launched = self._worker.submit(lambda: self._model(self._buffer))

    def is_done(self) -> bool:
        return self._launched.done() and bool(self._launched.result())

    def wait(self) -> None:
        self._launched.result()

    def secs(self) -> float:
        return 1e-4

    def read(self) -> Arrays:
        return {name: np.array(array) for name, array in self._launched.result().items()}


class FakePiece:
    """What stands for one of several graphs: does its part in the order of launches."""

    def __init__(self, worker: Executor, part: Callable[[], object]) -> None:
        self._worker, self._part = worker, part
        self._launched: Future[object] = Future()

    def launch(self, stream: Any) -> None:
        self._launched = self._worker.submit(self._part)

    def is_done(self) -> bool:
        if not self._launched.done():
            return False
        self._launched.result()
        return True

    def secs(self) -> float:
        return 1e-4


class FakeSegments(FakeInParts):
    """What stands for graphs in sequence: the first one does everything."""

    def __init__(self, model: ScriptedModel, worker: Executor, limits: Cut) -> None:
        self._model = model
        self.ends = (*limits, 4) if isinstance(limits, Sequence) else (1, 2, 3, 4)
        self.segment_secs = (1e-4,) * len(self.ends)
        self.pieces = tuple(
            FakePiece(worker, (lambda: None) if number else self._run)
            for number in range(len(self.ends))
        )
        self._inputs: Arrays = {}
        self._outputs: Arrays = {}

    def launch(self, given: Mapping[str, Any], stream: Any) -> None:
        self._inputs = {name: np.array(array) for name, array in given.items()}
        self.pieces[0].launch(stream)

    def read(self) -> Arrays:
        return {name: np.array(array) for name, array in self._outputs.items()}

    def _run(self) -> None:
        self._outputs = self._model(self._inputs)


class FakeCudaModel:
    def __init__(self, model: ScriptedModel, *, goes_in_parts: bool = False) -> None:
        self._model, self._goes_in_parts = model, goes_in_parts

    def staged_segments(self, stream: Any, limits: Cut) -> FakeSegments:
        made = FakeSegments(self._model, ThreadPoolExecutor(1), limits)
        made.move_in_parts(self._goes_in_parts)
        return made

    def staged(self, stream: Any, count: int = 1) -> tuple[FakeStaged, ...]:
        worker = ThreadPoolExecutor(1)
        made = tuple(FakeStaged(self._model, worker, stream) for _ in range(count))
        for each in made:
            each.move_in_parts(self._goes_in_parts)
        return made


class FakeLanes(FakeInParts):
    """What stands for a graph of some lanes: notes how many it has, and how many were filled.

    Weights that lack are brought by another thread before, where there is a limit.
    """

    def __init__(
        self,
        model: SuperModel | BatchedModel,
        count: int,
        worker: Executor,
        launched: list[tuple[int, int]],
    ) -> None:
        self._model, self._count, self._worker, self._noted = model, count, worker, launched
        self._launched: Future[Any] = Future()
        self._bringer = ThreadPoolExecutor(1)
        self.may_go_in_parts = True

    def goes_in_parts(self, given: Any) -> bool:
        model = self._model
        return isinstance(model, SuperModel) and not all(model.is_resident(n) for n, _ in given)

    def begin(self, given: Any, stream: Any) -> list[Any]:
        self._given, self._parts = given, []
        names = [name for name, _ in given]
        return [Written(lambda: self._model.bring(names), self._bringer), Nothing()]

    def launch(self, requests: Sequence[tuple[str, Arrays]], stream: Any, **_: Any) -> None:
        self._noted.append((self._count, len(requests)))
        self._launched = self._worker.submit(lambda: self._model.run(requests))

    def is_done(self) -> bool:
        return self._launched.done() and bool(self._launched.result())

    def wait(self) -> None:
        self._launched.result()

    def secs(self) -> float:
        return 1e-4 * (1 + self._count)

    def read(self) -> Any:
        return self._launched.result()


class FakeCudaGroup:
    """A model for tenants whose lanes run on the CPU."""

    def __init__(self, model: SuperModel | BatchedModel, launched: list[tuple[int, int]]) -> None:
        self._model, self._launched = model, launched
        self.own, self.counts = model.own, model.counts
        self.add, self.bring, self.run = model.add, model.bring, model.run
        self.limit_weights = model.limit_weights

    @property
    def brought(self) -> int:
        return self._model.brought

    def staged_lanes(self, stream: int, count: int = 1) -> dict[int, tuple[FakeLanes, ...]]:
        worker = ThreadPoolExecutor(1)
        return {
            lanes: tuple(
                FakeLanes(self._model, lanes, worker, self._launched) for _ in range(count)
            )
            for lanes in self.counts
        }


class FakeContexts:
    """Parts without a driver, and the streams that were made of them."""

    def __init__(self) -> None:
        self.of_stream: dict[int, Part] = {}
        self.is_closed = False

    def cut(self, names_and_pcts: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
        counts = units_of(names_and_pcts, sms=132, unit=2)
        names = (name for name, _ in names_and_pcts)
        return tuple(
            Part(name, 2 * count, frozenset()) for name, count in zip(names, counts, strict=True)
        )

    def stream(self, part: Part) -> int:
        self.of_stream[len(self.of_stream) + 1] = part
        return len(self.of_stream)

    def close(self) -> None:
        self.is_closed = True


def fake_cuda_place(
    script: Script, *, goes_in_parts: bool = False, **more: Any
) -> CudaStreamsPlace:
    """Return a place whose members do on their streams what a script says.

    goes_in_parts: the inputs and outputs of all of them.
    """

    def open_model(path: Path) -> FakeCudaModel:
        return FakeCudaModel(script.open_model(path), goes_in_parts=goes_in_parts)

    return CudaStreamsPlace(FakeGpu(), open_model, **more)
