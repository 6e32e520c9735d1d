"""A regulation, and what was measured of one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_APART = re.compile(r"(\S+):(\d+) (\S+):(\d+)")


class Part(NamedTuple):
    """A segment of a member, by its number: 0 is its first."""

    member: str
    nth: int


Pair = tuple[Part, Part]  # in their order


def pair_of(one: Part, other: Part) -> Pair:
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True)
class Regulation:
    """stops: by member, after which of its kernels. apart: parts that do not run at once."""

    stops: tuple[tuple[str, tuple[int, ...]], ...]
    apart: frozenset[Pair] = frozenset()

    @classmethod
    def read(cls, stops: Mapping[str, Sequence[int]], apart: Sequence[str]) -> Regulation:
        """Return what a plan's policy says; ValueError where `apart` is not written so."""
        pairs = set()
        for said in apart:
            if (found := _APART.fullmatch(said)) is None:
                raise ValueError(f"'{said}' is no pair of parts; write it as `vgg:0 bert:2`")
            one, other = Part(found[1], int(found[2])), Part(found[3], int(found[4]))
            pairs.add(pair_of(one, other))
        return cls(tuple((name, tuple(each)) for name, each in stops.items()), frozenset(pairs))

    def check(self) -> None:
        """Raise ValueError for stops out of order, and for pairs of what there is not."""
        counts = {name: len(each) + 1 for name, each in self.stops}
        for name, each in self.stops:
            if list(each) != sorted(set(each)):
                raise ValueError(f"the stops of {name} are to grow")
        for pair in self.apart:
            if pair[0].member == pair[1].member:
                raise ValueError(f"parts of {pair[0].member} never run at once; leave that out")
            for member, nth in pair:
                if nth >= counts.get(member, 0):
                    raise ValueError(f"{member}:{nth} is no part that the `stops` make")

    @property
    def parts(self) -> list[Part]:
        return [Part(name, nth) for name, each in self.stops for nth in range(len(each) + 1)]

    @property
    def pairs(self) -> list[Pair]:
        """Return all pairs of parts of different members."""
        parts = self.parts
        return sorted(
            pair_of(one, other) for one in parts for other in parts if one.member < other.member
        )

    def is_apart(self, part: Part, others: Collection[Part]) -> bool:
        """Say whether a part is apart from one of others."""
        return any(pair_of(part, other) in self.apart for other in others)

    def parameters(self) -> dict[str, object]:
        """Return it as parameters of the policy `regulated`, which `read` reads."""
        apart = [f"{a.member}:{a.nth} {b.member}:{b.nth}" for a, b in sorted(self.apart)]
        stops = {name: list(each) for name, each in self.stops}
        return {"stops": stops} | ({"apart": apart} if apart else {})

    def moved(self, member: str, stops: Sequence[int]) -> Regulation:
        """Return it with other stops of a member; a part is apart from what parts of it were.

        Parts of before and after have something in common where their kernels have.
        """
        old = dict(self.stops)[member]
        inside = [
            (nth, was)
            for nth, (first, end) in enumerate(_bounds(stops))
            for was, (began, ended) in enumerate(_bounds(old))
            if min(end, ended) > max(first, began)
        ]
        apart = set()
        for one, other in self.apart:
            if member not in (one.member, other.member):
                apart.add((one, other))
                continue
            mine, beside = (one, other) if one.member == member else (other, one)
            apart |= {pair_of(Part(member, n), beside) for n, was in inside if was == mine.nth}
        changed = tuple((m, tuple(stops) if m == member else each) for m, each in self.stops)
        return Regulation(changed, frozenset(apart))

    def simplified(self) -> Regulation:
        """Return it without stops between parts that are apart from nothing: nobody waits there."""
        bound = {part for pair in self.apart for part in pair}
        for name, stops in self.stops:
            for nth, stop in enumerate(stops):
                if not {Part(name, nth), Part(name, nth + 1)} & bound:
                    left = [each for each in stops if each != stop]
                    return self.moved(name, left).simplified()
        return self

    def toggled(self, pair: Pair) -> Regulation:
        """Return it with two parts apart that were not, or the other way round."""
        return Regulation(self.stops, self.apart ^ {pair})


def _bounds(stops: Sequence[int]) -> list[tuple[int, float]]:
    return list(zip((0, *stops), (*stops, float("inf")), strict=True))


@dataclass(frozen=True)
class Outcome:
    """What a regulation gave.

    work: seconds of the device that its requests would take one by one and alone, per second: what
        is left idle is what others with more of it do not leave.
    excess: by how much the tail of some member is over its bound, at most; 0.1 is 10%.
    """

    work: float
    excess: float = 0.0

    def is_better_than(self, other: Outcome, margin: float = 0.0) -> bool:
        """Say whether it is: within the bounds first, then by its work; by more than a margin."""
        if other.excess > 0:
            if self.excess > 0:
                return self.excess < other.excess * (1 - margin) - 1e-12
            return True
        return self.excess <= 0 and self.work > other.work * (1 + margin) + 1e-12
