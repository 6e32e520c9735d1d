"""Coordinate descent over regulations: one pointer, or one pair of parts, at a time.

What a regulation is worth is measured, by whatever is given: an engine, or a simulation. A sweep
goes through all coordinates and takes the best alternative of each; a sweep without any ends a
descent. The coordinates are

- the stops of a member: one moved to a place beside it, one left out, one more in the middle of a
  part, and with it one of the two halves apart from another part, or beside it, unlike before;
- each pair of parts of different members: apart, or not.

Descents begin at what is known to be good somewhere: all at once (streams), one after another, and
parts of equal time that run beside those of the same number alone, as GACER's pointers have them.
The best of these goes first. An alternative is measured twice before it is taken, and counts as the
worse of both: of many that are measured once, the best is likely to be luck.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunerd.colocation.regulation.values import Outcome, Part, Regulation, pair_of

Measure = Callable[[Regulation], Outcome]
MARGIN = 0.01  # of what is better: less is taken for noise
MOST_PARTS = 4  # of a member
_STARTS = (2, 3)  # parts of equal time


class OutOfBudget(Exception):
    """Raised by a measurer when there is no time for another one: the best so far is the answer."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a member, as far as they may be told apart.

    ends: after which kernels it may stop, and the last one. secs: of what lies between.
    """

    name: str
    ends: tuple[int, ...]
    secs: tuple[float, ...]

    @property
    def places(self) -> tuple[int, ...]:
        return self.ends[:-1]

    def middle(self, first: int, end: int) -> int | None:
        """Return the place that halves the time between two kernels; None without one."""
        inside = [place for place in self.places if first < place < end]
        half = (self._until(first) + self._until(end)) / 2
        return min(inside, key=lambda place: abs(self._until(place) - half), default=None)

    def equal(self, parts: int) -> tuple[int, ...]:
        """Return stops that make so many parts of about the same time, or fewer."""
        whole = sum(self.secs)
        wanted = (whole * nth / parts for nth in range(1, parts))
        near = {min(self.places, key=lambda p: abs(self._until(p) - at)) for at in wanted}
        return tuple(sorted(near))

    def _until(self, kernel: int) -> float:
        return sum(secs for end, secs in zip(self.ends, self.secs, strict=True) if end <= kernel)


@dataclass(frozen=True)
class Found:
    """The best regulation, and what it gave. tried: how many others were measured."""

    regulation: Regulation
    outcome: Outcome
    tried: int


def free(members: Sequence[Kernels]) -> Regulation:
    """Return the regulation of streams: nobody stops, nothing is apart."""
    return Regulation(tuple((m.name, ()) for m in members))


def one_by_one(members: Sequence[Kernels]) -> Regulation:
    """Return the regulation under which one model runs at a time."""
    whole = free(members)
    return Regulation(whole.stops, frozenset(whole.pairs))


def in_stages(members: Sequence[Kernels], parts: int) -> Regulation:
    """Return parts of equal time, each beside those of its number alone."""
    cut = Regulation(tuple((m.name, m.equal(parts) if m.places else ()) for m in members))
    return Regulation(cut.stops, frozenset(p for p in cut.pairs if p[0].nth != p[1].nth))


def find(
    members: Sequence[Kernels],
    measure: Measure,
    say: Callable[[str], None] = lambda _: None,
    *,
    margin: float = MARGIN,
    most_parts: int = MOST_PARTS,
) -> Found:
    """Return the best regulation that descents find, until all have ended or there is no budget."""
    search = _Search(members, measure, say, margin, most_parts)
    try:
        starts = [free(members), one_by_one(members)]
        starts += [in_stages(members, parts) for parts in _STARTS if parts <= most_parts]
        known = [(start, search.measured(start)) for start in dict.fromkeys(starts)]
        while known:
            first = known[0]
            for each in known[1:]:
                first = each if each[1].is_better_than(first[1]) else first
            known.remove(first)
            search.descend(*first)
    except OutOfBudget:
        say("the budget is used up")
    if search.best is None:
        raise OutOfBudget("there was no time to measure anything; give more")
    return Found(*search.best, len(search.known))


class _Search:
    def __init__(
        self,
        members: Sequence[Kernels],
        measure: Measure,
        say: Callable[[str], None],
        margin: float,
        most_parts: int,
    ) -> None:
        self._members = {m.name: m for m in members}
        self._measure, self._say = measure, say
        self._margin, self._most_parts = margin, most_parts
        self.known: dict[Regulation, Outcome] = {}
        self.best: tuple[Regulation, Outcome] | None = None

    def measured(self, regulation: Regulation) -> Outcome:
        regulation = regulation.simplified()  # the same measured once
        if regulation not in self.known:
            self.known[regulation] = found = self._measure(regulation)
            if self.best is None:
                self.best = regulation, found
            elif found.is_better_than(self.best[1], self._margin):
                self._check(regulation)
        return self.known[regulation]

    def _check(self, regulation: Regulation) -> None:
        """Measure what seems best again, and keep the worse."""
        assert self.best is not None
        again = self._measure(regulation)
        if self.known[regulation].is_better_than(again):
            self.known[regulation] = again
        if self.known[regulation].is_better_than(self.best[1], self._margin):
            self.best = regulation, self.known[regulation]
            self._say(f"better: {text_of(regulation, self.known[regulation])}")

    def descend(self, at: Regulation, outcome: Outcome) -> None:
        """Go from one regulation to better ones until none of its neighbours is better."""
        is_moved = True
        while is_moved:
            is_moved = False
            for coordinate in self._coordinates(at):
                for other in coordinate(at):
                    found = self.measured(other)
                    if found.is_better_than(outcome, self._margin):
                        at, outcome, is_moved = other, found, True

    def _coordinates(
        self, at: Regulation
    ) -> Iterator[Callable[[Regulation], Iterator[Regulation]]]:
        for name in self._members:
            yield lambda now, name=name: self._other_stops(now, name)  # type: ignore[misc]
        for pair in at.pairs:
            # A move may have taken a part away since the sweep began.
            yield lambda now, pair=pair: (  # type: ignore[misc]
                iter([now.toggled(pair)] if pair in now.pairs else [])
            )

    def _other_stops(self, at: Regulation, name: str) -> Iterator[Regulation]:
        stops, places = dict(at.stops)[name], self._members[name].places
        for nth, stop in enumerate(stops):
            rest = stops[:nth] + stops[nth + 1 :]
            yield at.moved(name, rest)
            where = places.index(stop)
            for place in places[max(0, where - 1) : where + 2]:
                if place not in stops:
                    yield self._with_place(at, name, nth, place)
        if len(stops) + 1 >= self._most_parts:
            return
        for nth, (first, end) in enumerate(itertools.pairwise((0, *stops, self._end(name)))):
            middle = self._members[name].middle(first, end)
            if middle is None:
                continue
            split = at.moved(name, sorted((*stops, middle)))
            yield split
            for other in at.parts:
                if other.member != name:
                    for half in (nth, nth + 1):
                        yield split.toggled(pair_of(Part(name, half), other))

    def _with_place(self, at: Regulation, name: str, nth: int, place: int) -> Regulation:
        """Return it with one stop elsewhere, and the same parts apart."""
        changed = {m: list(stops) for m, stops in at.stops}
        changed[name][nth] = place
        stops = tuple((m, tuple(sorted(each))) for m, each in changed.items())
        return Regulation(stops, at.apart)

    def _end(self, name: str) -> int:
        return self._members[name].ends[-1]


def text_of(regulation: Regulation, outcome: Outcome) -> str:
    """Return a line for people."""
    stops = ", ".join(
        f"{name} {'+'.join(map(str, each)) or 'whole'}" for name, each in regulation.stops
    )
    over = f", {100 * outcome.excess:.0f}% over its bound" if outcome.excess > 0 else ""
    return f"{stops}; {len(regulation.apart)} pairs apart: work {outcome.work:.3f}{over}"
