"""Lines over time or shares as inline SVG: steps of the best latency, clocks and power.

Horizontal positions are percentages, so that a plot fills its column and its text keeps its size
on a narrow screen; vertical ones are pixels. Each point says its values in a <title>, which the
page's script shows beside the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tunerd.report.scales import (
    Scale,
    latency_scale,
    latency_tick_text,
    ticks,
    time_scale,
    time_ticks,
)
from tunerd.report.svg import canvas, element, join, percent
from tunerd.report.view import Plot
from tunerd.system.text import count_text, duration_text, is_known, secs_text
from tunerd.telemetry.history import HistoryPoint

MOST_LINES = 6  # that a plot has colours for
_LABELS_HEIGHT = 24
_MOST_POINTS = 150  # that the pointer can find; more would lie closer than a pixel or two
_LOG_LATENCY_FROM = 20.0


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    text: str  # what the pointer is told
    low: float | None = None  # of the band around the line
    high: float | None = None


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    is_steps: bool = False


def line_plot(
    lines: Sequence[Line],
    *,
    label: str,
    time: Scale,
    values: Scale,
    value_text: Callable[[float], str],
    height: int,
    places: Sequence[tuple[float, str]] | None = None,
) -> Markup:
    """Return lines over time, each in its colour; those after the sixth are not drawn.

    A line of one point is a dot: such a path draws nothing.

    `places` are the labels of an axis that is not time: where they stand, and what they say.
    """
    if places is None:
        places = [(t, duration_text(t)) for t in time_ticks(time)]
    lines = lines[:MOST_LINES]
    drawn = [
        mark for number, line in enumerate(lines) for mark in _drawn(line, number, time, values)
    ]
    curves = element(
        "svg",
        *(_stretched(mark) for mark in drawn),
        width="100%", height=height, viewBox="0 0 1000 1000",
        preserveAspectRatio="none", overflow="visible",
    )  # fmt: skip
    return canvas(
        height + _LABELS_HEIGHT,
        label,
        join(_rule(value_text(v), height * (1 - values.part(v))) for v in ticks(values)),
        element("line", class_="axis", x1=0, x2="100%", y1=height, y2=height),
        join(_place_label(said, time.part(at), height) for at, said in places),
        curves,
        *(_found(line, number, time, values, height) for number, line in enumerate(lines)),
        class_="plot chart",
    )


def legend(names: Sequence[str]) -> Plot:
    """Return which colour is which of the plots that follow."""
    return Plot(Markup(), names=names[:MOST_LINES])


# --- the best latency --------------------------------------------------------------------------


def history_plot(points: Sequence[HistoryPoint], *, height: int = 240) -> Markup | None:
    """Return the best weighted latency over time; None with fewer than two latencies."""
    return histories_plot({"": points}, height=height)


def histories_plot(
    histories: Mapping[str, Sequence[HistoryPoint]], *, height: int = 240
) -> Markup | None:
    """Return the best weighted latencies of runs over time; None where there is no line to draw.

    Both axes are logarithmic where they span much; otherwise latencies start at zero.
    """
    known = {
        name: [p for p in points if is_known(p.weighted_best_secs)]
        for name, points in histories.items()
    }
    steps = {name: _improvements(points) for name, points in known.items()}
    values = [_secs(p) for of in steps.values() for p in of]
    if all(len(of) < 2 for of in steps.values()) or max(values) <= 0:
        return None
    times = [p.elapsed_secs for of in known.values() for p in of]
    lines = [
        Line(name, [Point(p.elapsed_secs, _secs(p), _said(name, p)) for p in of], is_steps=True)
        for name, of in steps.items()
    ]
    label = "; ".join(
        f"{line.name or 'Best latency'} from {secs_text(line.points[0].y)} to "
        f"{secs_text(line.points[-1].y)}"
        for line in lines
        if line.points
    )
    return line_plot(
        lines,
        label=label,
        time=time_scale(min((t for t in times if t > 0), default=1.0), max(times)),
        values=latency_scale(min(values), max(values), log_from=_LOG_LATENCY_FROM),
        value_text=latency_tick_text,
        height=height,
    )


def _said(name: str, point: HistoryPoint) -> str:
    return (f"{name}: " if name else "") + (
        f"{secs_text(_secs(point))} after {duration_text(point.elapsed_secs)}, "
        f"{count_text(point.trials, 'trial')}"
    )


def _secs(point: HistoryPoint) -> float:
    return point.weighted_best_secs or 0.0


def _improvements(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    """Return the points at which the best changed, and the last."""
    steps: list[HistoryPoint] = []
    for point in points:
        if not steps or point.weighted_best_secs != steps[-1].weighted_best_secs:
            steps.append(point)
    if steps and steps[-1] is not points[-1]:
        steps.append(points[-1])
    return steps


# --- marks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Path:
    """A path in fractions of the plot, from its top left."""

    style: str
    starts: tuple[float, float]
    then: Sequence[tuple[float, float]]
    is_steps: bool = False
    is_closed: bool = False


def _drawn(line: Line, number: int, time: Scale, values: Scale) -> list[_Path]:
    places = [(time.part(p.x), 1 - values.part(p.y)) for p in line.points]
    if not places:
        return []
    paths = []
    banded = [(p.x, p.low, p.high) for p in line.points if p.low is not None and p.high is not None]
    if banded:
        top = [(time.part(x), 1 - values.part(high)) for x, _, high in banded]
        bottom = [(time.part(x), 1 - values.part(low)) for x, low, _ in reversed(banded)]
        paths.append(_Path(f"band line-{number}", top[0], [*top[1:], *bottom], is_closed=True))
    paths.append(_Path(f"curve line-{number}", places[0], places[1:], is_steps=line.is_steps))
    return paths


def _stretched(path: _Path) -> Markup:
    """Return a path in a box of 1000 by 1000, which is stretched to the plot's size."""
    pieces = [f"M{1000 * path.starts[0]:.1f} {1000 * path.starts[1]:.1f}"]
    for x, y in ((1000 * x, 1000 * y) for x, y in path.then):
        pieces.append(f"H{x:.1f}V{y:.1f}" if path.is_steps else f"L{x:.1f} {y:.1f}")
    if path.is_closed:
        pieces.append("Z")
    return element("path", class_=path.style, d="".join(pieces), vector_effect="non-scaling-stroke")


