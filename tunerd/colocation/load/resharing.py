"""Shares that change while a load runs: how long each change took, and what was lost by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from tunerd.colocation.engine import Engine
from tunerd.colocation.load.generator import Observed
from tunerd.colocation.load.lost import lost_of
from tunerd.colocation.plan import Member


@dataclass(frozen=True)
class Changes:
    """Changes of shares in the windows of what counts, in order, and all requests around them.

    secs: how long each took, from when it was asked for.
    lost: of the requests that were asked, those that `lost_of` returns.
    """

    IN_JSON: ClassVar = ("median_secs", "longest_secs")

    secs: tuple[float, ...]
    asked: int
    lost: int

    @property
    def median_secs(self) -> float | None:
        return float(np.median(self.secs)) if self.secs else None

    @property
    def longest_secs(self) -> float | None:
        return max(self.secs, default=None)


class Resharing:
    """Gives members their next shares every so often between `start` and `stop`, or its end.

    The layouts of the plan have their turns. The first one's is when the block ends, so that what
    comes next begins as this did. Raises at the end of the block what a change has raised.

    Args:
        every_secs: from the beginning of one change to that of the next, or as long as it takes;
            None: nothing changes.
    """

    def __init__(self, engine: Engine, every_secs: float | None) -> None:
        self._engine, self._every_secs = engine, every_secs
        self._layouts = [{m.name: m.share or 0 for m in x} for x in engine.plan.layouts]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._change, name="tunerd-shares", daemon=True)
        self._error: Exception | None = None
        self.secs: list[float] = []

    def start(self) -> None:
        """Begin, from any thread."""
        if self._every_secs is not None:
            self._thread.start()

    def stop(self) -> None:
        """Change nothing more, from any thread."""
        self._is_over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        self.stop()
        if raised is not None or self._thread.ident is None:
            return  # an engine that is closed leaves nobody waiting
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._engine.reshare(self._layouts[0])

    def _change(self) -> None:
        assert self._every_secs is not None
        next_at = time.monotonic()
        while not self._is_over.is_set():
            layout = self._layouts[(len(self.secs) + 1) % len(self._layouts)]
            try:
                self.secs.append(self._engine.reshare(layout))
            except Exception as error:  # by whom the thread was started hears of it
                self._error = error
                return
            next_at = max(next_at + self._every_secs, time.monotonic())
            self._is_over.wait(next_at - time.monotonic())


def changes_of(
    secs: Sequence[float], rounds: Sequence[Observed], members: Sequence[Member]
) -> Changes:
    """Return what changes that took so long have cost, by all requests of the rounds."""
    samples = [sample for observed in rounds for sample in observed.samples]
    return Changes(tuple(secs), len(samples), len(lost_of(samples, members)))
