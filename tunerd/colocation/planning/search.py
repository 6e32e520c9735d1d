"""Which lanes, of which shares, with which members: greedy, then exact, and the gap between them.

A lane is a column: its members, its share, and what the score of its worst member is at least, by
the least that each of the others may cost it. Columns that have each member once and are 100% at
most in all are a placement; the one whose worst column is least bad is an integer program (set
partitioning with a minimax objective), which HiGHS solves through scipy.optimize.milp (columns.py).
Neighbours cost no less, so that its value is a bound; a placement whose full score is above the
bound is cut off and the next one asked for, until the bound meets the best that was found
(combinatorial Benders cuts: Hooker and Ottosson, Math. Program. 96, 2003). Where that does not end
in time, the gap to the bound is what is stated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunerd.colocation.planning.columns import Column, Kind, Program, columns_of, kinds_of
from tunerd.colocation.planning.placement import WHOLE, Forecast, Lane, Placement
from tunerd.colocation.planning.world import World

EXACT_SECS = 5.0
_LEAST_SECS = 0.1  # of a solution
_CLOSE = 1e-9


@dataclass(frozen=True)
class Searched:
    """The best placement in lanes that was found, and how far it may be from the best there is."""

    best: Forecast | None  # None where a member has no share at which it was measured
    greedy: Forecast | None  # None as well where no search was
    bound: float  # no placement has a lower score
    is_exact: bool  # whether all placements were considered

    @property
    def gap(self) -> float:
        """Return by what part of the bound the best score may lie above the least there is."""
        if self.best is None or not math.isfinite(self.best.score):
            return math.inf
        return max(0.0, self.best.score / self.bound - 1) if self.bound > 0 else 0.0

    @property
    def greedy_gap(self) -> float:
        if self.greedy is None or self.best is None:
            return math.inf
        return max(0.0, self.greedy.score / self.best.score - 1)


def search(
    world: World,
    *,
    shares: Sequence[int],
    clock: Callable[[], float] = time.monotonic,
    limit_secs: float = EXACT_SECS,
) -> Searched:
    """Return the best placement of members in lanes of these shares, one after another among them.

    Of placements that fit into the memory, and of all where none does.
    """
    allowed = sorted({*shares, WHOLE})
    first = greedy(world, allowed)
    alone = {
        name: min(world.lane_score(frozenset([name]), share) for share in allowed)
        for name in world.subjects
    }
    bound = max(alone.values())
    kinds = kinds_of(world.subjects.values())
    columns = columns_of(world, kinds, allowed)
    if columns is None:
        return Searched(first, first, bound, False)
    return exact(world, kinds, columns, first, bound, clock=clock, limit_secs=limit_secs)


def lanes_of(lanes: Sequence[Lane]) -> Placement:
    """Return lanes as a placement: a single one of the whole device is one after another."""
    kept = tuple(sorted(lanes, key=lambda lane: (-lane.share, lane.members)))
    is_time = len(kept) == 1 and kept[0].share == WHOLE
    return Placement("time" if is_time else "space", kept)


def greedy(world: World, shares: Sequence[int]) -> Forecast | None:
    """Start with a lane for each at its least share that does, join and shrink, then grow."""
    lanes: list[Lane] = []
    for name in world.subjects:
        scores = {share: world.lane_score(frozenset([name]), share) for share in shares}
        known = [share for share, score in scores.items() if math.isfinite(score)]
        fits = [share for share in known if scores[share] <= 1]
        if not known:
            return _whole(world, shares)
        lanes.append(Lane(fits[0] if fits else min(known, key=scores.__getitem__), (name,)))
    while sum(lane.share for lane in lanes) > WHOLE:
        smaller = _smaller(world, lanes, shares)
        if smaller is None:
            return _whole(world, shares)
        lanes = smaller
    while (larger := _larger(world, lanes, shares)) is not None:
        lanes = larger
    found = world.forecast(lanes_of(lanes))
    whole = _whole(world, shares)
    return found if whole is None or found.score <= whole.score else whole


def _whole(world: World, shares: Sequence[int]) -> Forecast | None:
    names = tuple(world.subjects)
    if not math.isfinite(world.lane_score(frozenset(names), WHOLE)) and any(
        world.point(name, WHOLE) is None for name in names
    ):
        return None
    return world.forecast(Placement("time", (Lane(WHOLE, names),)))


def _smaller(world: World, lanes: list[Lane], shares: Sequence[int]) -> list[Lane] | None:
    """Return lanes that take less in all, with the least bad score: one shrunk, or two joined."""
    score = {lane: world.lane_score(frozenset(lane.members), lane.share) for lane in lanes}
    easiest = min(lanes, key=lambda lane: score[lane])
    options: list[tuple[float, int, list[Lane]]] = []

    def offer(gone: Sequence[Lane], new: Lane) -> None:
        saved = sum(lane.share for lane in gone) - new.share
        value = world.lane_score(frozenset(new.members), new.share)
        if saved > 0 and math.isfinite(value):
            options.append((value, -saved, [*(x for x in lanes if x not in gone), new]))

    for lane in lanes:
        for share in shares:
            offer([lane], Lane(share, lane.members))
            if lane is not easiest:
                offer([lane, easiest], Lane(share, lane.members + easiest.members))
    return min(options, key=lambda option: option[:2])[2] if options else None


def _larger(world: World, lanes: list[Lane], shares: Sequence[int]) -> list[Lane] | None:
    """Return lanes in which the worst has more, where there is room and it helps."""
    room = WHOLE - sum(lane.share for lane in lanes)
    worst = max(lanes, key=lambda lane: world.lane_score(frozenset(lane.members), lane.share))
    now = world.lane_score(frozenset(worst.members), worst.share)
    for share in shares:
        if worst.share < share <= worst.share + room and (
            world.lane_score(frozenset(worst.members), share) < now
        ):
            return [*(lane for lane in lanes if lane is not worst), Lane(share, worst.members)]
    return None


def exact(
    world: World,
    kinds: Sequence[Kind],
    columns: Sequence[Column],
    first: Forecast | None,
    bound: float,
    *,
    clock: Callable[[], float],
    limit_secs: float,
) -> Searched:
    """Return the best placement of these lanes in which each member has one.

    Args:
        kinds, columns: members, and the lanes that they may have.
        first: a placement that was found before, by greedy search.
        bound: no placement has a lower score.
    """
    if not columns:
        return Searched(first, first, bound, True)
    program = Program(kinds, columns)
    best, until = first, clock() + limit_secs
    while True:
        try:
            below = math.inf if best is None or _lacks_memory(best) else best.score - _CLOSE
            solved = program.solve(limit_secs=max(_LEAST_SECS, until - clock()), below=below)
        except TimeoutError:
            break
        if solved is None:  # nothing is left that may be better
            return Searched(best, first, best.score if best is not None else bound, True)
        bound = max(bound, solved[0])
        if best is not None and _rank(best) <= (False, bound + _CLOSE):
            return Searched(best, first, min(bound, best.score), True)
        found = world.forecast(lanes_of(program.lanes(solved[1])))
        best = found if best is None or _rank(found) < _rank(best) else best
        program.cut(solved[1])
        if clock() > until:
            break
    bound = min(bound, best.score) if best is not None else bound
    return Searched(best, first, bound, False)


def _rank(forecast: Forecast) -> tuple[bool, float]:
    """Return what orders placements: those that do not fit into the memory come last."""
    return _lacks_memory(forecast), forecast.score


def _lacks_memory(forecast: Forecast) -> bool:
    return any(problem.startswith("memory:") for problem in forecast.problems)
