"""Which shares this host can give, and in which order a round visits them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.slices import member, plan, require_plan
from tunerd.studies.profile.subject import Subject
from tunerd.vocabulary import SliceRequest, SliceSpec, TargetSpec
from tunerd.vocabulary.slices import Mps

WHOLE = 100  # percent: what every other share is compared with
SHARES = tuple(range(10, WHOLE + 1, 10))


@dataclass(frozen=True)
class Shares:
    """The shares of the first device of a kind."""

    kind: str
    specs: tuple[tuple[int, SliceSpec], ...]  # one slice for each share, the smallest first
    target: TargetSpec  # of the whole device
    left_out: tuple[tuple[int, str], ...]  # shares that this host cannot give, and why

    @property
    def pcts(self) -> tuple[int, ...]:
        return tuple(pct for pct, _ in self.specs)


def slice_kind_for(subject: Subject, *, gpu: bool = False, cpu: bool = False) -> str:
    """Return the kind of slices that a subject is profiled in, on the device that is asked for.

    Without one: on that for which an artifact is compiled, and on a GPU where this host has one.
    """
    if gpu or cpu:
        return "mps" if gpu else "cpu"
    if subject.target_kind:
        return "mps" if subject.target_kind == "cuda" else "cpu"
    return "mps" if member("mps").usability().ok else "cpu"


def plan_shares(kind: str, pcts: Sequence[int], *, mps: Mps = "own") -> Shares:
    """Plan a slice of each share, and one of the whole device; HostError where that is not had."""
    whole = require_plan(SliceRequest(kind, WHOLE, per_device=1, mps=mps))
    specs: list[tuple[int, SliceSpec]] = []
    left_out: list[tuple[int, str]] = []
    for pct in sorted({*pcts, WHOLE}):
        planned = plan(SliceRequest(kind, pct, per_device=1, mps=mps))
        if planned.problem:
            left_out.append((pct, planned.problem))
        else:
            specs.append((pct, planned.slices[0]))
    return Shares(kind, tuple(specs), whole.target, tuple(left_out))


def order_of(round_number: int, pcts: Sequence[int], *, seed: int) -> tuple[int, ...]:
    """Return the shares of a round in an order of its own.

    By the round and the seed alone, so that a profile that goes on keeps its order: a device that
    grows warm, or a neighbour that comes, is no property of the shares that are visited late.
    """
    shuffled = sorted(pcts)
    random.Random(f"{seed} {round_number}").shuffle(shuffled)
    return tuple(shuffled)
