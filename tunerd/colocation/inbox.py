"""What any thread has for one thread, which sleeps while there is nothing."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tunerd.colocation.places.bell import Bell

_T = TypeVar("_T")


class Inbox(Generic[_T]):
    """`is_awaited`: its thread sleeps, as far as another one can see.

    Args:
        bell: by which the thread sleeps where it has other things to hear as well.
    """

    def __init__(self, bell: Bell | None) -> None:
        self._items: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self._bell = bell
        self.is_awaited = False
        self.size, self.take = self._items.qsize, self._items.get_nowait
        # Has the thread take something, and wakes it if it sleeps.
        self.put: Callable[[_T], None] = self._items.put if bell is None else self._put

    def _put(self, item: _T) -> None:
        self._items.put(item)
        if self._bell is not None and self.is_awaited:
            self.is_awaited = False  # it need not be rung for twice
            self._bell.ring()

    def wait(self, secs: float | None) -> Sequence[_T]:
        """Sleep until there is something to take or to hear, so long at most; return some of it."""
        self.is_awaited = secs != 0.0
        found: Sequence[_T] = ()
        if self._bell is None:
            with contextlib.suppress(queue.Empty):
                found = (self._items.get(timeout=secs),)
        elif not self._items.qsize():  # who has put something before did not ring
            self._bell.wait(secs)
        self.is_awaited = False
        return found
