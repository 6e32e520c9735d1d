"""Wait for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

_LIMIT_SECS = 120.0  # of a host with much else to do


def until(holds: Callable[[], object], *, secs: float = _LIMIT_SECS, every: float = 0.01) -> None:
    """Return as soon as a condition holds; fail the test where it does not within `secs`."""
    give_up_at = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < give_up_at, f"waited {secs:g} s"
        time.sleep(every)
