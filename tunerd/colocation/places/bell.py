"""What a thread waits for that has connections to hear: one of them, or another thread's ring."""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Callable


class Bell:
    """One thread waits and hears; any thread rings, watches and unwatches.

    What is watched is called when its descriptor can be read, or has ended, by `hear`: once for
    each time that it is called, so that who is called need not take all that is there.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._rung = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close = weakref.finalize(self, os.close, self._rung)
        self._epoll.register(self._rung, select.EPOLLIN)
        self._watched: dict[int, Callable[[], None]] = {}
        self._seen: list[tuple[int, int]] | None = None  # by `wait`, and not heard

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        self._watched[descriptor] = call
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Idempotent; to be called before the descriptor is closed."""
        if self._watched.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(descriptor)

    def ring(self) -> None:
        """Wake who waits, or have the next wait end at once."""
        os.eventfd_write(self._rung, 1)

    def wait(self, secs: float | None) -> None:
        """Wait until there is something to hear, it rings, or so long; by milliseconds."""
        self._seen = self._epoll.poll(secs)

    def hear(self) -> None:
        """Call what can be heard now."""
        seen, self._seen = self._seen, None
        for descriptor, _ in self._epoll.poll(0) if seen is None else seen:
            if descriptor == self._rung:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._rung)
            elif (call := self._watched.get(descriptor)) is not None:
                call()

    def close(self) -> None:
        """Give up the descriptors; idempotent, and nobody waits or rings any more."""
        self._epoll.close()
        self._close()
