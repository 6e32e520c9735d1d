"""Curves of models over shares, side by side, as one SVG file for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from lab.series_style import FONT, SERIES_STYLE
from tunerd.report.scales import Scale
from tunerd.report.svg import element, join, svg_file
from tunerd.studies.profile.curve import Curve, Point, SmallestShare
from tunerd.system.text import EN_DASH, TIMES, secs_text, significant

_IN_A_ROW = 2
_WIDTH, _HEIGHT = 400, 290  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 34, 82, 34  # around a plot in its panel
_NAME, _LINE = 20, 17  # where a panel's name stands, and what each curve's takes below it
_HEAD = 52  # above all panels
_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the device: what the axis names
_SLOWDOWNS = (1, 1.5, 2, 3, 5, 10, 20, 50)
_MOST_LINES = 3
_STYLE = f"""{SERIES_STYLE}
text {{ font: 12px {FONT}; fill: var(--ink); }}
.title {{ font-weight: 600; font-size: 15px; }}
.name {{ font-weight: 600; font-size: 13px; }}
.soft {{ fill: var(--soft); }}
.interval {{ stroke-width: 1.5; }}
.knee {{ fill: none; stroke-width: 2; }}
.maybe {{ stroke-width: 6; opacity: 0.3; stroke-linecap: round; }}
"""


@dataclass(frozen=True)
class Panel:
    """One model: a curve for each of up to three batches, and the knee of each."""

    name: str
    curves: tuple[Curve, ...]
    knees: tuple[SmallestShare, ...]


def shares_svg(title: str, panels: Sequence[Panel]) -> str:
    """Return the panels side by side: how much slower than on the whole device, by share.

    Raises ValueError where there is none, or one with no curve or with more than three.
    """
    if not panels or not all(0 < len(p.curves) <= _MOST_LINES for p in panels):
        raise ValueError("there is nothing to draw, or a panel of more than three curves")
    most = max(p.slowdown.value for each in panels for c in each.curves for p in c.points)
    scale = Scale(0.93, max(most, 1.5) * 1.1, is_log=True)
    columns = min(_IN_A_ROW, len(panels))
    rows = -(-len(panels) // columns)
    drawn = (
        element(
            "g",
            _panel(each, scale),
            transform=f"translate({16 + number % columns * _WIDTH} "
            f"{_HEAD + number // columns * _HEIGHT})",
        )
        for number, each in enumerate(panels)
    )
    said = (
        "Latency over that on the whole device, by the share obtained. Ringed: the knee; "
        "shaded: where it may be."
    )
    return svg_file(
        title,
        _STYLE,
        16 + columns * _WIDTH,
        _HEAD + rows * _HEIGHT,
        element("text", said, class_="soft", x=16, y=44),
        join(drawn),
    )


def knee_text(answer: SmallestShare) -> str:
    """Return a knee in short: `40%`, `40% or less`, or the shares that it may be.

    >>> knee_text(SmallestShare("none", None, None))
    'unknown'
    """
    if answer.safe is None or answer.least is None:
        return "unknown"
    if answer.found == "cannot tell":
        return f"{answer.least.pct}{EN_DASH}{answer.safe.pct}%"
    return f"{answer.safe.pct}% or less" if answer.found == "at most" else f"{answer.safe.pct}%"


def _panel(panel: Panel, scale: Scale) -> Markup:
    drawn = [element("text", panel.name, class_="name", x=0, y=_NAME)]
    for number, curve in enumerate(panel.curves):
        said = (
            f"batch {curve.batch}: {secs_text(curve.full.latency.value)} on the whole device, "
            f"knee {knee_text(panel.knees[number])}"
        )
        y = _NAME + _LINE * (number + 1)
        drawn.append(element("text", said, class_=f"fill-{number}", x=0, y=y))
    drawn.append(_axes(scale))
    for number, (curve, answer) in enumerate(zip(panel.curves, panel.knees, strict=True)):
        drawn.append(_curve(curve, answer, scale, number))
    return join(drawn)


def _x(part: float) -> float:
    return round(_LEFT + part * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(scale: Scale, slowdown: float) -> float:
    return round(_HEIGHT - _BOTTOM - scale.part(slowdown) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _axes(scale: Scale) -> Markup:
    marks = []
    for value in _SLOWDOWNS:
        if value <= scale.high:
            y = _y(scale, value)
            marks += [
                element("line", class_="rule", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y),
                element(
                    "text", f"{value:g}{TIMES}", class_="soft", x=_LEFT - 6, y=y + 4,
                    text_anchor="end",
                ),
            ]  # fmt: skip
    for part in _SHARES:
        marks.append(
            element(
                "text", f"{part:.0%}", class_="soft", x=_x(part), y=_HEIGHT - _BOTTOM + 18,
                text_anchor="middle",
            )
        )  # fmt: skip
    return join(marks)


def _curve(curve: Curve, answer: SmallestShare, scale: Scale, number: int) -> Markup:
    def at(point: Point) -> tuple[float, float]:
        return _x(point.sm_count / curve.full.sm_count), _y(scale, point.slowdown.value)

    drawn = []
    if answer.safe is not None and answer.least is not None and answer.safe != answer.least:
        between = [p for p in curve.points if _is_between(p, answer)]
        line = "M" + "L".join("{} {}".format(*at(p)) for p in between)
        drawn.append(element("path", class_=f"curve maybe stroke-{number}", d=line))
    line = "M" + "L".join("{} {}".format(*at(p)) for p in curve.points)
    drawn.append(element("path", class_=f"curve stroke-{number}", d=line))
    for point in curve.points:
        x, y = at(point)
        said = (
            f"batch {curve.batch} at {point.pct}%: {secs_text(point.latency.value)}, "
            f"{significant(point.slowdown.value)}{TIMES} the whole device's"
        )
        low, high = (_y(scale, v) for v in (point.slowdown.low, min(point.slowdown.high, 1e6)))
        drawn.append(
            element(
                "g",
                element("title", said),
                element(
                    "line", class_=f"interval stroke-{number}", x1=x, x2=x, y1=low, y2=high
                ),
                element("circle", class_=f"fill-{number}", cx=x, cy=y, r=2.5),
                element("circle", class_=f"knee stroke-{number}", cx=x, cy=y, r=6)
                if point == answer.safe and answer.found != "cannot tell"
                else None,
            )
        )  # fmt: skip
    return join(drawn)


def _is_between(point: Point, answer: SmallestShare) -> bool:
    assert answer.safe is not None
    assert answer.least is not None
    return answer.least.sm_count <= point.sm_count <= answer.safe.sm_count
