"""Mixes that nobody measured: curves by a law, pairs by a law, and every placement there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tunerd.colocation.planning.curves import Curves, Point
from tunerd.colocation.planning.pairs import Pair, Pairs, Side
from tunerd.colocation.planning.placement import Lane, Subject
from tunerd.colocation.planning.search import lanes_of
from tunerd.colocation.planning.world import World
from tunerd.vocabulary.verdict import Interval

DEVICE = "a device"
SHARES = (25, 50, 100)


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def point(of: str, share: int, secs: float, *, together: int = 1) -> Point:
    return Point(of, share, together, share, exactly(secs), secs, "a law")


def side(name: str, share: int, *, together: int = 1) -> Side:
    return Side(name, name, share, {}, together)


def pair(one: str, a: int, two: str, b: int, slowdown: float) -> Pair:
    return Pair(side(one, a), side(two, b), DEVICE, exactly(slowdown), "a law")


def world_of(
    subjects: Sequence[Subject],
    secs: Mapping[str, Mapping[int, float]],
    *,
    slowdown: Callable[[str, int, str, int], float] | None = None,
    busy: float = 0.9,
    memory_bytes: int | None = None,
) -> World:
    """Return a world in which each member takes `secs` at each share."""
    points = [point(name, s, value) for name, of in secs.items() for s, value in of.items()]
    pairs = [
        pair(a.name, s, b.name, t, slowdown(a.name, s, b.name, t))
        for a in subjects
        for b in subjects
        for s in secs[a.name]
        for t in secs[b.name]
        if slowdown is not None
    ]
    return World(
        subjects, Curves(points), Pairs(pairs, DEVICE), busy=busy, memory_bytes=memory_bytes
    )


def partitions(names: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Yield every way to put names into lanes."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    for found in partitions(rest):
        yield [(first,), *found]
        for nth, group in enumerate(found):
            yield [*found[:nth], (first, *group), *found[nth + 1 :]]


def every_placement(world: World, shares: Sequence[int]) -> Iterator[list[Lane]]:
    """Yield every placement in lanes of these shares that has a point for each member."""

    def with_shares(groups: list[tuple[str, ...]], left: int) -> Iterator[list[Lane]]:
        if not groups:
            yield []
            return
        for share in shares:
            if share <= left and all(world.point(n, share) for n in groups[0]):
                for more in with_shares(groups[1:], left - share):
                    yield [Lane(share, tuple(sorted(groups[0]))), *more]

    for groups in partitions(list(world.subjects)):
        yield from with_shares(groups, 100)


def best_score(world: World, shares: Sequence[int]) -> float:
    """Return the best score of all placements, by looking at each."""
    return min(
        (world.forecast(lanes_of(lanes)).score for lanes in every_placement(world, shares)),
        default=float("inf"),
    )
