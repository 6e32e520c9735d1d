"""Lanes of this machine's cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tunerd.colocation.work import Lane
from tunerd.errors import HostError
from tunerd.slices.cpu import core_groups, cut_cores
from tunerd.system import host


def cut(lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """Give each lane cores: those that the plan names, all of them, or its share, rounded down.

    Shares are disjoint and have no physical core in common. Raises HostError where they do not fit.
    """
    facts = host.facts()
    groups = core_groups(facts)
    usable = tuple(core for group in groups for core in group)
    for lane in lanes:
        if missing := sorted(set(lane.cores) - set(facts.cores)):
            raise HostError(
                f"{lane.name} is to have core {missing[0]}, which this process may not use; it may "
                f"use {', '.join(map(str, facts.cores))}"
            )
    parts = [lane for lane in lanes if not lane.cores and lane.pct < 100]
    sizes = [len(usable) * lane.pct // 100 for lane in parts]
    for lane, size in zip(parts, sizes, strict=True):
        if size < 1:
            raise HostError(
                f"{lane.pct}% of {len(usable)} core(s) for {lane.name} is less than one core; give "
                f"it at least {-(-100 // len(usable))}%, or choose the policy time or streams"
            )
    sets = cut_cores(groups, sizes)
    if len(sets) < len(sizes):
        raise HostError(
            f"{len(sets)} of {len(sizes)} shares fit into {len(usable)} core(s) without two of "
            "them on one core; make the shares smaller"
        )
    given = dict(zip((lane.name for lane in parts), sets, strict=True))
    return tuple(replace(x, cores=x.cores or given.get(x.name, usable)) for x in lanes)
