"""Matrices of artifacts, tuned at one share and run at another, as one SVG file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tunerd.report.svg import element, join, svg_file
from tunerd.system.text import secs_text

# Losses from which a cell is redder.
HEAT = (1.01, 1.03, 1.1, 1.3, 2.0)
_REDNESS = (0.0, 0.08, 0.18, 0.32, 0.5, 0.7)  # opacity of a cell, by `heat_of`
_IN_A_ROW = 2
_CELL, _LINE = 58, 34  # a cell's width and height
_HEAD = 96  # width of the names of rows
_TOP, _NAME = 64, 44  # heights above all maps, and above each
_GAP = 28
_STYLE = """
:root { --page: #fcfcfa; --ink: #1c1e21; --soft: #62676d; --bad: #c0392b; --good: #0f766e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181a; --ink: #e8e8e4; --soft: #9da2a7; --bad: #e2604f; --good: #3fa796; }
}
text { font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
text { fill: var(--ink); }
.page { fill: var(--page); }
.title { font-weight: 600; font-size: 15px; }
.soft { fill: var(--soft); }
.loss { font-size: 10px; }
.name { font-weight: 600; font-size: 13px; }
.cell { fill: var(--bad); }
.best { fill: var(--good); fill-opacity: 0.22; }
.own { fill: none; stroke: var(--ink); stroke-width: 1.5; }
"""


@dataclass(frozen=True)
class HeatMap:
    """The cells of one model: seconds, and how often the best artifact's there, by (row, column).

    Rows are the shares that artifacts were tuned at, in percent, 0 for default schedules; columns
    those that they ran at.
    """

    name: str
    cells: Mapping[tuple[int, int], tuple[float, float]]


def heat_of(loss: float) -> int:
    """Return the colour of a loss, 0 for none.

    >>> [heat_of(x) for x in (1.0, 1.02, 1.5, 9.0)]
    [0, 1, 4, 5]
    """
    return sum(loss >= limit for limit in HEAT)


def heat_svg(title: str, maps: Sequence[HeatMap]) -> str:
    """Return the maps side by side. Raises ValueError where there is none, or one without cells."""
    if not maps or not all(each.cells for each in maps):
        raise ValueError("there is nothing to draw")
    sizes = [_size(each) for each in maps]
    wide, high = max(w for w, _ in sizes) + _GAP, max(h for _, h in sizes) + _GAP
    columns = min(_IN_A_ROW, len(maps))
    width, height = 16 + columns * wide, _TOP + -(-len(maps) // columns) * high
    placed = (
        element(
            "g",
            _map(each),
            transform=f"translate({16 + number % columns * wide} "
            f"{_TOP + number // columns * high})",
        )
        for number, each in enumerate(maps)
    )
    limits = ", ".join(f"{100 * (x - 1):.0f}%" for x in HEAT)
    legend = f"Rows: tuned at. Columns: run at. Redder from {limits} over the best of a column."
    said = element("text", legend, class_="soft", x=16, y=44)
    return svg_file(title, _STYLE, width, height, said, join(placed))


def _rows(cells: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({row for row, _ in cells}, key=lambda row: (row == 0, row))


def _size(each: HeatMap) -> tuple[int, int]:
    columns = {column for _, column in each.cells}
    return _HEAD + _CELL * len(columns), _NAME + _LINE * len(_rows(each.cells))


def _map(each: HeatMap) -> Markup:
    columns = sorted({column for _, column in each.cells})
    drawn = [element("text", each.name, class_="name", x=0, y=16)]
    drawn += [
        _text(f"{share}%", _HEAD + _CELL * (i + 0.5), _NAME - 8, "soft")
        for i, share in enumerate(columns)
    ]
    for j, row in enumerate(_rows(each.cells)):
        y = _NAME + _LINE * j
        label = "default" if row == 0 else f"{row}%"
        drawn.append(
            element("text", label, class_="soft", x=_HEAD - 10, y=y + 21, text_anchor="end")
        )
        for i, column in enumerate(columns):
            if (row, column) in each.cells:
                secs, loss = each.cells[row, column]
                drawn.append(_cell(_HEAD + _CELL * i, y, secs, loss, is_own=row == column))
    return join(drawn)


def _cell(x: int, y: int, secs: float, loss: float, *, is_own: bool) -> Markup:
    box = {"x": x + 1, "y": y + 1, "width": _CELL - 2, "height": _LINE - 2, "rx": 3}
    heat = heat_of(loss)
    return join(
        (
            element("rect", class_="best", **box)
            if heat == 0
            else element("rect", class_="cell", fill_opacity=_REDNESS[heat], **box),
            element("rect", class_="own", **box) if is_own else None,
            _text(secs_text(secs), x + _CELL / 2, y + 15),
            _text(f"{100 * (loss - 1):+.1f}%", x + _CELL / 2, y + 27, "loss"),
        )
    )


def _text(text: str, x: float, y: float, class_: str | None = None) -> Markup:
    return element("text", text, class_=class_, x=x, y=y, text_anchor="middle")
