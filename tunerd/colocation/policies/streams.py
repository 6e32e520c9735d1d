"""Several at once on the whole device: the hardware, or the operating system, divides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.base import InOrder
from tunerd.colocation.work import Lane


class Streams(InOrder):
    """Members are dealt out to the streams in turn."""

    kind: ClassVar[str] = "streams"
    about: ClassVar[str] = "at the same time, each on the whole device"

    streams: Annotated[int, Field(ge=1, le=256)] | None = None  # None: one each

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        names = [m.name for m in members]
        count = min(self.streams or len(names), len(names))
        return tuple(Lane(f"stream-{i}", 100, tuple(names[i::count])) for i in range(count))
