"""A matrix as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.matrix.claims import DEFAULT
from tunerd.matrix.result import MatrixResult
from tunerd.report.markdown_text import table, text
from tunerd.report.matrix_words import (
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
    unit_text,
)
from tunerd.report.words import secs_text


def matrix_markdown(result: MatrixResult) -> str:
    """Return the verdicts and tables of a whole matrix."""
    found = result.findings
    changes = change_rows(result)
    parts = [
        f"**{text(result.model)}**: {headline(result)}",
        text(facts_text(result)),
        _latencies(result),
        f"Claims of {CLAIM_SOURCE}:",
        _table(("claim", "answer", "ratio that decides"), claim_rows(result)),
        limits_text(result),
        _table(
            ("run at", f"gain of tuning there over tuning at {found.shares[-1]}%"),
            [(f"{g.run_at}%", ratio_text(g.ratio)) for g in found.gains],
        ),
        robust_text(result),
        _table(("artifact", "worst loss", "where", "mean loss"), robust_rows(result)),
        changed_text(result),
        _table(("task", "where", "slower than the best there"), changes) if changes else "",
        _table(COST_HEADS, cost_rows(result)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _latencies(result: MatrixResult) -> str:
    found = result.findings
    cells = {(c.tuned_at, c.run_at): c for c in found.cells}
    rows = sorted({a for a, _ in cells}, key=lambda a: (a == DEFAULT, a))
    unit = unit_text(result)
    return _table(
        ("tuned at \\ run at", *(f"{b}% ({result.sms[b]} {unit})" for b in found.shares)),
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


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(heads, ([text(v) for v in row] for row in rows))
