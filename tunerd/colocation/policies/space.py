"""Each member in its own share of the device, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tunerd.colocation.plan import Member, shares_of
from tunerd.colocation.policies.base import Choice, Policy, View, first_come
from tunerd.colocation.work import Lane


class Space(Policy):
    kind: ClassVar[str] = "space"
    about: ClassVar[str] = "each in its own share"

    @property
    def depth(self) -> int:
        return 2

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        shares = shares_of(members)
        return tuple(Lane(m.name, shares[m.name], (m.name,), cores=m.cores) for m in members)

    def choose(self, view: View) -> Choice | None:
        return first_come(view)
