"""What is proposed first of what other runs have measured of a task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from tunerd.candidates.base import BATCH

_T = TypeVar("_T")

_OF_A_RUN = 4  # at most


def most_first(runs: int) -> int:
    """Return how many are proposed first, where so many runs have measured the task."""
    return min(BATCH // 2, _OF_A_RUN * runs)


def in_turn(
    lists: Iterable[Iterable[_T]], key: Callable[[_T], Hashable] = lambda each: each
) -> list[_T]:
    """Return the first of each list, then the second of each, and so on, each once by its key."""
    missing: Any = object()
    ranks = itertools.zip_longest(*lists, fillvalue=missing)
    return list({key(x): x for rank in ranks for x in rank if x is not missing}.values())
