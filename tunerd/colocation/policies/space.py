"""Each member in its own share of the device, whatever the others do.

Members that name one `lane` have its share together, and turns in it in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import (
    Choice,
    Policy,
    View,
    first_come,
    in_order_of_arrival,
    own_lanes,
)
from tunerd.colocation.work import Lane


class Space(Policy):
    kind: ClassVar[str] = "space"
    about: ClassVar[str] = "each in its own share"

    @property
    def depth(self) -> int:
        return 2

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        return own_lanes(members)

    def choose(self, view: View) -> Choice | None:
        return first_come(view)

    def starts(self, view: View) -> Iterator[Choice]:
        return in_order_of_arrival(view)
