"""The time of day, as it goes on from a process's first look at it.

A clock that somebody sets, or a time server, would make work end before it began, or look late.
"""

from __future__ import annotations

import functools
import time


def now() -> float:
    """Return seconds since the epoch; two of a process differ by the time between them."""
    return _epoch_secs() + time.monotonic()


@functools.cache
def _epoch_secs() -> float:
    """Return when the monotonic clock was zero."""
    return time.time() - time.monotonic()
