"""A table of plain texts: once for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from tunerd.report import components, markdown_text
from tunerd.report.markup import Markup, element
from tunerd.system.text import one_line


@dataclass(frozen=True)
class Grid:
    """A table, as wide as its heads; the columns in `numbers` are aligned to the right.

    A cell for the terminal alone may have a style.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    numbers: range = range(0)

    def terminal(self, *, gap: int = 2, least_width: int | None = None) -> Table:
        """Return it for rich to print; `gap` is between columns, the width that of the first."""
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
        for number, head in enumerate(self.heads):
            if number in self.numbers:
                table.add_column(head, justify="right", no_wrap=True)
            else:
                table.add_column(head, overflow="fold", min_width=None if number else least_width)
        for row in self.rows:
            table.add_row(*(self._shown(number, cell) for number, cell in enumerate(row)))
        return table

    def _shown(self, number: int, cell: str | Text) -> Text:
        if isinstance(cell, Text):
            return cell
        return Text(cell if number in self.numbers else one_line(cell))  # which may be a name

    def markdown(self) -> str:
        rows = ([markdown_text.text(str(cell)) for cell in row] for row in self.rows)
        return markdown_text.table(self.heads, rows, numbers=self.numbers)

    def page(self) -> Markup:
        rows = (components.row(self.heads, map(str, row)) for row in self.rows)
        plain = components.table(self.heads, rows, "plain")
        return element("div", plain, class_="scroll")
