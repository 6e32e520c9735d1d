"""A matrix on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunerd.report.matrix_parts import Grid, matrix_parts
from tunerd.report.matrix_text import headline
from tunerd.studies.matrix.result import MatrixResult
from tunerd.system.text import one_line


def matrix_table(result: MatrixResult) -> Group:
    """Return the verdicts and tables of a whole matrix, with a blank line after each."""
    shown: list[RenderableType] = [
        Text.assemble((one_line(result.model), "bold"), f": {headline(result)}\n")
    ]
    for part in matrix_parts(result):
        shown += [Text(f"{one_line(part)}\n")] if isinstance(part, str) else [_table(part), ""]
    return Group(*shown)


def _table(grid: Grid) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in grid.heads:
        table.add_column(head, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(one_line(value)) for value in row))
    return table
