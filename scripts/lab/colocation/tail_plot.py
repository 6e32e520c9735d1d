#!/usr/bin/env python3
"""Draw throughput against p99 for all ways to run eight models, a panel for each saturation.json.

    PYTHONPATH=.:scripts python3 -m lab.colocation.tail_plot */saturation.json --out FILE.svg

Each way is a dot: inferences per second of all tenants, and the 99th percentile, both with one of
each model in flight. Named are first those of a family that none beats in both, then others where
there is room.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from lab.colocation.figures import p99_ms
from lab.colocation.saturation_table import is_batched, latencies_of, samples_of
from lab.lab import load
from lab.series_style import FONT, SERIES_STYLE
from tunerd.report.scales import Scale, latency_tick_text, ticks
from tunerd.report.svg import element, join, svg_file
from tunerd.system.text import secs_text, significant

FAMILIES = ("PyTorch", "artifacts in the same places", "the engine")
_NAMED = ", one after another"
_WIDTH, _HEIGHT = 860, 400  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 30, 40  # around a plot in its panel
_HEAD = 60  # above all panels
_CHARACTER, _LINE = 6.3, 14  # of a name
_STYLE = f"""{SERIES_STYLE}
text {{ font: 12px {FONT}; fill: var(--ink); }}
.title {{ font-weight: 600; font-size: 15px; }}
.name {{ font-weight: 600; font-size: 13px; }}
.soft {{ fill: var(--soft); }}
.family {{ font-weight: 600; }}
"""


@dataclass(frozen=True)
class Dot:
    label: str
    family: int
    per_sec: float
    p99_secs: float

    @property
    def name(self) -> str:
        """What stands beside it: its way, without what its colour says."""
        first, _, rest = self.label.partition(", ")
        if self.family != 1:
            return rest
        return f"{rest}, {first}" if first.startswith("tuned") else self.label


def dots_of(document: Mapping[str, Any]) -> list[Dot]:
    """Return the ways whose tail is known."""
    found = []
    for label, rates in samples_of(document, "closed").items():
        family = 0 if label.startswith("PyTorch") else 2 if label.startswith("engine") else 1
        tail = p99_ms(latencies_of(document, label))
        if tail is not None and not is_batched(label):
            found.append(Dot(label, family, statistics.median(rates), tail / 1e3))
    return found


def front(dots: Sequence[Dot]) -> list[Dot]:
    """Return the dots that none of their family beats in both, the highest throughput first."""
    found: list[Dot] = []
    for dot in sorted(dots, key=lambda each: (-each.per_sec, each.p99_secs)):
        mine = [each for each in found if each.family == dot.family]
        if not mine or dot.p99_secs < min(each.p99_secs for each in mine):
            found.append(dot)
    return found


def tails_svg(title: str, panels: Mapping[str, Sequence[Dot]]) -> str:
    """Return the panels, one below the other; ValueError where there is nothing to draw."""
    if not panels or not all(panels.values()):
        raise ValueError("there is nothing to draw, or a panel without a dot")
    drawn = (
        element(
            "g", _panel(name, dots), transform=f"translate(0 {_HEAD + number * _HEIGHT})"
        )
        for number, (name, dots) in enumerate(panels.items())
    )  # fmt: skip
    families = join(
        element("tspan", name, class_=f"family fill-{i}", dx=0 if i == 0 else 18)
        for i, name in enumerate(FAMILIES)
    )
    return svg_file(
        title, _STYLE, _WIDTH, _HEAD + len(panels) * _HEIGHT,
        element("text", families, x=16, y=46), *drawn,
    )  # fmt: skip


class _Axes:
    def __init__(self, dots: Sequence[Dot]) -> None:
        tails = [dot.p99_secs for dot in dots]
        self.across = Scale(0.0, max(dot.per_sec for dot in dots) * 1.28)
        self.up = Scale(min(tails) / 1.3, max(tails) * 1.3, is_log=True)

    def x(self, per_sec: float) -> float:
        return round(_LEFT + self.across.part(per_sec) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, secs: float) -> float:
        return round(_HEIGHT - _BOTTOM - self.up.part(secs) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def drawn(self) -> Iterator[Markup]:
        base = _HEIGHT - _BOTTOM
        for secs in ticks(self.up):
            y = self.y(secs)
            yield element("line", class_="rule", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y)
            said = latency_tick_text(secs)
            yield element("text", said, class_="soft", x=_LEFT - 8, y=y + 4, text_anchor="end")
        step = ticks(Scale(0.0, self.across.high / 2))[0]
        for rate in np.arange(step, self.across.high, step):
            x = self.x(rate)
            yield element("line", class_="rule", x1=x, x2=x, y1=_TOP, y2=base)
            said = f"{rate:,.6g}/s"
            yield element("text", said, class_="soft", x=x, y=base + 18, text_anchor="middle")


def _panel(name: str, dots: Sequence[Dot]) -> Markup:
    axes = _Axes(dots)
    drawn = [element("text", name, class_="name", x=16, y=16), *axes.drawn()]
    for dot in dots:
        said = f"{dot.label}: {significant(dot.per_sec)}/s, p99 {secs_text(dot.p99_secs)}"
        circle = element(
            "circle", class_=f"fill-{dot.family}", cx=axes.x(dot.per_sec), cy=axes.y(dot.p99_secs),
            r=4.5,
        )  # fmt: skip
        drawn.append(element("g", element("title", said), circle))
    return join([*drawn, *_names(dots, axes)])


def _names(dots: Sequence[Dot], axes: _Axes) -> Iterator[Markup]:
    """Name the best, the usual and the others, where there is room: each has its tooltip."""
    at = [(axes.x(dot.per_sec), axes.y(dot.p99_secs)) for dot in dots]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    usual = [dot for dot in dots if dot.label.endswith(_NAMED)]
    for dot in dict.fromkeys([*front(dots), *usual, *dots]):
        x, y, wide = axes.x(dot.per_sec), axes.y(dot.p99_secs), len(dot.name) * _CHARACTER
        right, left = (x + 8, "start"), (x - 8 - wide, "end")
        places = [(*side, y - _LINE / 2) for side in (right, left)]
        places += [(x - wide / 2, "middle", y + down) for down in (-8 - _LINE, 8)]
        places += [(*side, y + down) for down in (-2 - _LINE, 2) for side in (right, left)]
        for start, anchor, top in places:
            box = (start, top, start + wide, top + _LINE)
            is_inside = box[0] >= _LEFT and box[2] <= _WIDTH and box[1] >= _TOP
            if is_inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                at_x = start + wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
                yield element(
                    "text", dot.name, class_=f"fill-{dot.family}", x=round(at_x, 1),
                    y=round(top + 11, 1), text_anchor=anchor,
                )  # fmt: skip
                break


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--title", default="Eight models on one GPU: throughput against p99")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    panels = {}
    for path in options.files:
        document = load(path)
        name = f"8 x {document['model']}, {document['precision']}, {document.get('device', '')}"
        panels[name] = dots_of(document)
    options.out.write_text(tails_svg(options.title, panels) + "\n")


if __name__ == "__main__":
    main()
