"""Groups in launches, each in a slice of its own, beside other models' lanes.

An entry of which launches of several requests were measured is a group: several models of one
architecture, or one that has batches. All of its members are in one lane, which takes up to
`together` of their requests in a launch; the other models are in lanes as ever. Such lanes are
columns of the same integer program, so that the answer is the best of them, or has a gap to a
bound where the time of the search ends first. Under the policy that serves this, whoever may share
launches does, up to one number for all: so all groups of a placement have them. A group in several
slices beside a lane is not considered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tunerd.colocation.planning.columns import (
    Column,
    Kind,
    columns_of,
    columns_with,
    kinds_of,
)
from tunerd.colocation.planning.placement import WHOLE, Forecast, Subject
from tunerd.colocation.planning.search import EXACT_SECS, Searched, exact
from tunerd.colocation.planning.world import World


def launches_beside_lanes(
    world: World,
    *,
    shares: Sequence[int],
    together: Sequence[int],
    clock: Callable[[], float] = time.monotonic,
    limit_secs: float = EXACT_SECS,
) -> Searched | None:
    """Return the best placement with groups in launches beside others' lanes.

    Args:
        shares: that lanes may have, in percent.
        together: how many requests of a group may be in a launch.
        limit_secs: of the search, over all sizes of launches.

    None where there is no group with a measured launch, nothing else beside it, or no room.
    """
    allowed = [share for share in sorted({*shares}) if share < WHOLE]  # for two lanes at least
    groups, others = _groups(world, allowed)
    if not groups or len(groups) + len(others) < 2:
        return None
    whole = [(tuple(subject.name for subject in group),) for group in groups]
    kinds = (*whole, *kinds_of(others))
    measured = {count for group in groups for count in _launches_of(world, group, allowed)}
    sizes = sorted(measured & {*together}, reverse=True)
    bounds = {size: _bound(world, kinds, len(whole), allowed, size) for size in sizes}
    left = set(sizes)  # of which not all placements were considered
    until = clock() + limit_secs
    best: Forecast | None = None
    # Few lanes first, of all sizes: what is found there leaves few of the others to look at.
    turns = [(lanes, size) for lanes in (_few, columns_of) for size in sizes]
    for nth, (lanes, size) in enumerate(turns):
        if best is not None and clock() > until:
            break
        launched = columns_with(
            world, kinds, _one_of(kinds, range(len(whole))), allowed, size, around=size
        )
        beside = lanes(world, kinds[len(whole) :], allowed, around=size)
        if beside is None:
            continue
        none = (0,) * len(whole)
        columns = launched + [replace(each, counts=none + each.counts) for each in beside]
        left_secs = max(0.0, until - clock()) / (len(turns) - nth)
        found = exact(world, kinds, columns, best, bounds[size], clock=clock, limit_secs=left_secs)
        best = found.best
        if lanes is columns_of:
            bounds[size] = found.bound
            if found.is_exact:
                left.remove(size)
    if best is None:
        return None
    return Searched(best, None, min(best.score, *bounds.values()), is_exact=not left)


def _bound(
    world: World, kinds: Sequence[Kind], groups: int, shares: Sequence[int], size: int
) -> float:
    """Return what the worst score is at least, by what each has in a lane of its own.

    kinds: groups first.
    """
    scores = [
        min(
            (
                world.least_score(
                    frozenset(kind[0]), share, size if nth < groups else 1, around=size
                )
                for share in shares
            ),
            default=math.inf,
        )
        for nth, kind in enumerate(kinds)
    ]
    return max(scores)


def _groups(world: World, shares: Sequence[int]) -> tuple[list[tuple[Subject, ...]], list[Subject]]:
    """Return the members of each group, and who is in none."""
    entries: dict[str, list[Subject]] = {}
    for subject in world.subjects.values():
        entries.setdefault(subject.of, []).append(subject)
    groups, others = [], []
    for members in entries.values():
        if _launches_of(world, members, shares):
            groups.append(tuple(members))
        else:
            others += members
    return groups, others


def _launches_of(world: World, members: Sequence[Subject], shares: Sequence[int]) -> set[int]:
    """Return how many requests of an entry's members were measured in a launch, from two on."""
    first = members[0]
    counts = {count for share in shares for count in world.curves.together(first.of, share)}
    return {count for count in counts if count > 1 and (first.has_batches or count <= len(members))}


def _few(
    world: World, kinds: Sequence[Kind], shares: Sequence[int], *, around: int
) -> list[Column] | None:
    """Return the lanes of one member, and those of all."""
    everyone = [tuple(map(len, kinds))] if kinds else []
    counts = [*_one_of(kinds, range(len(kinds))), *everyone]
    return columns_with(world, kinds, counts, shares, around=around)


def _one_of(kinds: Sequence[Kind], of: range) -> Iterator[tuple[int, ...]]:
    """Yield the counts of lanes for one of a kind alone, for each of these kinds."""
    for nth in of:
        yield tuple(int(place == nth) for place in range(len(kinds)))
