"""Estimates against what was measured, as dots with their intervals around the line of equality."""

from __future__ import annotations

from markupsafe import Markup

from tunerd.colocation.planning.estimates import Calibration, Checked
from tunerd.report.scales import Scale, ticks
from tunerd.report.svg import canvas, element, percent

_HEIGHT = 280  # pixels, of the plot
_LABELS = 24  # and below it


def calibration_plot(calibration: Calibration) -> Markup:
    """Return a dot for each pair: measured slowdown across, the estimate without it up.

    Those whose interval does not hold what was measured have another colour.
    """
    values = [
        value
        for each in calibration.checked
        for value in (each.pair.slowdown.value, each.estimate.low, each.estimate.high)
    ]
    scale = Scale(min(values), max(*values, 1.01 * min(values)))
    return canvas(
        _HEIGHT + _LABELS,
        "Estimated over measured slowdown of each pair",
        *(mark for at in ticks(scale) for mark in _rules(at, scale)),
        element("line", class_="axis", x1=0, x2="100%", y1=_HEIGHT, y2=_HEIGHT),
        element("line", class_="one", x1=0, x2="100%", y1=_HEIGHT, y2=0),
        *(_dot(each, scale) for each in calibration.checked),
        class_="plot chart",
    )


def _up(value: float, scale: Scale) -> float:
    return round(_HEIGHT * (1 - scale.part(value)), 1)


def _rules(at: float, scale: Scale) -> tuple[Markup, ...]:
    """Return a rule with its label at the left, and the label of the same value below."""
    said, x, y = f"{at:g}", percent(scale.part(at)), _up(at, scale)
    return (
        element("line", class_="rule", x1=0, x2="100%", y1=y, y2=y),
        element("text", said, class_="tick", x=-8, y=round(y + 4, 1), text_anchor="end"),
        element("text", said, class_="tick", x=x, y=_HEIGHT + 18, text_anchor="middle"),
    )


def _dot(each: Checked, scale: Scale) -> Markup:
    pair, estimate = each.pair, each.estimate
    at, style = percent(scale.part(pair.slowdown.value)), "better" if each.is_covered else "worse"
    low, high = (_up(value, scale) for value in (estimate.low, estimate.high))
    said = (
        f"{pair.of.text} beside {pair.beside.text}: measured {pair.slowdown.value:.3f}, "
        f"estimated {estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
    )
    return element(
        "g",
        element("title", said),
        element("line", class_="gain", x1=at, x2=at, y1=low, y2=high),
        element("circle", class_=f"dot {style}", r=3.5, cx=at, cy=_up(estimate.value, scale)),
        class_="found",
    )
