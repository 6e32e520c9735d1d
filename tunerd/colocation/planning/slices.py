"""Groups in launches, each in a slice of its own, beside other models' lanes.

An entry with several members of which launches were measured is a group. All of its members are in
one lane, which takes up to `together` of their requests in a launch; the other models are in lanes
as ever. Such lanes are columns of the same integer program, so that the answer is the best of them,
within the time of a search. All groups of a placement have launches of the same size at most, as
the policy has. A group in several slices beside a lane is not considered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from tunerd.colocation.planning.placement import WHOLE, Forecast, Lane, Subject, World
from tunerd.colocation.planning.search import (
    EXACT_SECS,
    MOST_COLUMNS,
    Column,
    exact,
    lanes_without_launches,
)


def launches_beside_lanes(
    world: World,
    *,
    shares: Sequence[int],
    together: Sequence[int],
    clock: Callable[[], float] = time.monotonic,
    limit_secs: float = EXACT_SECS,
) -> Forecast | None:
    """Return the best placement with groups in launches beside others' lanes.

    Args:
        shares: that lanes may have, in percent.
        together: how many members of a group may be in a launch.
        limit_secs: of the search, over all sizes of launches.

    None where there is no group with a measured launch, nothing else beside it, or no room.
    """
    allowed = sorted({*shares, WHOLE})
    groups, others = _groups(world, allowed)
    if not groups or len(groups) + len(others) < 2:
        return None
    beside = _lanes_of(world, [subject.name for subject in others], allowed)
    measured = {
        count
        for members in groups
        for share in allowed
        for count in world.curves.together(members[0].of, share)
    }
    until = clock() + limit_secs
    found: list[Forecast] = []
    for size in sorted(measured & {*together} - {1}):
        if found and clock() > until:
            break
        columns = [
            column for members in groups for column in _launched(world, members, allowed, size)
        ]
        best = exact(
            world, columns + beside, None, 0.0, clock=clock, limit_secs=max(0.0, until - clock())
        ).best
        if best is not None:
            found.append(best)
    return min(found, key=lambda each: (bool(each.problems), each.score), default=None)


def _groups(world: World, shares: Sequence[int]) -> tuple[list[tuple[Subject, ...]], list[Subject]]:
    """Return the members of each group, and who is in none."""
    entries: dict[str, list[Subject]] = {}
    for subject in world.subjects.values():
        entries.setdefault(subject.of, []).append(subject)
    groups, others = [], []
    for of, members in entries.items():
        sizes = {count for share in shares for count in world.curves.together(of, share)}
        if any(1 < size <= len(members) for size in sizes):
            groups.append(tuple(members))
        else:
            others += members
    return groups, others


def _launched(
    world: World, members: Sequence[Subject], shares: Sequence[int], size: int
) -> list[Column]:
    """Return the lanes that a group may have, with launches of this size at most."""
    names = tuple(sorted(subject.name for subject in members))
    return [
        (score, Lane(share, names, size))
        for share in shares
        if share < WHOLE  # others are to have a lane, too
        and math.isfinite(score := world.lane_score(frozenset(names), share, size))
    ]


def _lanes_of(world: World, names: Sequence[str], shares: Sequence[int]) -> list[Column]:
    """Return the lanes that others may have: of many, those of one member or of all."""
    if len(names) <= 30 and ((1 << len(names)) - 1) * len(shares) <= MOST_COLUMNS:
        return lanes_without_launches(world, names, shares)
    return [
        (score, Lane(share, members))
        for members in (*((name,) for name in names), tuple(names))
        for share in shares
        if math.isfinite(score := world.lane_score(frozenset(members), share))
    ]