def _found(line: Line, number: int, time: Scale, values: Scale, height: int) -> Markup:
    """Return a dot per point, under a wide transparent one that the pointer finds."""
    stride = max(1, math.ceil(len(line.points) / _MOST_POINTS))
    shown = sorted({*range(0, len(line.points), stride), max(0, len(line.points) - 1)})
    alone = " alone" if len(line.points) == 1 else ""
    marks = []
    for index in shown if line.points else ():
        point = line.points[index]
        cx, cy = percent(time.part(point.x)), round(height * (1 - values.part(point.y)), 1)
        marks.append(
            element(
                "g",
                element("title", point.text),
                element("circle", class_="hit", r=9, cx=cx, cy=cy),
                element("circle", class_=f"point line-{number}{alone}", r=3.5, cx=cx, cy=cy),
                class_="found",
            )
        )
    return join(marks)


def _rule(text: str, y: float) -> Markup:
    """Return a rule with its label in the margin at the left."""
    return join(
        (
            element("line", class_="rule", x1=0, x2="100%", y1=round(y, 1), y2=round(y, 1)),
            element("text", text, class_="tick", x=-8, y=round(y + 4, 1), text_anchor="end"),
        )
    )


def _place_label(said: str, x: float, height: int) -> Markup:
    anchor = "end" if x > 0.96 else "middle"
    at = percent(x)
    return join(
        (
            element("line", class_="axis", x1=at, x2=at, y1=height, y2=height + 4),
            element("text", said, class_="tick", x=at, y=height + 18, text_anchor=anchor),
        )
    )
