"""What a sketch leaves open: how loops are split, which option is taken, where a block is computed.

A choice of a knob is a row of integers: a tile has a column for each of its parts, any other knob
has one column. Knobs draw and change many rows at once, shape [choice, part].
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Choices = npt.NDArray[np.int64]

UNDECIDED = -99  # a compute location that TVM draws when it applies the trace

_MAX_DRAWS = 20


@dataclass(frozen=True)
class Tile:
    """Splits a loop of `extent` iterations into `parts` factors, outermost first."""

    instruction: int
    extent: int
    parts: int
    max_innermost: int

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        """Draw uniformly from the splits whose last factor is allowed."""
        drawn = np.ones((count, self.parts), dtype=np.int64)
        drawn[:, 0] = self.extent
        rows = np.arange(count)
        for _ in range(_MAX_DRAWS):
            fresh = np.ones((len(rows), self.parts), dtype=np.int64)
            for prime, power in _factorized(self.extent):
                table = prime ** _compositions(power, self.parts)
                fresh *= table[random.integers(len(table), size=len(rows))]
            good = fresh[:, -1] <= self.max_innermost
            drawn[rows[good]] = fresh[good]
            rows = rows[~good]
            if not len(rows):
                break
        return drawn

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        """Move a prime factor from one part to another, where that is allowed."""
        if self.extent == 1 or self.parts == 1:
            return rows
        count = len(rows)
        primes = np.array([p for p, _ in _factorized(self.extent)])
        prime = primes[random.integers(len(primes), size=count)]
        source = random.integers(self.parts, size=count)
        target = (source + random.integers(1, self.parts, size=count)) % self.parts
        at = np.arange(count)
        changed = rows.copy()
        changed[at, source] //= prime
        changed[at, target] *= prime
        good = (rows[at, source] % prime == 0) & (changed[:, -1] <= self.max_innermost)
        return np.where(good[:, None], changed, rows)

    def translate(self, decided: Any, attributes: Any) -> list[int] | None:
        """Return a split of another trace where it is one of this loop's, else None."""
        if not isinstance(decided, list) or len(decided) != self.parts or min(decided) < 1:
            return None
        fits = math.prod(decided) == self.extent and decided[-1] <= self.max_innermost
        return decided if fits else None


@dataclass(frozen=True)
class Option:
    """Picks one of `values` by its index."""

    instruction: int
    values: tuple[int, ...]
    parts: int = 1

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        return random.integers(len(self.values), size=(count, 1))

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        return self.sample(len(rows), random)

    def translate(self, decided: Any, attributes: Any) -> list[int] | None:
        """Return where the value that another trace picked of its own is here, else None."""
        theirs = attributes[0]
        if not isinstance(decided, int) or not 0 <= decided < len(theirs):
            return None
        picked = theirs[decided]
        return [self.values.index(picked)] if picked in self.values else None


@dataclass(frozen=True)
class Location:
    """Says at which loop a block is computed; what is possible shows when a trace is applied."""

    instruction: int
    parts: int = 1

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        return np.full((count, 1), UNDECIDED)

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        return self.sample(len(rows), random)

    def translate(self, decided: Any, attributes: Any) -> list[int] | None:
        """Return another trace's loop: whether it is possible shows when it is applied."""
        return [decided] if isinstance(decided, int) else None


Knob = Tile | Option | Location


@functools.cache
def _factorized(number: int) -> tuple[tuple[int, int], ...]:
    """Return the primes of a number and their powers."""
    found, divisor = [], 2
    while number > 1:
        power = 0
        while number % divisor == 0:
            number //= divisor
            power += 1
        if power:
            found.append((divisor, power))
        divisor = divisor + 1 if divisor * divisor <= number else max(number, divisor + 1)
    return tuple(found)


@functools.cache
def _compositions(total: int, parts: int) -> Choices:
    """Return all ways to write `total` as an ordered sum of `parts`, shape [ways, parts]."""
    if parts == 1:
        return np.array([[total]], dtype=np.int64)
    rows = []
    for first in range(total + 1):
        rest = _compositions(total - first, parts - 1)
        rows.append(np.hstack([np.full((len(rest), 1), first), rest]))
    return np.vstack(rows)
