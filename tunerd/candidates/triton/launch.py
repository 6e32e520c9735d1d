"""What a template's candidate launches: one kernel after the other, with the same parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Launch:
    """A kernel, and how it is compiled and started."""

    name: str
    text: str
    grid: tuple[int, int, int]
    warps: int
    stages: int


class _Kernel(Protocol):
    def grid(self, tile: Any) -> tuple[int, int, int]: ...
    def source(self, tile: Any, name: str) -> str: ...


class OneLaunch:
    """A template whose `source` is all that there is."""

    def launches(self: _Kernel, tile: Any, name: str) -> tuple[Launch, ...]:
        """Return the kernels of a cut, in their order."""
        text = self.source(tile, name)
        return (Launch(name, text, self.grid(tile), tile.warps, tile.stages),)
