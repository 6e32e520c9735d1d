"""Slices of one device of this host: planned, started together, and what is timed in them. No Ray.

A study plans its slices, starts those of a round at once, because a start takes longer than what is
measured, and then times artifacts: in turns in one slice, or repeated in several at the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from tunerd.errors import InfrastructureError
from tunerd.runner.base import Runner
from tunerd.runner.load import Load, Repeats
from tunerd.slices import member, require_plan
from tunerd.slices.base import Plan, Slice
from tunerd.vocabulary import CapProof, Failure, Measurement, SliceRequest, SliceSpec

_T = TypeVar("_T")
_LEAD_SECS = 0.02  # for each slice to hear when to begin


@dataclass(frozen=True)
class StartedSlice:
    """A slice that has started, its runner, and what it has proved."""

    slice: Slice
    runner: Runner
    proof: CapProof

    @classmethod
    def of(cls, one: Slice) -> StartedSlice:
        """Start a slice."""
        return cls(one, one.launch(), one.prove())

    @property
    def slice_id(self) -> str:
        return self.slice.spec.slice_id

    @property
    def pct(self) -> int:
        return self.slice.spec.pct


def slices_of_a_device(kind: str, pct: int) -> tuple[Plan, tuple[SliceSpec, ...]]:
    """Plan the slices of the first device; HostError where there is none of this kind."""
    found = require_plan(SliceRequest(kind, pct))
    first = found.slices[0]
    return found, tuple(s for s in found.slices if s.device_index == first.device_index)


@contextlib.contextmanager
def started(specs: Sequence[SliceSpec]) -> Iterator[tuple[StartedSlice, ...]]:
    """Start slices together and yield them; close them together."""
    slices = tuple(member(s.kind)(s) for s in specs)
    try:
        yield tuple(_at_once(StartedSlice.of, slices))
    finally:
        _at_once(lambda each: each.close(), slices)


def _at_once(call: Callable[[Slice], _T], slices: Sequence[Slice]) -> list[_T]:
    """Call for each slice in a thread of its own; all have ended when this returns or raises."""
    with ThreadPoolExecutor(max(1, len(slices))) as pool:
        return list(pool.map(call, slices))


@contextlib.contextmanager
def started_at(specs: Mapping[int, SliceSpec]) -> Iterator[dict[int, StartedSlice]]:
    """Start a slice of each share of one device together, and yield them by share.

    The shares may come to more than the device: at most one of the slices may work at a time. An
    idle one holds memory, and neither SMs nor cores.
    """
    named = [replace(spec, slice_id=f"{spec.slice_id}-{pct}") for pct, spec in specs.items()]
    with started(named) as slices:
        yield dict(zip(specs, slices, strict=True))


def require_measured(
    results: Sequence[Measurement | Failure], names: Sequence[str], slice_id: str
) -> list[Measurement]:
    """Return the results of whole models; InfrastructureError, by its name, where one failed."""
    for name, result in zip(names, results, strict=True):
        if isinstance(result, Failure):
            raise InfrastructureError(f"{name} does not run in {slice_id}: {result.message}")
    return [result for result in results if isinstance(result, Measurement)]


def load_in(one: StartedSlice, load: Load, *, name: str = "") -> float:
    """Have a slice make a load ready; return the seconds of a repeat.

    Raises InfrastructureError, which calls the load by its name, where it does not run.
    """
    secs = one.runner.load(load)
    if isinstance(secs, Failure):
        what = name or load.artifact or "the neighbours' load"
        raise InfrastructureError(f"{what} does not run in {one.slice_id}: {secs.message}")
    return secs


def repeat_together(slices: Sequence[StartedSlice], secs: float) -> list[Repeats]:
    """Have slices repeat what they have loaded, all between the same two moments.

    Raises InfrastructureError where one fails, once all have ended.
    """
    start_at = time.monotonic() + _LEAD_SECS * len(slices)
    for each in slices:
        each.runner.repeat(start_at, start_at + secs)
    ended = [each.runner.stop() for each in slices]  # of all, also where one has failed
    for each, repeats in zip(slices, ended, strict=True):
        if isinstance(repeats, Failure):
            raise InfrastructureError(f"{each.slice_id} failed in a round: {repeats.message}")
    return [repeats for repeats in ended if isinstance(repeats, Repeats)]
