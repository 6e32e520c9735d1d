"""Who runs beside whom in a placement, and so which pairs a plan rests on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tunerd.colocation.planning.pairs import Side
from tunerd.colocation.planning.placement import Placement, Subject, World

Runs = tuple[Side, tuple[Subject, ...]]  # one member, or those that share a launch


def neighbours(placement: Placement, world: World) -> Iterator[tuple[Runs, Runs]]:
    """Yield who runs beside whom at which shares; of slices that serve everyone one of an entry."""
    if placement.kind == "space-time":
        sides = world.sides_in(placement.lanes[0])
        chosen = itertools.combinations_with_replacement(sides, 2)
        yield from chosen if len(placement.lanes) > 1 else ()
        return
    for first, second in itertools.combinations(placement.lanes, 2):
        yield from itertools.product(world.sides_in(first), world.sides_in(second))
