"""Several at once on the whole device: the hardware, or the operating system, divides it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import Choice, Policy, View, first_come, in_order_of_arrival
from tunerd.colocation.work import Lane


class Streams(Policy):
    """Members are dealt out to the streams in turn."""

    kind: ClassVar[str] = "streams"
    about: ClassVar[str] = "at the same time, each on the whole device"

    streams: Annotated[int, Field(ge=1, le=256)] | None = None  # None: one each

    @property
    def depth(self) -> int:
        return 2

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        names = [m.name for m in members]
        count = min(self.streams or len(names), len(names))
        return tuple(Lane(f"stream-{i}", 100, tuple(names[i::count])) for i in range(count))

    def choose(self, view: View) -> Choice | None:
        return first_come(view)

    def starts(self, view: View) -> Iterator[Choice]:
        return in_order_of_arrival(view)
