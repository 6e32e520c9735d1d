"""A matrix on a terminal and as Markdown: sentences and tables, in one order."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.report.grid import Grid
from tunerd.report.markdown_text import text
from tunerd.report.matrix_text import (
    CLAIM_SOURCE,
    changed_text,
    changes,
    claims,
    costs,
    facts_text,
    gains,
    headline,
    limits_text,
    robust_text,
    robustness,
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
        shown += [Text(f"{one_line(part)}\n")] if isinstance(part, str) else [part.terminal(), ""]
    return Group(*shown)


def matrix_markdown(result: MatrixResult) -> str:
    """Return the verdicts and tables of a whole matrix."""
    title = f"**{text(result.model)}**: {headline(result)}"
    return "\n\n".join([title, *map(_markdown, matrix_parts(result))]) + "\n"


def _markdown(part: str | Grid) -> str:
    return text(part) if isinstance(part, str) else part.markdown()


def matrix_parts(result: MatrixResult) -> list[str | Grid]:
    """Return what follows the headline: verdicts, and the tables that they rest on."""
    parts: list[str | Grid] = [
        facts_text(result),
        _latencies(result),
        f"Claims of {CLAIM_SOURCE}:",
        claims(result),
        limits_text(result),
        gains(result, f"gain of tuning there over tuning at {result.findings.shares[-1]}%"),
        robust_text(result),
        robustness(result),
        changed_text(result),
        changes(result) or "",
        costs(result),
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
