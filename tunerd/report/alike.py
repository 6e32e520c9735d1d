"""Members of one entry of a mix that are alike, for people: in one row, with ranges of values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from tunerd.colocation.planning.mix import Mix, names_of

_MOST_RUNS = 6  # of an entry's names, one after another; plan and JSON have them all
_UNIT = re.compile(r"\D*$")

T = TypeVar("T")
Places = Mapping[str, tuple[str, int]]


def places_of(mix: Mix) -> Places:
    """Return of each member its entry, and the how manieth of it it is."""
    return {
        name: (entry.name, nth) for entry in mix.members for nth, name in enumerate(names_of(entry))
    }


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return items with one key together, in the order in which each key comes first."""
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return [*found.values()]


def names_text(names: Iterable[str], places: Places) -> str:
    """Return members by name, three of an entry and more in a row by their first and last."""
    return ", ".join(_of_entry(each, places) for each in grouped(names, lambda n: places[n][0]))


def row_name(names: Sequence[str], said: str) -> str:
    """Return what stands for members that have one row: names as said, and how many they are."""
    return f"{said} ({len(names)} alike)" if len(names) > 1 else said


def problems_text(problems: Iterable[str], places: Places) -> list[str]:
    """Return problems such as "a: is late", those that are the same for several once."""
    found: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        name, _, said = problem.partition(": ")
        if name in places:
            found.setdefault((places[name][0], said), []).append(name)
        else:
            found["", problem] = []
    return [
        f"{names_text(names, places)}: {said}" if names else said
        for (_, said), names in found.items()
    ]


def spread(values: Iterable[float | None], text: Callable[[float | None], str]) -> str:
    """Return what a value is, of several that differ the least and the most."""
    known = [value for value in values if value is not None]
    return span(text(min(known)), text(max(known))) if known else text(None)


def span(low: str, high: str) -> str:
    """Return `1.21 to 1.22 ms` of two values in words, and one of two that read the same."""
    if low == high:
        return low
    unit = _UNIT.findall(high)[0]
    return f"{low.removesuffix(unit) if unit else low} to {high}"


def _of_entry(names: Sequence[str], places: Places) -> str:
    ordered = sorted(names, key=lambda name: places[name][1])
    by_run = itertools.groupby(enumerate(ordered), lambda at: places[at[1]][1] - at[0])
    runs = [[name for _, name in run] for _, run in by_run]
    shown = [
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs[:_MOST_RUNS]
    ]
    if left := sum(len(run) for run in runs[_MOST_RUNS:]):
        shown.append(f"{left} more of {places[names[0]][0]}")
    return ", ".join(shown)
