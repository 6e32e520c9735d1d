"""A matrix as Markdown."""

from __future__ import annotations

from tunerd.report.markdown_text import table, text
from tunerd.report.matrix_parts import Grid, matrix_parts
from tunerd.report.matrix_text import headline
from tunerd.studies.matrix.result import MatrixResult


def matrix_markdown(result: MatrixResult) -> str:
    """Return the verdicts and tables of a whole matrix."""
    title = f"**{text(result.model)}**: {headline(result)}"
    return "\n\n".join([title, *map(_markdown, matrix_parts(result))]) + "\n"


def _markdown(part: str | Grid) -> str:
    if isinstance(part, str):
        return text(part)
    return table(part.heads, ([text(v) for v in row] for row in part.rows))
