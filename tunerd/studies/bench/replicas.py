"""Artifacts side by side in the slices of one device, in rounds that begin at one moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from tunerd.errors import InfrastructureError
from tunerd.runner.work import Ran, Work
from tunerd.slices import member, require_plan
from tunerd.slices.base import Plan, Slice
from tunerd.studies.bench.bench import Condition, Round
from tunerd.vocabulary import CapProof, Failure, SliceRequest, SliceSpec

_T = TypeVar("_T")

ROUNDS = 10  # of each condition; the interval of the slow-down is of their medians
_LEAST_REPEATS = 3  # of the slowest work in a round
_TRIES = 5  # of a round: where others keep the cores busy, slices may miss each other
_LEAD_SECS = 0.02  # for each slice to hear when to begin


@dataclass(frozen=True)
class Cast:
    """Who runs what: the first replica measures alone, too."""

    replicas: tuple[Slice, ...]
    others: tuple[Slice, ...] = ()


def slices_of_a_device(kind: str, pct: int) -> tuple[Plan, tuple[SliceSpec, ...]]:
    """Plan the slices of the first device; HostError where there is none of this kind."""
    planned = require_plan(SliceRequest(kind, pct))
    first = planned.slices[0]
    specs = tuple(s for s in planned.slices if s.device_index == first.device_index)
    return planned, specs


@contextlib.contextmanager
def started(specs: Sequence[SliceSpec]) -> Iterator[tuple[tuple[Slice, ...], tuple[CapProof, ...]]]:
    """Start slices together and yield them with what each has proved; close them together."""
    slices = tuple(member(s.kind)(s) for s in specs)
    try:
        yield slices, tuple(_at_once(lambda each: each.start(), slices))
    finally:
        _at_once(lambda each: each.close(), slices)


def _at_once(call: Callable[[Slice], _T], slices: Sequence[Slice]) -> list[_T]:
    """Call for each slice in a thread of its own; all have ended when this returns or raises."""
    with ThreadPoolExecutor(max(1, len(slices))) as pool:
        return list(pool.map(call, slices))


@contextlib.contextmanager
def started_at(
    specs: Mapping[int, SliceSpec],
) -> Iterator[dict[int, tuple[Slice, CapProof]]]:
    """Start a slice of each share of one device together, and yield them by share.

    The shares may come to more than the device: at most one of the slices may work at a time. An
    idle one holds memory, and neither SMs nor cores.
    """
    named = [replace(spec, slice_id=f"{spec.slice_id}-{pct}") for pct, spec in specs.items()]
    with started(named) as (slices, proofs):
        yield dict(zip(specs, zip(slices, proofs, strict=True), strict=True))


def make_ready(each: Slice, work: Work) -> float:
    """Have a slice load its work; return the seconds of a repeat."""
    secs = each.ready(work)
    if isinstance(secs, Failure):
        what = work.artifact or "the neighbours' load"
        raise InfrastructureError(f"{what} does not run in {each.spec.slice_id}: {secs.message}")
    return secs


def run_rounds(
    cast: Cast,
    *,
    duration_secs: float,
    slowest_secs: float,
    say: Callable[[str], None],
    rounds: int = ROUNDS,
) -> list[Round]:
    """Have slices that are ready work, alone and all together in turns.

    Args:
        duration_secs: of each condition; more where a round would hold too few repeats.
        slowest_secs: of the slowest work's repeat.

    Raises InfrastructureError where slices fail, or never get to work at the same time.
    """
    round_secs = max(duration_secs / rounds, _LEAST_REPEATS * slowest_secs)
    with_others = len(cast.replicas) + len(cast.others) > 1
    found = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}, {round_secs:.2g} s each")
        found.append(_usable_round(Condition.ALONE, Cast(cast.replicas[:1]), round_secs))
        if with_others:
            found.append(_usable_round(Condition.BESIDE, cast, round_secs))
    return found


def _usable_round(condition: Condition, cast: Cast, secs: float) -> Round:
    """Run a round until it tells something, twice as long each time."""
    for _ in range(_TRIES):
        found = _round(condition, cast, secs)
        if not found.problem:
            return found
        secs *= 2
    raise InfrastructureError(
        f"{found.problem}, in a round of {secs / 2:.2g} s; see what else keeps this machine busy, "
        "or give a longer --duration"
    )


def _round(condition: Condition, cast: Cast, secs: float) -> Round:
    everybody = (*cast.replicas, *cast.others)
    start_at = time.monotonic() + _LEAD_SECS * len(everybody)
    for each in everybody:
        each.begin(start_at, start_at + secs)
    ended = [each.end() for each in everybody]  # of all, also where one has failed
    rans: list[Ran] = []
    for each, ran in zip(everybody, ended, strict=True):
        if isinstance(ran, Failure):
            raise InfrastructureError(f"{each.spec.slice_id} failed in a round: {ran.message}")
        rans.append(ran)
    count = len(cast.replicas)
    return Round(condition, tuple(rans[:count]), tuple(rans[count:]))
