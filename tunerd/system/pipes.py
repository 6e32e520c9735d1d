"""Streams whose reader may be gone: a pipe into `head`."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import TextIO


def reader_is_gone(stream: TextIO) -> bool:
    """Say whether `stream` is a pipe without a reader; a broken pipe may be another one."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):
        return False


def discard_output(stream: TextIO) -> None:
    """Point `stream` at nothing: what it still holds must not fail again when Python exits."""
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
