"""Measured points: what one launch takes at a share, with so many tenants in it.

A point is of an entry of the mix, whose members have one architecture. Points are data: a profile
gives those of one tenant, a file in JSON any:

    [{"of": "resnet", "share": 25, "together": 8, "units": 32, "secs": [0.0021, 0.0020, 0.0022],
      "tail_secs": 0.0023, "source": "results/x"}, ...]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tunerd.errors import InputError
from tunerd.system.text import reason_of
from tunerd.vocabulary.verdict import Interval


@dataclass(frozen=True)
class Origin:
    """Where a point was found that this plan did not measure itself."""

    where: str  # a store or a file
    host: str = ""  # the machine that measured it; "" where nobody noted it
    measured_at: float | None = None  # seconds since the epoch


@dataclass(frozen=True)
class Point:
    """A launch at a share: of `together` tenants, on so many SMs or cores."""

    of: str  # entry of the mix
    share: int  # percent
    together: int
    units: int  # obtained; 0 where nobody said
    secs: Interval  # of a launch, its median
    tail_secs: float  # that 95 of 100 launches take at most
    source: str  # where it was measured, for people
    origin: Origin | None = None  # None: this plan measured it

    def __post_init__(self) -> None:
        if not (0 < self.secs.low <= self.secs.value <= self.secs.high and self.tail_secs > 0):
            raise ValueError(f"a point of {self.of} at {self.share}% holds no times")


class Curves:
    """Points by entry, share and tenants per launch. Of two of one kind the later is kept."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points: dict[tuple[str, int, int], Point] = {}
        for point in points:
            self._points[point.of, point.share, point.together] = point

    def __iter__(self) -> Any:
        return iter(self._points.values())

    def add(self, points: Iterable[Point]) -> None:
        for point in points:
            self._points[point.of, point.share, point.together] = point

    def at(self, of: str, share: int, together: int = 1) -> Point | None:
        return self._points.get((of, share, together))

    def shares(self, of: str, together: int = 1) -> tuple[int, ...]:
        """Return the shares at which an entry has a point, the smallest first."""
        return tuple(sorted(s for o, s, t in self._points if (o, t) == (of, together)))

    def together(self, of: str, share: int) -> tuple[int, ...]:
        """Return of how many tenants launches were measured at a share, the fewest first."""
        return tuple(sorted(t for o, s, t in self._points if (o, s) == (of, share)))

    def json(self) -> list[dict[str, Any]]:
        return [
            point_json(point) | {"origin": asdict(point.origin) if point.origin else None}
            for point in self
        ]


def with_ends(interval: Interval) -> Interval:
    """Return an interval whose ends are numbers above 0: of one round they are not."""
    value, low, high = interval.value, interval.low, interval.high
    return Interval(value, low if low > 0 else value, high if math.isfinite(high) else value)


def point_json(p: Point) -> dict[str, Any]:
    """Return a point as `point_of` reads it, for json.dumps."""
    return {
        "of": p.of,
        "share": p.share,
        "together": p.together,
        "units": p.units,
        "secs": [p.secs.value, p.secs.low, p.secs.high],
        "tail_secs": p.tail_secs,
        "source": p.source,
    }


_ENTRY = TypeAdapter(Mapping[str, Any])


def read_points(path: Path) -> list[Point]:
    """Read a file of points; InputError where it is none."""
    try:
        origin = Origin(str(path))
        return [replace(point_of(entry), origin=origin) for entry in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError, ValidationError) as error:
        reason = reason_of(error)
        raise InputError(f"{path} cannot be read: {reason}; give measured points in JSON") from None


def point_of(entry: Any) -> Point:
    """Return the point that a document says; ValueError, KeyError or TypeError where it is none."""
    said = _ENTRY.validate_python(entry)
    value, *ends = (float(secs) for secs in said["secs"])
    low, high = ends or (value, value)
    return Point(
        of=str(said["of"]),
        share=int(said["share"]),
        together=int(said.get("together", 1)),
        units=int(said.get("units", 0)),
        secs=Interval(value, low, high),
        tail_secs=float(said.get("tail_secs", value)),
        source=str(said.get("source", "given")),
    )
