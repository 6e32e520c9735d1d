"""Who runs beside whom in a placement, and so which pairs a plan rests on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tunerd.colocation.planning.placement import Placement, Resident
from tunerd.colocation.planning.world import World


def neighbours(placement: Placement, world: World) -> Iterator[tuple[Resident, Resident]]:
    """Yield who runs beside whom at which shares; of slices that serve everyone one of an entry."""
    lanes = placement.lanes
    if placement.kind == "space-time":
        chosen = itertools.combinations_with_replacement(world.residents(lanes[0]), 2)
        yield from chosen if len(lanes) > 1 else ()
        return
    for first, second in itertools.combinations(lanes, 2):
        yield from itertools.product(world.residents(first), world.residents(second))
