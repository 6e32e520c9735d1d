"""One after the other: the whole device for one request at a time, in the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import InOrder
from tunerd.colocation.work import Lane


class Time(InOrder):
    kind: ClassVar[str] = "time"
    about: ClassVar[str] = "one after the other, each on the whole device"

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        return (Lane("whole", 100, tuple(m.name for m in members)),)
