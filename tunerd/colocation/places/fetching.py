"""Launches whose outputs are large: when they are there, and the caller may have them.

Very large ones are not copied behind the launch, as a piece that keeps everybody's copies waiting:
when it is seen to have ended, its outputs are brought to the host in parts, a few queued at a time,
in the order of launching (places/bringing.py). Where callers keep all memory in which outputs may
stay, a thread copies them, and whoever looks at other launches does not wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.colocation.places.bringing import Bringing
from tunerd.colocation.places.completions import Launched
from tunerd.colocation.places.staged import InParts, Part


class Fetched(Launched):
    """A launch that has ended when its outputs can be read without a copy.

    Args:
        launched: what tells when the graph has ended.
        staged: of whose outputs that is the last graph.
        fetching: of the lane, where they come in parts.
    """

    def __init__(
        self, launched: Launched, staged: InParts, fetching: Bringing[Fetched] | None
    ) -> None:
        self._launched, self._staged, self._fetching = launched, staged, fetching
        self._has_ended = self._are_queued = self._is_given_up = False
        self._parts: Sequence[Part] = ()
        self._error: Exception | None = None

    def is_done(self) -> bool:
        if not self._has_ended:
            if not self._launched.is_done():
                return False
            self._has_ended = True
            if self._fetching is not None and not self._fetching.is_left:
                self._fetching.add(self)
        if self._error is not None:
            raise self._error
        if self._fetching is None:
            return self._staged.is_readable()
        if self._is_given_up or self._fetching.is_left:  # nobody is told
            return True
        return self._are_queued and self._parts[-1].is_done() and self._staged.is_readable()

    # --- as what waits for its turn ------------------------------------------------------------

    def begin(self) -> Sequence[Part]:
        self._parts = self._staged.parts_back()
        return self._parts

    def launch(self) -> None:
        self._are_queued = True

    def give_up(self) -> None:
        self._is_given_up = True

    def failed(self, error: Exception) -> None:
        self._error = error
