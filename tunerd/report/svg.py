"""Inline SVG: elements, bars and marks, with values in <title> for the pointer to show.

Horizontal positions are percentages, so that a plot fills its column and its text keeps its size
on a narrow screen; vertical ones are pixels. Colours come from the page's style sheet by class.
A `str` is text and is escaped where it is used; only `Markup` goes into a page as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from markupsafe import Markup

from tunerd.system.text import (
    TIMES,
    count_text,
    is_known,
    percent_text,
    printable,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.telemetry.time_use import Stretch
from tunerd.vocabulary.outcome import Comparison
from tunerd.vocabulary.verdict import Interval, Verdict

Child = str | Markup | None


def join(children: Iterable[Child]) -> Markup:
    """Return the children one after another, those that are text escaped."""
    return Markup("").join(_text(child) for child in children)


def _text(child: Child) -> Markup:
    return child if isinstance(child, Markup) else Markup(escape(printable(child or "")))


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Return one element. Attributes that are None are left out; `class_` is class, `_` is -."""
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            parts.append(f'{name.rstrip("_").replace("_", "-")}="{escape(printable(shown))}"')
    return Markup(f"<{' '.join(parts)}>{join(children)}</{tag}>")


def svg_file(title: str, style: str, width: int, height: int, *children: Child) -> str:
    """Return a picture that is a file of its own: a page behind its title and children.

    `style` has the classes `page` and `title`, for light and dark pages. Sizes in pixels.
    """
    return element(
        "svg",
        element("style", Markup(f"\n{style}")),
        element("rect", class_="page", width=width, height=height),
        element("text", title, class_="title", x=16, y=24),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        role="img",
        aria_label=title,
    )


def percent(fraction: float) -> str:
    return f"{100 * min(1.0, max(0.0, fraction)):.2f}%"


def canvas(height: int, label: str, *children: Markup, class_: str = "plot") -> Markup:
    return element(
        "svg", *children, class_=class_, role="img", aria_label=label, width="100%", height=height
    )


def sample_bar(
    name: str,
    samples: Sequence[float],
    middle: Interval,
    *,
    scale_secs: float,
    style: str,
) -> Markup:
    """Return a bar up to the median, each sample as a tick on it, the interval as a bracket.

    Samples beyond `scale_secs` are counted in the title and drawn at the end of the scale.
    """
    beyond = sum(s > scale_secs for s in samples)
    title = f"{name}: median {secs_text(middle.value)}, {count_text(len(samples), 'sample')}"
    if is_known(middle.high):
        title += f", 95% interval {secs_range_text(middle.low, middle.high)}"
    if beyond:
        title += f", {beyond} beyond the end of the scale"
    marks = [
        element("title", title),
        element("rect", class_="track", x=0, y=6, width="100%", height=20),
        element(
            "rect", class_=f"bar {style}", x=0, y=6, width=percent(middle.value / scale_secs),
            height=20,
        ),
    ]  # fmt: skip
    for sample in samples:
        at = percent(sample / scale_secs)
        marks.append(element("line", class_="sample", x1=at, x2=at, y1=9, y2=23))
    if is_known(middle.high):
        low, high = (percent(value / scale_secs) for value in (middle.low, middle.high))
        marks.append(element("line", class_="interval", x1=low, x2=high, y1=3, y2=3))
        marks += [element("line", class_="interval", x1=x, x2=x, y1=0, y2=6) for x in (low, high)]
    return canvas(32, title, *marks)


def share_bar(fraction: float) -> Markup:
    """Return a thin bar of `fraction` of the width."""
    return canvas(
        4,
        percent_text(fraction),
        element("rect", class_="track", x=0, y=0, width="100%", height=4),
        element("rect", class_="share", x=0, y=0, width=percent(fraction), height=4),
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
        return percent(math.log(max(value, scale[0]) / scale[0]) / width)

    style = {Verdict.FASTER: "better", Verdict.SLOWER: "worse"}.get(compared.verdict, "open")
    text, interval = ratio_texts(compared.interval)
    marks = [
        element("title", f"{text}{TIMES}, 95% interval {interval}"),
        element("line", class_="one", x1=at(1), x2=at(1), y1=0, y2=20),
        element("line", class_="gain", x1=at(1), x2=at(ratio), y1=10, y2=10),
        element("line", class_=f"range {style}", x1=at(low), x2=at(high), y1=10, y2=10),
        element("circle", class_=f"dot {style}", cx=at(ratio), cy=10, r=3.5),
    ]
    return canvas(20, f"{text}{TIMES}", *marks)


def timeline(stretches: Sequence[Stretch], label: str) -> Markup:
    """Return one bar of 100% cut into stretches of time, coloured by what was done."""
    marks = [
        element(
            "rect", element("title", f"{s.activity}: {percent_text(s.end - s.start)}"),
            class_=f"span {s.activity}", x=percent(s.start), y=0,
            width=percent(s.end - s.start), height=16,
        )
        for s in stretches
    ]  # fmt: skip
    return canvas(16, label, *marks)
