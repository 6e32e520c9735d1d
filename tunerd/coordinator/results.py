"""What is kept of a task's trials while a run lasts: all ids, and some results."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import nsmallest
from math import inf

from tunerd.vocabulary import Result

MAX_RESULTS = 512  # results of a task that are kept to be told to tuners; a trace is some 3 KB


class KnownIds:
    """Candidate ids in eight bytes each: a run keeps them all, so that none is paid twice."""

    def __init__(self) -> None:
        self._numbers = array("Q")  # sorted

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, candidate_id: str) -> bool:
        number = int(candidate_id, 16)
        place = bisect_left(self._numbers, number)
        return place < len(self._numbers) and self._numbers[place] == number

    def add(self, candidate_id: str) -> bool:
        """Add an id of 16 hex digits; False where it is known."""
        number = int(candidate_id, 16)
        place = bisect_left(self._numbers, number)
        if place < len(self._numbers) and self._numbers[place] == number:
            return False
        self._numbers.insert(place, number)
        return True


class Results:
    """What tuners are told: of a task's results the newest, and the best of the older ones.

    Keeps at most `most` and a quarter, so that the memory of a run does not grow with its trials.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[tuple[int, Result]] = []  # numbered as they came
        self.count = 0  # that ever came

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, result: Result) -> None:
        self._kept.append((self.count, result))
        self.count += 1
        if len(self._kept) > self._most + self._most // 4:
            newest = self._kept[-self._most // 2 :]
            older = self._kept[: -len(newest)]
            best = nsmallest(self._most - len(newest), older, key=_secs)
            self._kept = sorted(best, key=_number) + newest

    def since(self, number: int) -> tuple[Result, ...]:
        """Return those kept, in order, except for the first `number` that came."""
        first = bisect_left(self._kept, number, key=_number)
        return tuple(result for _, result in self._kept[first:])


def _secs(kept: tuple[int, Result]) -> float:
    return inf if kept[1].run_secs is None else kept[1].run_secs


def _number(kept: tuple[int, Result]) -> int:
    return kept[0]
