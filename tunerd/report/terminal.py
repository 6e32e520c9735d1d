"""Blocks of a view for rich to print."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunerd.report.view import Block, Cell, Grid, Items, Words
from tunerd.system.text import one_line, printable


def table(
    grid: Grid, *, gap: int = 2, least_width: int | None = None, small: bool = False
) -> Table:
    """Return a table; `gap` is between columns, `least_width` that of the first.

    Args:
        small: whether to show the small print, in parentheses.
    """
    shown = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    shown.show_header = any(grid.heads)
    for number, head in enumerate(grid.heads):
        if number in grid.numbers:
            shown.add_column(head, justify="right", no_wrap=True)
        else:
            shown.add_column(head, overflow="fold", min_width=None if number else least_width)
    for row in grid.rows:
        cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
        shown.add_row(
            *(
                # What is no number may be a name.
                Text(c.text if i in grid.numbers else _text(c, small), style=c.style)
                for i, c in enumerate(cells)
            )
        )
    return shown


def _text(cell: Cell, small: bool) -> str:
    if cell.is_message:
        return printable(cell.text)
    return one_line(f"{cell.text} ({cell.small})" if small and cell.small else cell.text)


def shown(blocks: Iterable[Block | str | None], *, spaced: bool = False) -> Group:
    """Return sentences, lists and tables one below the other; `spaced`: with lines between them."""
    lines: list[RenderableType] = []
    for block in blocks:
        if isinstance(block, Grid):
            lines.append(table(block, small=True))
        elif isinstance(block, Items):
            lines += [Text(one_line(text)) for text in block.texts]
        elif block:
            lines.append(Text(one_line(block.text if isinstance(block, Words) else str(block))))
        if block and spaced:
            lines.append("")
    return Group(*lines)
