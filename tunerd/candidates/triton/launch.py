"""What a template's candidate launches: one kernel after the other, with the same parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class TensorMap:
    """Of a matrix that the bulk copy engine reads. Extents and the stride are in elements."""

    param: int  # the task's, that holds it
    shape: tuple[int, int]  # the second lies together
    stride: int  # from one of the first to the next
    dtype: str
    block: tuple[int, int]  # that the kernel loads at once


class Boxes(NamedTuple):
    """How a kernel has a tensor map: what it copies at once, and a CUtensorMapSwizzle."""

    block: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Launch:
    """A kernel, and how it is compiled and started."""

    name: str
    text: str
    grid: tuple[int, int, int]
    warps: int
    stages: int
    maps: tuple[TensorMap, ...] = ()  # its last parameters


class _Kernel(Protocol):
    def grid(self, tile: Any) -> tuple[int, int, int]: ...
    def source(self, tile: Any, name: str) -> str: ...


class OneLaunch:
    """A template whose `source` is all that there is."""

    def launches(self: _Kernel, tile: Any, name: str) -> tuple[Launch, ...]:
        """Return the kernels of a cut, in their order."""
        text = self.source(tile, name)
        return (Launch(name, text, self.grid(tile), tile.warps, tile.stages),)
