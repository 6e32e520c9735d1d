"""Plots as inline SVG: no script, no fixed width, values in <title> for the pointer to show.

Horizontal positions are percentages, so that a plot fills its column and its text keeps its size
on a narrow screen; vertical ones are pixels. Colours come from the page's style sheet by class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunerd.report import HistoryPoint
from tunerd.report.markup import Markup, element, join
from tunerd.report.words import (
    TIMES,
    count_text,
    duration_text,
    is_known,
    percent_text,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.time_use import Stretch
from tunerd.vocabulary import Comparison, Verdict

PLOT_HEIGHT = 240  # of the history, without the line of labels under it
_LABELS_HEIGHT = 24
_MOST_POINTS = 150  # that the pointer can find; more would lie closer than a pixel or two
TIME_TICKS = (0.1, 0.3, 1, 5, 20, 60, 300, 1200, 3600, 18000, 72000, 360000)


def _percent(fraction: float) -> str:
    return f"{100 * min(1.0, max(0.0, fraction)):.2f}%"


def _canvas(height: int, label: str, *children: Markup, class_: str = "plot") -> Markup:
    return element(
        "svg", *children, class_=class_, role="img", aria_label=label, width="100%", height=height
    )


def sample_bar(
    name: str,
    samples: Sequence[float],
    median_secs: float,
    interval: tuple[float, float] | None,
    *,
    scale_secs: float,
    style: str,
) -> Markup:
    """Return a bar up to the median, each sample as a tick on it, the interval as a bracket.

    Samples beyond `scale_secs` are counted in the title and drawn at the end of the scale.
    """
    beyond = sum(s > scale_secs for s in samples)
    title = f"{name}: median {secs_text(median_secs)}, {count_text(len(samples), 'sample')}"
    if interval:
        title += f", 95% interval {secs_range_text(*interval)}"
    if beyond:
        title += f", {beyond} beyond the end of the scale"
    marks = [
        element("title", title),
        element("rect", class_="track", x=0, y=6, width="100%", height=20),
        element(
            "rect", class_=f"bar {style}", x=0, y=6, width=_percent(median_secs / scale_secs),
            height=20,
        ),
    ]  # fmt: skip
    for sample in samples:
        at = _percent(sample / scale_secs)
        marks.append(element("line", class_="sample", x1=at, x2=at, y1=9, y2=23))
    if interval:
        low, high = (_percent(value / scale_secs) for value in interval)
        marks.append(element("line", class_="interval", x1=low, x2=high, y1=3, y2=3))
        marks += [element("line", class_="interval", x1=x, x2=x, y1=0, y2=6) for x in (low, high)]
    return _canvas(32, title, *marks)


def share_bar(fraction: float) -> Markup:
    """Return a thin bar of `fraction` of the width."""
    return _canvas(
        4,
        percent_text(fraction),
        element("rect", class_="track", x=0, y=0, width="100%", height=4),
        element("rect", class_="share", x=0, y=0, width=_percent(fraction), height=4),
        class_="plot thin",
    )


def ratio_scale(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic scale that holds all of `ratios` and one."""
    known = [r for r in ratios if is_known(r) and r > 0]
    return min([0.8, *known]) / 1.05, max([1.25, *known]) * 1.05


def ratio_mark(compared: Comparison, *, scale: tuple[float, float]) -> Markup:
    """Return a ratio and its interval as a dot on a line, with the rule at one that means equal.

    The dot is open unless the verdict is faster or slower.
    """
    ratio, low, high = compared.ratio, compared.ratio_low, compared.ratio_high
    width = math.log(scale[1] / scale[0])

    def at(value: float) -> str:
        return _percent(math.log(max(value, scale[0]) / scale[0]) / width)

    style = {Verdict.FASTER: "better", Verdict.SLOWER: "worse"}.get(compared.verdict, "open")
    text, interval = ratio_texts(ratio, low, high)
    marks = [
        element("title", f"{text}{TIMES}, 95% interval {interval}"),
        element("line", class_="one", x1=at(1), x2=at(1), y1=0, y2=20),
        element("line", class_="gain", x1=at(1), x2=at(ratio), y1=10, y2=10),
        element("line", class_=f"range {style}", x1=at(low), x2=at(high), y1=10, y2=10),
        element("circle", class_=f"dot {style}", cx=at(ratio), cy=10, r=3.5),
    ]
    return _canvas(20, f"{text}{TIMES}", *marks)


def timeline(stretches: Sequence[Stretch], label: str) -> Markup:
    """Return one bar of 100% cut into stretches of time, coloured by what was done."""
    marks = [
        element(
            "rect", element("title", f"{s.activity}: {percent_text(s.end - s.start)}"),
            class_=f"span {s.activity}", x=_percent(s.start), y=0,
            width=_percent(s.end - s.start), height=16,
        )
        for s in stretches
    ]  # fmt: skip
    return _canvas(16, label, *marks)


