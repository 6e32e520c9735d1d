"""The contract of a candidate source: a way to make kernels of a task.

A source knows which tasks it takes and what its recipes mean; it has no state. What one tuner
searches of it is a `Search`, which has. A source stands below the builder and therefore builds
nothing: it returns a `LoweredKernel`, which the builder makes a library of.

To add one: a file or folder here with a member of `CandidateSource`, and a line in `registry`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from tunerd.vocabulary import (
    Candidate,
    Layout,
    LibraryCall,
    Proposal,
    Result,
    TargetSpec,
    Task,
    TensorSpec,
    TrainingRow,
    TransferredResults,
)

if TYPE_CHECKING:
    from tvm.ir import IRModule

ENTRY = "main"  # the function that every library exports
BATCH = 8  # candidates that are asked for at once
CACHED_TASKS = 512  # of which a process knows what it has found of them


@dataclass(frozen=True)
class DeviceKernel:
    """Machine code of a GPU that TVM did not make: one kernel, called by its symbol.

    Host code calls it as a packed function: its parameters, then the grid's x, y and z, the threads
    of a block and the bytes of dynamic shared memory.
    """

    symbol: str  # no other kernel of any model has it
    cubin: bytes = field(repr=False)
    types: tuple[str, ...]  # of its parameters: "handle", "tensormap", "int32" or "int64"
    compiler: str


@dataclass(frozen=True)
class LoweredKernel:
    """What is compiled for a candidate.

    `mod` has one function, ENTRY, that takes the task's arguments in order and then `scratch`. It
    needs no schedule any more: it has loops that TVM makes code of, or host code that launches
    `kernels` or makes the `calls` of libraries.

    Where `lanes` is None it is the kernel of one model, of which the builder makes that of several;
    else it is that of so many already, and takes what `in_lanes` says.

    Scratch is memory that a call needs and nobody reads afterwards. What is of integers is zero
    when a call begins, and each call leaves it so; all calls on one stream may share it.
    """

    mod: IRModule
    kernels: tuple[DeviceKernel, ...] = ()
    scratch: tuple[TensorSpec, ...] = ()
    calls: tuple[LibraryCall, ...] = ()
    casts: tuple[tuple[int, str], ...] = ()  # weights that it takes in another type than the task
    layouts: tuple[tuple[int, Layout], ...] = ()  # weights that it takes in one of its own
    lanes: int | None = None

    @property
    def symbol(self) -> str:
        """What its host code launches or calls, for names; empty where TVM makes its code."""
        of_kernels = (kernel.symbol for kernel in self.kernels)
        return next(of_kernels, next((call.library for call in self.calls), ""))


def taken(
    args: Sequence[TensorSpec],
    casts: Sequence[tuple[int, str]],
    layouts: Sequence[tuple[int, Layout]],
) -> tuple[TensorSpec, ...]:
    """Return a task's arguments as a kernel takes them that has these of LoweredKernel."""
    types, own = dict(casts), dict(layouts)
    return tuple(
        replace(
            spec,
            dtype=types.get(i, spec.dtype),
            shape=own[i].shape if i in own else spec.shape,
        )
        for i, spec in enumerate(args)
    )


@dataclass(frozen=True)
class SearchSettings:
    """What a tuner tells the searches in it."""

    seed: int
    threads: int
    island_number: int = 0  # of the tuner: others search the same tasks with other numbers
    sms: int | None = None  # of the share of a GPU that is searched for, where that is known


class Search(ABC):
    """What one tuner searches of one source, with all that it has been told."""

    @abstractmethod
    def learn(self, transferred: Sequence[TransferredResults], tasks: Mapping[str, Task]) -> None:
        """Take in what other runs measured; `tasks` are this run's, by their ids."""

    @abstractmethod
    def propose(
        self,
        task: Task,
        count: int,
        *,
        results: Sequence[Result] = (),
        exclude: Collection[str] = (),
        rows: Sequence[TrainingRow] = (),
    ) -> Proposal:
        """Learn from what is told, then return at most `count` new candidates of `task`.

        Equal settings and equal calls give equal candidates. Whatever goes wrong is the proposal's
        message; a source raises nothing here.

        Args:
            results: of the task and source, that were not told here yet.
            exclude: ids of candidates that are under way elsewhere.
            rows: results of any task and this source, that were not told here yet.
        """

    def lowered(self, candidate: Candidate) -> LoweredKernel | None:
        """Return the kernel of a candidate where it is at hand from proposing it, else None."""
        return None


class CandidateSource(ABC):
    """A member of the family. `name` is in each candidate and record: it never changes."""

    name: ClassVar[str]

    def imports(self, target: TargetSpec) -> tuple[str, ...]:
        """Name the modules that searching and lowering for a target import sooner or later."""
        return ()

    def takes(self, task: Task) -> str | None:
        """Say why the source has no candidates of a task, None where it may have some."""
        return None

    @abstractmethod
    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        """Return what a recipe means; raises anything for one that says nothing of the task.

        lanes: for which a source that has kernels made makes them (`LoweredKernel.lanes`).
        """

    @abstractmethod
    def search(self, settings: SearchSettings) -> Search:
        """Return a search that was told nothing yet."""


def module_of(task: Task) -> IRModule:
    """Return the task's unscheduled module, which is shared: nobody may change it."""
    return _module(task.mod_json)


@functools.lru_cache(CACHED_TASKS)
def _module(mod_json: str) -> IRModule:
    import tvm

    return tvm.ir.load_json(mod_json)
