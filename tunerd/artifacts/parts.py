"""Copies to a GPU and from it in parts, so that those of others go between them.

A GPU carries out the copies of all streams one after the other, those of one direction in the order
in which they were queued. On an H200 a copy of 602 KB takes 26 us alone, and 726 us behind one of
38.5 MB; 680 us where that one was cut into parts of 1 MB and all were queued at once. So few parts
are queued at a time: what is copied meanwhile waits for these. Who has no more bytes than such few
parts gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tunerd.artifacts.marked_graph import Copy
from tunerd.system.cuda_driver import NO_TIMES, ShortCalls, checked

PART_BYTES = 2 << 20  # 40 us on an H200, at 53 GB/s: the host has that long to queue one more
IN_FLIGHT = 2  # of a launch, so that the GPU need not wait for the host


def go_in_parts(size_bytes: int) -> bool:
    """Say whether inputs or outputs of so many bytes are to be copied in parts."""
    return size_bytes > IN_FLIGHT * PART_BYTES


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Copies of one direction that are queued at once. Raises RuntimeError as ShortCalls do."""

    goes_alone: ClassVar[bool] = False

    copies: Sequence[Copy]
    event: int
    short: ShortCalls
    to_host: bool = False

    def queue(self, stream: int) -> None:
        """Queue the copies on a stream of the context of the event."""
        copy = self.short.copy_to_host if self.to_host else self.short.copy_to_device
        try:
            for to, at, size in self.copies:
                copy(to, at, size, stream)
        finally:  # what was queued before an error is to be waited for, too
            self.short.record(self.event, stream)

    def is_done(self) -> bool:
        """Say whether the copies have ended; raises what the stream has met."""
        return self.short.has_ended(self.event)


@dataclass(eq=False, slots=True)
class Written:
    """What a thread writes to where parts are copied from; none is queued before that has ended.

    Raises what it has met.
    """

    goes_alone: ClassVar[bool] = True

    write: Callable[[], object]
    writer: Executor
    _written: Future[object] = field(default_factory=Future, init=False)

    def queue(self, stream: int) -> None:
        self._written = self.writer.submit(self.write)

    def is_done(self) -> bool:
        if not self._written.done():
            return False
        self._written.result()
        return True


class Nothing:
    """What is queued, without effect, when what goes alone before it has ended."""

    goes_alone: ClassVar[bool] = False

    def queue(self, stream: int) -> None: ...

    def is_done(self) -> bool:
        return True


class Parts:
    """Makes parts of copies. Their events are made once, and are of the context that is current."""

    def __init__(self, driver: Any, short: ShortCalls, *, to_host: bool = False) -> None:
        self._driver, self._short, self._to_host = driver, short, to_host
        self._events = [checked(driver.cuEventCreate(NO_TIMES)) for _ in range(IN_FLIGHT)]

    def of(self, copies: Sequence[Copy]) -> list[Part]:
        """Return parts in the order in which they are to be queued.

        Each has its event from the one that is `IN_FLIGHT` before it, which must have ended.
        """
        events = [int(event) for event in self._events]
        return [
            Part(part, events[number % IN_FLIGHT], self._short, self._to_host)
            for number, part in enumerate(_cut(copies))
        ]

    def __del__(self) -> None:
        # Of a context that is gone, all is gone: what these answer does not matter.
        for event in getattr(self, "_events", ()):
            self._driver.cuEventDestroy(event)


def _cut(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Cut copies into parts of PART_BYTES, the last one with what is left."""
    part: list[Copy] = []
    room = PART_BYTES
    for to, at, size in copies:
        done = 0
        while done < size:
            taken = min(size - done, room)
            part.append((to + done, at + done, taken))
            done, room = done + taken, room - taken
            if not room:
                yield part
                part, room = [], PART_BYTES
    if part:
        yield part
