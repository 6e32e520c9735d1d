"""What samples allow to say: a value with its interval, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Verdict(StrEnum):
    """What is said of samples. CANNOT_TELL: they leave it open, whatever was asked."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"  # within the margin that was asked for
    RIGHT = "right"
    WRONG = "wrong"
    YES = "yes"
    NO = "no"
    CANNOT_TELL = "cannot tell"


# What may be said of each question: of two sets of times, of outputs, and of anything else.
SpeedVerdict = Literal[Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.CANNOT_TELL]
Correctness = Literal[Verdict.RIGHT, Verdict.WRONG, Verdict.CANNOT_TELL]
Answer = Literal[Verdict.YES, Verdict.NO, Verdict.CANNOT_TELL]


@dataclass(frozen=True)
class Interval:
    """A value and the two between which it lies, with 95% confidence unless it says otherwise.

    Of ratios of times, those that are called a ratio or a gain are base / new: above 1 is faster.
    A change, a slowdown and a loss are new / base: above 1 is slower.
    """

    value: float
    low: float
    high: float

    def hull(self, other: Interval) -> Interval:
        """Return what holds both intervals, around this one's value."""
        return Interval(self.value, min(self.low, other.low), max(self.high, other.high))

    def is_above(self, limit: float) -> Answer:
        """Say whether the value is above a limit, by the whole interval."""
        if self.low > limit:
            return Verdict.YES
        return Verdict.NO if self.high <= limit else Verdict.CANNOT_TELL

    def is_within(self, limit: float) -> Answer:
        """Say whether the value is at most a limit, by the whole interval."""
        if self.high <= limit:
            return Verdict.YES
        return Verdict.NO if self.low > limit else Verdict.CANNOT_TELL
