"""Ctrl-C and SIGTERM: the first asks a run to end in order, the second ends it at once.

What keeps nothing before its end has nothing to wait for: there the first one ends it at once, too.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object] | int | None
_SAID_SECS = 1.0  # that what is said may take, before the end goes on without it


class Stop:
    """Remembers the first SIGINT or SIGTERM while it is entered; the second one interrupts.

    Outside the main thread, where Python takes no signals, it is never requested.

    Args:
        say: called once, when the first one comes, in a thread of its own: the main thread may hold
            what it needs, such as the terminal. It has been said when the body is left.
        at_once: the first one interrupts, too.
    """

    def __init__(self, say: Callable[[], None] | None = None, *, at_once: bool = False) -> None:
        self.requested = False
        self._say = say
        self._at_once = at_once
        self._unsaid = _thread.allocate_lock()  # held until it has been said
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._unsaid.acquire(timeout=_SAID_SECS)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._say is not None:
            self._unsaid.acquire(blocking=False)
            _thread.start_new_thread(self._say_it, (self._say,))  # Thread.start takes a lock
        if self._at_once:
            raise KeyboardInterrupt

    def _say_it(self, say: Callable[[], None]) -> None:
        try:
            say()
        finally:
            self._unsaid.release()