def history_plot(points: Sequence[HistoryPoint]) -> Markup | None:
    """Return the best weighted latency over time, time on a logarithmic axis.

    The latency axis starts at zero, or is logarithmic where the best fell more than twentyfold.
    None where fewer than two points have a latency.
    """
    known = [p for p in points if is_known(p.weighted_best_secs)]
    steps = _improvements(known)
    if len(steps) < 2:
        return None
    first = min((p.elapsed_secs for p in known if p.elapsed_secs > 0), default=1.0)
    last = max(known[-1].elapsed_secs, first * 1.01)
    values = [_secs(p) for p in steps]
    if max(values) <= 0:
        return None
    log_y = min(values) > 0 and max(values) / min(values) > 20
    low, high = (min(values) / 1.2, max(values) * 1.2) if log_y else (0.0, max(values) * 1.06)

    def x_of(elapsed_secs: float) -> float:
        return math.log(max(elapsed_secs, first) / first) / math.log(last / first)

    def y_of(secs: float) -> float:
        part = math.log(secs / low) / math.log(high / low) if log_y else secs / high
        return PLOT_HEIGHT * (1 - part)

    path = [f"M{1000 * x_of(steps[0].elapsed_secs):.1f} {y_of(values[0]):.1f}"]
    path += [f"H{1000 * x_of(p.elapsed_secs):.1f}V{y_of(_secs(p)):.1f}" for p in steps[1:]]
    line = element(
        "svg",
        element("path", class_="best", d="".join(path), vector_effect="non-scaling-stroke"),
        width="100%", height=PLOT_HEIGHT, viewBox=f"0 0 1000 {PLOT_HEIGHT}",
        preserveAspectRatio="none", overflow="visible",
    )  # fmt: skip
    label = f"Best latency from {secs_text(values[0])} to {secs_text(values[-1])}"
    rules = [_latency_rule(v, y_of(v)) for v in latency_ticks(low, high, log_y)]
    times = [_time_label(t, x_of(t)) for t in TIME_TICKS if first <= t <= last]
    base = element(
        "line", class_="axis", x1=0, x2="100%", y1=PLOT_HEIGHT, y2=PLOT_HEIGHT
    )  # fmt: skip
    return _canvas(
        PLOT_HEIGHT + _LABELS_HEIGHT,
        label,
        join(rules),
        base,
        join(times),
        line,
        _hover(steps, [(x_of(p.elapsed_secs), y_of(_secs(p))) for p in steps]),
        class_="plot history",
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


def _hover(steps: Sequence[HistoryPoint], places: Sequence[tuple[float, float]]) -> Markup:
    """Return a dot per step, under a wide transparent one that the pointer finds."""
    stride = math.ceil(len(steps) / _MOST_POINTS)
    marks = []
    for index in sorted({*range(0, len(steps), stride), len(steps) - 1}):
        point, (x, y) = steps[index], places[index]
        title = (
            f"{secs_text(_secs(point))} after {duration_text(point.elapsed_secs)}, "
            f"{count_text(point.trials, 'trial')}"
        )
        cx, cy = _percent(x), round(y, 1)
        marks.append(
            element(
                "g",
                element("title", title),
                element("circle", class_="hit", r=9, cx=cx, cy=cy),
                element("circle", class_="point", r=3.5, cx=cx, cy=cy),
            )
        )
    return join(marks)


def latency_ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        mantissas = (1, 2, 5) if high / low < 100 else (1,)
        return [m * 10.0**p for p in powers for m in mantissas if low <= m * 10.0**p <= high]
    rough = high / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [step * i for i in range(1, math.floor(high / step) + 1)]


def _latency_rule(secs: float, y: float) -> Markup:
    """Return a rule with its label under it at the left, where the line is above every rule."""
    return join(
        (
            element("line", class_="rule", x1=0, x2="100%", y1=round(y, 1), y2=round(y, 1)),
            element(
                "text", tick_text(secs), class_="tick", x=0, y=round(y + 15, 1),
            ),
        )
    )  # fmt: skip


def tick_text(secs: float) -> str:
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if round(secs * scale, 6) < 1000:
            return f"{secs * scale:.6g} {unit}"
    return f"{secs:.6g} s"


def _time_label(secs: float, x: float) -> Markup:
    anchor = "start" if x < 0.04 else "end" if x > 0.96 else "middle"
    at = _percent(x)
    return join(
        (
            element("line", class_="axis", x1=at, x2=at, y1=PLOT_HEIGHT, y2=PLOT_HEIGHT + 4),
            element(
                "text", duration_text(secs), class_="tick", x=at, y=PLOT_HEIGHT + 18,
                text_anchor=anchor,
            ),
        )
    )  # fmt: skip
