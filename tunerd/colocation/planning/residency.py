"""Whose weights are on the device, where a group's have less memory than all of them take.

The device has pieces of memory, each for one member's weights. Who was not asked for longest loses
its piece, so that they are a cache under LRU whose items are the members. With independent Poisson
requests a member is found there with about the probability of Che's approximation (Che, Tung and
Wang, Hierarchical Web Caching Systems: Modeling, Design and Experimental Results, IEEE J. Sel.
Areas Commun. 20(7), 2002). No clock, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tunerd.colocation.memory import held_at_once, little_room_text

# From the host's pageable memory to one H200, by one thread: the median of 400 cold starts of
# 51.1 MB (results/h200-residents). Where copies go elsewhere it is a guess.
BROUGHT_BYTES_PER_SEC = 8.5e9
_STEPS = 50  # of a bisection


def hit_ratios(rates: Sequence[float], pieces: int) -> tuple[float, ...]:
    """Return which part of each one's requests finds its weights there, under LRU.

    By Che's approximation: all are taken to stay for the same time T after a request, for which

        sum_i (1 - exp(-rate_i T)) = pieces,  hit_i = 1 - exp(-rate_i T)

    Args:
        rates: requests per second of each, independent and Poisson.
        pieces: how many have their weights there at a time.
    """
    if pieces >= len(rates):
        return (1.0,) * len(rates)
    if pieces <= 0:
        return (0.0,) * len(rates)

    def there(secs: float) -> float:
        return math.fsum(-math.expm1(-rate * secs) for rate in rates)

    low, high = 0.0, 1 / max(rates)
    while there(high) < pieces:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if there(middle) < pieces else (low, middle)
    return tuple(-math.expm1(-rate * high) for rate in rates)


class Cold(NamedTuple):
    """Cold starts of a member: the part of its requests, and what each takes beyond a launch.

    is_measured: what it takes; the part is always an estimate.
    """

    part: float
    secs: float
    is_measured: bool = False

    def times(self, secs: float) -> tuple[tuple[float, float], ...]:
        """Return which part of the requests takes how many seconds, where a launch takes `secs`."""
        if not self.part:
            return ((1.0, secs),)
        return (1 - self.part, secs), (self.part, secs + self.secs)


NEVER_COLD = Cold(0.0, 0.0)


@dataclass(frozen=True)
class Residency:
    """A group whose members' weights have less memory than all of them take.

    name: of the group, as the engine calls it.
    own: members with the weights of the kernels' own artifact, which are there for ever.
    together: how many requests its kernels take in a launch at most.
    size_bytes: that the weights may have; in each lane, where `is_shared` is false.
    one_bytes: that one member's weights take.
    is_shared: lanes have the weights in common, as on a GPU; else each has those of its members.
    depth: launches of a lane that may be under way at a time.
    measured_secs: of bringing one member's weights; None: nobody measured it.
    """

    name: str
    members: tuple[str, ...]
    own: frozenset[str]
    together: int
    size_bytes: int
    one_bytes: int
    is_shared: bool
    depth: int = 1
    measured_secs: float | None = None

    @property
    def bring_secs(self) -> float:
        """Return what it takes to bring one member's weights: as measured, or by a bandwidth."""
        if self.measured_secs is not None:
            return self.measured_secs
        return self.one_bytes / BROUGHT_BYTES_PER_SEC

    @property
    def pieces(self) -> int:
        return self.size_bytes // self.one_bytes

    def beside(self, lane: Sequence[str]) -> tuple[str, ...]:
        """Return the members that have the memory together with those of a lane."""
        return self.members if self.is_shared else tuple(sorted({*lane} & {*self.members}))

    def part_bytes(self, lane: Sequence[str]) -> int:
        """Return what a member's weights in a lane count as: an equal part of what there is."""
        count = len(self.beside(lane))
        return min(self.one_bytes, self.size_bytes // count)

    def colds(self, rates: Mapping[str, float]) -> dict[str, Cold]:
        """Return the cold starts of members that have the memory together.

        rates: requests per second by member.
        """
        found = dict.fromkeys(rates, NEVER_COLD)
        others = {name: rate for name, rate in rates.items() if name not in self.own}
        # The kernels' own weights have a piece, in lanes without their member, too.
        hits = hit_ratios([*others.values()], self.pieces - 1)
        for name, hit in zip(others, hits, strict=True):
            if hit < 1:
                found[name] = Cold(1 - hit, self.bring_secs, self.measured_secs is not None)
        return found

    def problem(self, lanes: Sequence[Sequence[str]], together: int) -> str:
        """Return what lacks for all that may run at once; "" where there is enough.

        Args:
            lanes: the members of each.
            together: how many requests a launch has at most.
        """
        seats = sum(not {*self.members}.isdisjoint(lane) for lane in lanes)
        count = held_at_once(
            len(self.members),
            seats if self.is_shared else 1,
            depth=self.depth,
            together=min(together, self.together),
        )
        if self.pieces >= count:
            return ""
        return little_room_text(self.name, self.size_bytes, count, self.one_bytes)
