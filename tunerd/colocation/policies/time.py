"""One after the other: the whole device for one request at a time, in the order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Choice, Policy, View, first_come, in_order_of_arrival
from tunerd.colocation.work import Lane


class Time(Policy):
    kind: ClassVar[str] = "time"
    about: ClassVar[str] = "one after the other, each on the whole device"

    @property
    def depth(self) -> int:
        return 2

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        return (Lane("whole", 100, tuple(m.name for m in members)),)

    def choose(self, view: View) -> Choice | None:
        return first_come(view)

    def starts(self, view: View) -> Iterator[Choice]:
        return in_order_of_arrival(view)
