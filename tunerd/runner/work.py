"""What a slice repeats, beside which others measure, and how that went."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.vocabulary import Build


@dataclass(frozen=True)
class Work:
    """A whole model or one kernel, to be run again and again. Exactly one of the two is set."""

    artifact: str = ""  # path of a folder
    build: Build | None = None  # a kernel; several calls of it are one repeat

    def __post_init__(self) -> None:
        if bool(self.artifact) == (self.build is not None):
            raise ValueError("work is either an artifact or a build")


@dataclass(frozen=True)
class Ran:
    """Every repeat of some work: when it began and ended, in seconds of CLOCK_MONOTONIC.

    That clock is one for all processes of a machine, so that slices can be told when to begin, and
    their repeats can be laid side by side.
    """

    slice_id: str
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    calls: int = 1  # in a repeat

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.ends):
            raise ValueError(f"{len(self.starts)} repeats began and {len(self.ends)} ended")

    @property
    def secs(self) -> tuple[float, ...]:
        """How long each call took, the mean of a repeat's calls."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple((end - start) / self.calls for start, end in pairs)
