"""Spot checks -> how far each slice drifted from its first: clocks, heat, neighbours of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from tunerd.vocabulary import Measurement

WARN_ABOVE = 0.05  # of a ratio's distance from one: of that size are differences that decide


@dataclass(frozen=True)
class BaselineCheck:
    """One run of the baseline, the default schedule of a task, in a slice. It is no trial."""

    at: float  # when it ended, seconds since the epoch
    session: int
    task_id: str
    busy_secs: float  # of the slice
    measurement: Measurement

    @property
    def slice_id(self) -> str:
        return self.measurement.slice_id


@dataclass(frozen=True)
class SliceDrift:
    """One slice over time. Ratios are of a check's median to the first one's: above 1 is slower."""

    slice_id: str
    task_id: str
    first_secs: float
    ratios: tuple[tuple[float, float], ...]  # seconds since its first check, ratio; the first is 1
    busy_secs: float  # of all checks

    IN_JSON = ("median_ratio", "late_ratio", "lowest", "highest", "warns")

    @property
    def median_ratio(self) -> float | None:
        """The median of all checks after the first; None where there is no other."""
        later = [ratio for _, ratio in self.ratios[1:]]
        return median(later) if later else None

    @property
    def late_ratio(self) -> float | None:
        """The median of the last third of the checks after the first: where it has drifted to."""
        later = [ratio for _, ratio in self.ratios[1:]]
        return median(later[-max(1, len(later) // 3) :]) if later else None

    @property
    def lowest(self) -> float:
        return min(ratio for _, ratio in self.ratios)

    @property
    def highest(self) -> float:
        return max(ratio for _, ratio in self.ratios)

    @property
    def warns(self) -> bool:
        """Whether most checks, or the last ones, are off by more than WARN_ABOVE."""
        found = (self.median_ratio, self.late_ratio)
        return any(r is not None and abs(r - 1) > WARN_ABOVE for r in found)


def drift(checks: Iterable[BaselineCheck]) -> tuple[SliceDrift, ...]:
    """Return the drift of each slice, in the order of their ids."""
    grouped: dict[tuple[str, str], list[BaselineCheck]] = {}
    for check in sorted(checks, key=lambda c: c.at):
        grouped.setdefault((check.slice_id, check.task_id), []).append(check)
    return tuple(_of_slice(grouped[key]) for key in sorted(grouped))


def _of_slice(checks: list[BaselineCheck]) -> SliceDrift:
    first = checks[0]
    base_secs = first.measurement.median_secs
    return SliceDrift(
        slice_id=first.slice_id,
        task_id=first.task_id,
        first_secs=base_secs,
        ratios=tuple((c.at - first.at, c.measurement.median_secs / base_secs) for c in checks),
        busy_secs=sum(c.busy_secs for c in checks),
    )
