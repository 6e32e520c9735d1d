"""Blocks of a view for rich to print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tunerd.report.view import Block, Cell, Grid, Items, Words
from tunerd.system.text import one_line, printable

_WIDE = 10_000  # columns: more than any table has


def table(
    grid: Grid, *, gap: int = 2, least_width: int | None = None, small: bool = False
) -> RenderableType:
    """Return a table; `gap` is between columns, `least_width` that of the first.

    Args:
        small: whether to show the small print, in parentheses.
    """
    return _Fitting(grid, gap, least_width, small)


@dataclass(frozen=True)
class _Fitting:
    """A table; where it is wider than the terminal, heads of numbers are in several lines."""

    grid: Grid
    gap: int
    least_width: int | None
    small: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._table(self.grid.heads)
        if console.measure(whole, options=options.update(width=_WIDE)).maximum > options.max_width:
            heads = enumerate(self.grid.heads)
            folded = [h.replace(" ", "\n") if n in self.grid.numbers else h for n, h in heads]
            yield self._table(folded)
        else:
            yield whole

    def _table(self, heads: Iterable[str]) -> Table:
        grid = self.grid
        made = Table(box=None, pad_edge=False, padding=(0, self.gap, 0, 0), header_style="dim")
        made.show_header = any(grid.heads)
        for number, head in enumerate(heads):
            if number in grid.numbers:
                made.add_column(head, justify="right", no_wrap=True)
            else:
                width = None if number else self.least_width
                made.add_column(head, overflow="fold", min_width=width)
        for row in grid.rows:
            cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
            made.add_row(
                *(
                    # What is no number may be a name.
                    Text(c.text if i in grid.numbers else _text(c, self.small), style=c.style)
                    for i, c in enumerate(cells)
                )
            )
        return made


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
