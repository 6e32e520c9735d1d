"""Each member in its own share of the device, whatever the others do.

Members that name one `lane` have its share together, and turns in it in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import InOrder, own_lanes
from tunerd.colocation.work import Lane


class Space(InOrder):
    kind: ClassVar[str] = "space"
    about: ClassVar[str] = "each in its own share"

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        return own_lanes(members)
