"""Steps of an experiment: each says when it begins and how long it took, and fails by itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_BEGAN = "LAB_BEGAN_AT"  # time.monotonic(), which all processes of a machine share


def since_start() -> float:
    """Return the seconds since the first process of this experiment asked."""
    now = time.monotonic()
    return now - float(os.environ.setdefault(_BEGAN, repr(now)))


def say(what: str) -> None:
    print(f"[{since_start():6.1f} s] {what}", file=sys.stderr, flush=True)


class Steps:
    """Keeps in a document how long steps took, and why one could not be carried out.

    Args:
        document: has `took_secs` and `problems`, both by step.
        write: is called after each step: a kill loses the one that it ends.
        until: seconds since the start, after which no step is begun.
    """

    def __init__(
        self, document: dict[str, Any], write: Callable[[], None], until: float = float("inf")
    ) -> None:
        self._document, self._write, self._until = document, write, until
        document.setdefault("took_secs", {})
        document.setdefault("problems", {})

    @property
    def is_late(self) -> bool:
        """Whether nothing is to be begun any more."""
        return since_start() >= self._until

    def left_secs(self, most: float, keep: float = 0.0) -> float:
        """Return how long a step may take, `most` at most, so that `keep` seconds are left.

        Raises TimeoutError where there is no time for it.
        """
        left = self._until - keep - since_start()
        if left <= 0:
            kept = f", of which {keep:.0f} s are needed" if keep else ""
            raise TimeoutError(f"no time was left: all is to end within {self._until:.0f} s{kept}")
        return min(most, left)

    def problem(self, label: str, error: object) -> None:
        self._document["problems"][label] = str(error)[:600]
        say(f"{label}: could not be measured, because {str(error)[:600]}")

    @contextmanager
    def step(self, what: str, label: str = "") -> Iterator[None]:
        """Carry out the block; what it raises is noted under the label, and not raised."""
        say(what)
        since = time.monotonic()
        try:
            yield
        except Exception as error:
            self.problem(label or what, f"{type(error).__name__}: {error}")
        finally:
            took = self._document["took_secs"][what] = time.monotonic() - since
            say(f"{what} took {took:.1f} s")
            self._write()
