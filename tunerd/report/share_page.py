"""The page about a model over shares: latency and throughput, the knee, every figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tunerd.report import html
from tunerd.report.plot import MOST_LINES, Line, Point, line_plot
from tunerd.report.scales import Scale, latency_scale, latency_tick_text
from tunerd.report.share_text import (
    curve_grid,
    mark_text,
    profile_json,
    sentences,
    title_text,
)
from tunerd.report.view import Items, Plot, Section, View, caption
from tunerd.studies.profile.folder import REPORT, RESULT, write_json
from tunerd.system.text import count_text, secs_text, significant

if TYPE_CHECKING:
    from pathlib import Path

    from tunerd.studies.profile import curve as shares
    from tunerd.studies.profile.profile import Profile

_HEIGHT = 240
_LOG_FROM = 20.0
_FEW_PLACES = 0.07  # of the axis: labels that are nearer would touch


def write_profile(profile: Profile, root: Path) -> None:
    """Write the page and the document of a profile into its folder."""
    write_json(root / RESULT, profile_json(profile))
    html.write_page(root / REPORT, share_page(profile))


def share_page(profile: Profile) -> str:
    """Return the page about a profile."""
    lead = (
        f"Each share alone on the device, in {count_text(profile.rounds, 'round')} that visit each "
        "share in an order of their own, one client that waits for each answer. The knee is the "
        "smallest share at which an inference takes no longer than the loss allows, by intervals; "
        "it goes by the loss, and by SMs alone, since caches and memory bandwidth are not cut."
    )
    return html.page(
        View(
            title_text(profile),
            (
                Section("Which share", [Items(sentences(profile))], lead),
                _latency_section(profile),
                _throughput_section(profile),
                *(
                    Section(f"Batch {curve.batch}", [curve_grid(profile, curve)])
                    for curve in profile.curves
                ),
            ),
        )
    )


def _latency_section(profile: Profile) -> Section:
    values = [p.latency.value for curve in profile.curves for p in curve.points]
    return _plotted(
        profile,
        "Latency",
        "Medians of rounds with their 95% interval, by the part of the device obtained.",
        [
            [
                Point(
                    _part(curve, p),
                    p.latency.value,
                    f"batch {curve.batch} at {p.pct}%: {secs_text(p.latency.value)} "
                    f"{mark_text(profile, curve, p)}".rstrip(),
                    low=p.latency.low if math.isfinite(p.latency.high) else None,
                    high=p.latency.high if math.isfinite(p.latency.high) else None,
                )
                for p in curve.points
            ]
            for curve in profile.curves
        ],
        latency_scale(min(values), max(values), log_from=_LOG_FROM),
        latency_tick_text,
    )


def _throughput_section(profile: Profile) -> Section:
    values = [p.per_sec for curve in profile.curves for p in curve.points]
    return _plotted(
        profile,
        "Throughput",
        "Inputs per second of one client: a batch of 8 counts eight.",
        [
            [
                Point(
                    _part(curve, p),
                    p.per_sec,
                    f"batch {curve.batch} at {p.pct}%: {significant(p.per_sec)} per second",
                )
                for p in curve.points
            ]
            for curve in profile.curves
        ],
        latency_scale(min(values), max(values), log_from=_LOG_FROM),
        lambda value: f"{value:,.6g}",
    )


def _plotted(
    profile: Profile,
    title: str,
    about: str,
    lines: list[list[Point]],
    values: Scale,
    value_text: Callable[[float], str],
) -> Section:
    names = [f"batch {curve.batch}" for curve in profile.curves]
    least = min(point.x for line in lines for point in line)
    if least >= 1 or len(lines[0]) < 2:
        return Section(title, lead="One share alone was measured: there is no line to draw.")
    plot = line_plot(
        [Line(name, line) for name, line in zip(names, lines, strict=True)],
        label=f"{title} of {profile.name} over shares",
        time=Scale(least, 1.0),
        values=values,
        value_text=value_text,
        height=_HEIGHT,
        places=_places(profile.curves[0], least),
    )
    if len(names) > MOST_LINES:
        about += f" Drawn are the first {MOST_LINES} batches."
    return Section(title, (Plot(plot, names=names[:MOST_LINES]), caption(about)))


def _part(curve: shares.Curve, point: shares.Point) -> float:
    return point.sm_count / curve.full.sm_count


def _places(curve: shares.Curve, least: float) -> list[tuple[float, str]]:
    """Return the shares as labels, those left out that would touch the one before."""
    places: list[tuple[float, str]] = []
    for point in reversed(curve.points):
        at = _part(curve, point)
        if not places or places[-1][0] - at >= _FEW_PLACES * (1 - least):
            places.append((at, f"{point.pct}%"))
    return places
