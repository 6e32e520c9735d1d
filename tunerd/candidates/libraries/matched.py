"""A task's kernel as one call of a library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from tunerd.vocabulary import Layout

Call = TypeVar("Call", covariant=True)


@dataclass(frozen=True)
class Matched(Generic[Call]):
    """A call, and the parameters of the kernel whose pointers it takes in their order."""

    call: Call
    params: tuple[int, ...]
    casts: tuple[tuple[int, str], ...] = ()  # of weights, into another type
    layouts: tuple[tuple[int, Layout], ...] = ()  # of weights
