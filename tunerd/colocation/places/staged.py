"""What members and groups are on a GPU: what a seat launches, and what makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tunerd.artifacts.segments import Cut
from tunerd.colocation.groups import ForSeveral
from tunerd.vocabulary import Arrays


class Part(Protocol):
    """A part of large inputs or outputs: one of artifacts/parts.py.

    goes_alone: those behind it are queued when it has ended.
    """

    @property
    def goes_alone(self) -> bool: ...
    def queue(self, stream: int) -> None: ...
    def is_done(self) -> bool: ...


class InParts(Protocol):
    """What may have its inputs brought in parts before its launch, and its outputs after that."""

    fetches_apart: bool
    may_go_in_parts: bool
    comes_in_parts: bool

    def goes_in_parts(self, given: Any) -> bool: ...
    def begin(self, given: Any, stream: int | None) -> Sequence[Part]: ...
    def follow(self, stream: int, *, fetch: int | None = None, leaves: bool = False) -> None: ...
    def give_up(self) -> None: ...
    def parts_back(self) -> Sequence[Part]: ...
    def is_readable(self) -> bool: ...


class Staged(InParts, Protocol):
    """What a whole member launches, or a group: a StagedModel, or StagedLanes."""

    def launch(
        self,
        given: Any,
        stream: int,
        *,
        bring: int | None = None,
        fetch: int | None = None,
        leaves: bool = False,
    ) -> None: ...
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def secs(self) -> float: ...
    def read(self) -> Any: ...


class Piece(Protocol):
    """One of several graphs of a model: a MarkedGraph."""

    def launch(self, stream: int) -> None: ...
    def is_done(self) -> bool: ...
    def secs(self) -> float: ...


class InPieces(InParts, Protocol):
    """A member in segments: StagedSegments."""

    segment_secs: tuple[float, ...]
    ends: tuple[int, ...]

    @property
    def pieces(self) -> Sequence[Piece]: ...
    def launch(self, inputs: Arrays, stream: int) -> None: ...
    def read(self) -> Arrays: ...


class CudaModel(Protocol):
    """What a member is loaded as: a LoadedModel for a GPU."""

    def staged(self, stream: int, count: int = 1) -> Sequence[Staged]: ...
    def staged_segments(self, stream: int, limits: Cut) -> InPieces: ...


class CudaGroup(ForSeveral, Protocol):
    """What a group is loaded as: a SuperModel for a GPU."""

    def staged_lanes(self, stream: int, count: int = 1) -> Mapping[int, Sequence[Staged]]: ...
