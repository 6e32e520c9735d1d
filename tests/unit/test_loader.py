"""The loader's threads that try suspects."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tunerd.colocation.loader import Loader, Suspect
from tunerd.colocation.places.base import FaultedApartError, Place
from tunerd.colocation.scheduler import Event
from tunerd.colocation.work import Seat

WAIT_SECS = 60


class Trials:
    """A place that does apart what the test says of a member, and what its scheduler hears."""

    loaders = 1

    def __init__(self, runs_apart: int, **outcomes: Exception | None) -> None:
        self.runs_apart, self._outcomes = runs_apart, outcomes
        self.tried: list[str] = []
        self.heard: list[tuple[Any, ...]] = []
        self._tells = threading.Condition()

    def run_apart(self, seat: Seat, inputs: Any) -> Any:
        self.tried.append(seat.member)
        if error := self._outcomes[seat.member]:
            raise error
        return {"of": seat.member}

    def tell(self, event: Event) -> None:
        def tried_apart(number: int, at: float, **said: Any) -> Sequence[Any]:
            return [(number, said["reason"], said["is_fault"])]

        def not_tried(numbers: list[int], at: float) -> Sequence[Any]:
            return [(number, "not tried") for number in numbers]

        scheduler = SimpleNamespace(tried_apart=tried_apart, not_tried=not_tried)
        with self._tells:
            self.heard += cast(Any, event(cast(Any, scheduler), 0.0))
            self._tells.notify_all()

    def outcomes(self) -> list[tuple[Any, ...]]:
        """Have all tried; return what the scheduler was told, by request, and what they had."""
        loader = Loader(cast(Place, self), self.tell)
        taken: dict[str, Any] = {}
        loader.try_apart(
            [
                Suspect(number, Seat(name, "lane"), {}, lambda out, n=name: taken.update({n: out}))
                for number, name in enumerate(self._outcomes)
            ]
        )
        with self._tells:
            assert self._tells.wait_for(lambda: len(self.heard) == len(self._outcomes), WAIT_SECS)
        loader.close()
        assert taken == {n: {"of": n} for n in self.tried if self._outcomes[n] is None}
        return sorted(self.heard)


@pytest.mark.parametrize("runs_apart", [1, 2, 8])
def test_all_are_tried_where_none_faults(runs_apart: int) -> None:
    trials = Trials(runs_apart, a=None, b=None, c=MemoryError(), d=None)
    assert trials.outcomes() == [
        (0, "", True),
        (1, "", True),
        (2, "MemoryError()", False),
        (3, "", True),
    ]
    assert sorted(trials.tried) == ["a", "b", "c", "d"]


def test_when_one_has_faulted_those_that_are_left_are_not_tried() -> None:
    trials = Trials(1, a=None, b=FaultedApartError("illegal address"), c=None, d=None)
    assert trials.outcomes() == [
        (0, "", True),
        (1, "illegal address", True),
        (2, "not tried"),
        (3, "not tried"),
    ]
    assert trials.tried == ["a", "b"]
