"""A matrix on a terminal and as Markdown: sentences and tables, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunerd.report.markdown_text import table, text
from tunerd.report.matrix_text import (
    CLAIM_SOURCE,
    COST_HEADS,
    change_rows,
    changed_text,
    claim_rows,
    cost_rows,
    facts_text,
    headline,
    limits_text,
    ratio_text,
    robust_rows,
    robust_text,
    row_text,
    sms_text,
)
from tunerd.studies.matrix.claims import DEFAULT
from tunerd.studies.matrix.result import MatrixResult
from tunerd.system.text import one_line, secs_text


def matrix_table(result: MatrixResult) -> Group:
    """Return the verdicts and tables of a whole matrix, with a blank line after each."""
    shown: list[RenderableType] = [
        Text.assemble((one_line(result.model), "bold"), f": {headline(result)}\n")
    ]
    for part in matrix_parts(result):
        shown += [Text(f"{one_line(part)}\n")] if isinstance(part, str) else [_rich_table(part), ""]
    return Group(*shown)


def _rich_table(grid: Grid) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in grid.heads:
        table.add_column(head, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(one_line(value)) for value in row))
    return table


def matrix_markdown(result: MatrixResult) -> str:
    """Return the verdicts and tables of a whole matrix."""
    title = f"**{text(result.model)}**: {headline(result)}"
    return "\n\n".join([title, *map(_markdown, matrix_parts(result))]) + "\n"


def _markdown(part: str | Grid) -> str:
    if isinstance(part, str):
        return text(part)
    return table(part.heads, ([text(v) for v in row] for row in part.rows))


@dataclass(frozen=True)
class Grid:
    """A table of plain texts, as wide as its heads."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def matrix_parts(result: MatrixResult) -> list[str | Grid]:
    """Return what follows the headline: verdicts, and the tables that they rest on."""
    found = result.findings
    changes = change_rows(result)
    parts: list[str | Grid] = [
        facts_text(result),
        _latencies(result),
        f"Claims of {CLAIM_SOURCE}:",
        Grid(("claim", "answer", "ratio that decides"), claim_rows(result)),
        limits_text(result),
        Grid(
            ("run at", f"gain of tuning there over tuning at {found.shares[-1]}%"),
            [(f"{g.run_at}%", ratio_text(g.ratio)) for g in found.gains],
        ),
        robust_text(result),
        Grid(("artifact", "worst loss", "where", "mean loss"), robust_rows(result)),
        changed_text(result),
        Grid(("task", "where", "slower than the best there"), changes) if changes else "",
        Grid(COST_HEADS, cost_rows(result)),
    ]
    return [part for part in parts if part]


def _latencies(result: MatrixResult) -> Grid:
    found = result.findings
    cells = {(c.tuned_at, c.run_at): c for c in found.cells}
    rows = sorted({a for a, _ in cells}, key=lambda a: (a == DEFAULT, a))
    return Grid(
        ("tuned at \\ run at", *(f"{b}% ({sms_text(result, b)})" for b in found.shares)),
        [
            (
                row_text(a),
                *(
                    f"{secs_text(cells[a, b].secs)}, {100 * (cells[a, b].loss.value - 1):+.1f}%"
                    for b in found.shares
                ),
            )
            for a in rows
        ],
    )
