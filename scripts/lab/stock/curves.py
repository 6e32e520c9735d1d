"""Best latency over time of several runs, as an SVG file of its own for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from lab.series_style import FONT, SERIES_STYLE
from tunerd.report.scales import TIME_TICKS, Scale, latency_tick_text, ticks
from tunerd.report.svg import element, join, svg_file
from tunerd.system.text import duration_text, secs_text

Curve = Sequence[tuple[float, float]]  # (elapsed seconds, best seconds so far), in order of time

_WIDTH, _HEIGHT = 800, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 64, 44
_LOG_FROM = 5.0  # a fall of more than this is drawn on a logarithmic axis
_STYLE = f"""{SERIES_STYLE}
text {{ font: 13px {FONT}; }}
.title {{ fill: var(--ink); font-weight: 600; font-size: 15px; }}
.tick {{ fill: var(--soft); font-size: 12px; }}
.axis {{ stroke: var(--soft); }}
.name {{ font-weight: 600; }}
"""
_MOST_SERIES = 3


def curves_svg(title: str, series: Mapping[str, Sequence[Curve]]) -> str:
    """Return a step plot of named series of curves, time on a logarithmic axis.

    The latency axis starts at zero, or is logarithmic where the best fell more than fivefold.
    Raises ValueError for no curve at all, for more than three series, and for times or latencies
    that are not positive.
    """
    points = [point for curves in series.values() for curve in curves for point in curve]
    if not points or len(series) > _MOST_SERIES:
        raise ValueError(f"{len(series)} series with {len(points)} points cannot be drawn")
    if min(min(point) for point in points) <= 0:
        raise ValueError("times and latencies must be positive")
    first, last = min(t for t, _ in points), max(t for t, _ in points)
    axes = _Axes(first / 1.05, max(last, first * 1.1) * 1.05, [secs for _, secs in points])
    drawn = [
        _drawn(name, number, curve, axes)
        for number, (name, curves) in enumerate(series.items())
        for curve in curves
        if curve
    ]
    return svg_file(title, _STYLE, _WIDTH, _HEIGHT, _legend(series), axes.drawn(), join(drawn))


class _Axes:
    def __init__(self, first_secs: float, last_secs: float, latencies: Sequence[float]) -> None:
        self._first, self._last = first_secs, last_secs
        least, most = min(latencies), max(latencies)
        is_log = most / least > _LOG_FROM
        self._values = Scale(least / 1.2, most * 1.2, True) if is_log else Scale(0.0, most * 1.08)

    def x(self, elapsed_secs: float) -> float:
        part = math.log(elapsed_secs / self._first) / math.log(self._last / self._first)
        return round(_LEFT + part * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, secs: float) -> float:
        part = self._values.part(secs)
        return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM), 1)

    def drawn(self) -> Markup:
        marks = []
        for secs in ticks(self._values):
            y = self.y(secs)
            marks += [
                element("line", class_="rule", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y),
                element(
                    "text",
                    latency_tick_text(secs),
                    class_="tick",
                    x=_LEFT - 8,
                    y=y + 4,
                    text_anchor="end",
                ),
            ]
        base = _HEIGHT - _BOTTOM
        marks.append(element("line", class_="axis", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=base, y2=base))
        for secs in TIME_TICKS:
            if self._first <= secs <= self._last:
                x = self.x(secs)
                marks += [
                    element("line", class_="axis", x1=x, x2=x, y1=base, y2=base + 5),
                    element(
                        "text", duration_text(secs), class_="tick", x=x, y=base + 20,
                        text_anchor="middle",
                    ),
                ]  # fmt: skip
        return join(marks)


def _drawn(name: str, number: int, curve: Curve, axes: _Axes) -> Markup:
    path = f"M{axes.x(curve[0][0])} {axes.y(curve[0][1])}"
    path += "".join(f"H{axes.x(at)}V{axes.y(secs)}" for at, secs in curve[1:])
    at, secs = curve[-1]
    title = f"{name}: {secs_text(secs)} after {duration_text(at)}"
    return element(
        "g",
        element("title", title),
        element("path", class_=f"curve stroke-{number}", d=path),
        element("circle", class_=f"fill-{number}", cx=axes.x(at), cy=axes.y(secs), r=3.5),
    )


def _legend(series: Mapping[str, Sequence[Curve]]) -> Markup:
    names = [
        element("tspan", name, class_=f"name fill-{number}", dx=0 if number == 0 else 18)
        for number, name in enumerate(series)
    ]
    return element("text", join(names), x=16, y=46)
