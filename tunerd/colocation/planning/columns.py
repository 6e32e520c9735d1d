"""Lanes as columns of an integer program whose solution has the least bad worst lane.

Members that are alike in everything but their names count as so many of one kind: a lane is a
column by how many of each kind it has, and placements that differ by names alone are one. A group
that is to have its launches in one lane is a kind of which there is one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunerd.colocation.planning.placement import WHOLE, Lane, Subject
from tunerd.colocation.planning.world import World

MOST_COLUMNS = 6000  # of an integer program; with four shares that is ten members of ten kinds

_LIMIT_REACHED = 1  # a status of scipy.optimize.milp

Kind = tuple[tuple[str, ...], ...]  # of each the names: of one member, or of a group's all


@dataclass(frozen=True)
class Column:
    """A lane with so many of each kind, and what the score of its worst member is at least."""

    score: float
    share: int  # percent
    counts: tuple[int, ...]
    together: int = 1


def kinds_of(subjects: Iterable[Subject]) -> tuple[Kind, ...]:
    """Return members by kind: those of one have the same curve, rate, objective and needs."""
    kinds: dict[object, list[tuple[str, ...]]] = {}
    for each in subjects:
        needs = each.architecture, each.has_batches, each.shared_bytes, each.each_bytes
        weights = each.residency, each.has_weights_there
        features = tuple(sorted(each.features.items()))
        key = each.of, each.rate, each.slo_secs, each.part, needs, weights, features
        kinds.setdefault(key, []).append((each.name,))
    return tuple(map(tuple, kinds.values()))


def columns_of(
    world: World, kinds: Sequence[Kind], shares: Sequence[int], *, around: int = 1
) -> list[Column] | None:
    """Return each lane that some of these may have, one after another; None for too many.

    around: how many requests launches of others may have.
    """
    counts = math.prod(len(kind) + 1 for kind in kinds) - 1
    if counts * len(shares) > MOST_COLUMNS:
        return None
    every = itertools.product(*(range(len(kind) + 1) for kind in kinds))
    some = (each for each in every if any(each))
    return columns_with(world, kinds, some, shares, around=around)


def columns_with(
    world: World,
    kinds: Sequence[Kind],
    counts: Iterable[tuple[int, ...]],
    shares: Iterable[int],
    together: int = 1,
    *,
    around: int = 1,
) -> list[Column]:
    """Return the lanes with so many of each kind that can be, at each of these shares.

    around: how many requests launches of others may have.
    """
    found = []
    for each, share in itertools.product(counts, shares):
        names = frozenset(_names(kinds, each))
        score = world.least_score(names, share, together, around=around)
        if math.isfinite(score):
            found.append(Column(score, share, each, together))
    return found


class Program:
    """Columns in which each member has a lane, with the least worst score; solved again after cuts.

    Variables say of each column whether it is used once, a second time, and so on.
    """

    def __init__(self, kinds: Sequence[Kind], columns: Sequence[Column]) -> None:
        from scipy.sparse import csr_array, vstack

        self._kinds = kinds
        sizes = np.array([len(kind) for kind in kinds], float)
        self._used: list[Column] = []
        firsts: list[int] = []
        for column in columns:
            pairs = zip(kinds, column.counts, strict=True)
            most = min(len(kind) // count for kind, count in pairs if count)
            firsts.append(len(self._used))
            self._used += [column] * min(most, WHOLE // column.share)
        self._count = count = len(self._used)
        has = np.array([column.counts for column in self._used], float).T
        self._scores = scores = np.array([column.score for column in self._used])
        share = np.array([column.share for column in self._used], float)
        again = np.setdiff1d(np.arange(count), firsts)
        # The worst is no better than the average of a kind, which is all where there is one of it.
        others = np.setdiff1d(firsts, np.flatnonzero(has[sizes == 1].any(axis=0)))

        def sparse(*columns: tuple[Any, Any]) -> Any:
            """Return rows with a number each in some columns."""
            size = len(columns[0][0])
            numbers = [np.broadcast_to(number, size) for _, number in columns]
            places = np.tile(np.arange(size), len(columns)), np.concatenate([x for x, _ in columns])
            return csr_array((np.concatenate(numbers), places), shape=(size, count + 1))

        worst = np.full(len(others), count)
        parts: list[tuple[Any, Any, Any]] = [  # rows, and what each is at least and at most
            (np.c_[has, np.zeros(len(kinds))], sizes, sizes),
            (np.c_[has * scores / sizes[:, None], -np.ones(len(kinds))], -np.inf, 0.0),
            (sparse((others, scores[others]), (worst, -1.0)), -np.inf, 0.0),
            (sparse((again, 1.0), (again - 1, -1.0)), -np.inf, 0.0),
            (np.append(share, 0.0)[None], -np.inf, float(WHOLE)),
        ]
        self._rows = vstack([csr_array(rows) for rows, _, _ in parts], format="csr")
        of_each = [(rows.shape[0], low, high) for rows, low, high in parts]
        self._low = np.concatenate([np.broadcast_to(low, size) for size, low, _ in of_each])
        self._high = np.concatenate([np.broadcast_to(high, size) for size, _, high in of_each])
        self._aim = np.append(np.zeros(count), 1.0)

    def solve(
        self, *, limit_secs: float, below: float = math.inf
    ) -> tuple[float, tuple[int, ...]] | None:
        """Return the least worst score, and which uses of columns have it; None without any.

        Where the time ends first, a bound and the best until then. Raises TimeoutError for none.

        below: a score that is known to be had; no column that is as bad is used.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = self._count
        found = milp(
            self._aim,
            constraints=LinearConstraint(self._rows, self._low, self._high),
            integrality=np.append(np.ones(count), 0.0),
            bounds=Bounds(np.zeros(count + 1), np.append(self._scores < below, np.inf)),
            options={"mip_rel_gap": 0.0, "time_limit": limit_secs},
        )
        is_late = found.status == _LIMIT_REACHED
        if found.x is None:
            if is_late:
                raise TimeoutError
            return None
        bound = float(found.mip_dual_bound if is_late else found.x[-1])
        return bound, tuple(np.flatnonzero(found.x[:count] > 0.5).tolist())

    def cut(self, chosen: Sequence[int]) -> None:
        """Have no further solution with all of these uses."""
        from scipy.sparse import csr_array, vstack

        row = np.zeros((1, self._count + 1))
        row[0, list(chosen)] = 1.0
        self._rows = vstack([self._rows, csr_array(row)], format="csr")
        self._low = np.append(self._low, -np.inf)
        self._high = np.append(self._high, len(chosen) - 1.0)

    def lanes(self, chosen: Sequence[int]) -> list[Lane]:
        """Return the lanes of a solution: of each kind the first ones are in the first lane."""
        at, found = [0] * len(self._kinds), []
        for nth in chosen:
            column = self._used[nth]
            left = [kind[first:] for kind, first in zip(self._kinds, at, strict=True)]
            found.append(Lane(column.share, _names(left, column.counts), column.together))
            at = [first + count for first, count in zip(at, column.counts, strict=True)]
        return found


def _names(kinds: Iterable[Kind], counts: Iterable[int]) -> tuple[str, ...]:
    """Return the first members of each kind, so many of each."""
    pairs = zip(kinds, counts, strict=True)
    return tuple(name for kind, count in pairs for names in kind[:count] for name in names)
