"""A matrix as a page, as Markdown and on a terminal: the same sentences and tables."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Group
from rich.text import Text

from tunerd.report import html
from tunerd.report.heat_plot import HEAT, HeatMap, heat_of, heat_svg
from tunerd.report.markdown_text import text, written
from tunerd.report.matrix_text import (
    CLAIM_SOURCE,
    cell_title,
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
from tunerd.report.terminal import shown
from tunerd.report.view import Cell, Grid, Section, View, caption
from tunerd.studies.matrix.claims import DEFAULT
from tunerd.studies.matrix.result import MatrixResult, result_json
from tunerd.system.text import one_line, secs_text


def write_matrix(result: MatrixResult, root: Path) -> None:
    """Write a matrix's document, Markdown, page and heat map into its folder."""
    document = json.dumps(result_json(result), allow_nan=False)
    html.write_page(root / "matrix-result.json", document + "\n")
    html.write_page(root / "report.md", matrix_markdown(result))
    html.write_page(root / "report.html", matrix_page(result))
    html.write_page(root / "heatmap.svg", matrix_plot(result))


def matrix_page(result: MatrixResult) -> str:
    """Return the page of a whole matrix."""
    found = result.findings
    of_claims = (
        "Yes where the whole 95% interval lies above 1.01, no where it lies below, cannot tell "
        "otherwise: a difference within 1% is none. In order: the least time of another share's "
        "artifact over that of the share's own; the time of the one tuned at 100% over the share's "
        "own, geometric mean over the smaller shares; the worst loss of the better end's artifact "
        f"over that of the one tuned at {found.middle}%."
    )
    sections = (
        Section(
            "Tuned at, run at",
            (heat_map(result), caption(_legend())),
            "Rows: the share that an artifact was tuned at. Columns: the share that it runs at. "
            "Median latency, and how much that is over the best artifact at the share.",
        ),
        Section(
            "The claims",
            (claims(result), caption(of_claims), caption(limits_text(result))),
            f"Of {CLAIM_SOURCE}.",
        ),
        Section(
            f"What tuning at the share gains over tuning at {found.shares[-1]}%",
            [gains(result, "gain (95% interval)")],
        ),
        Section("Robustness", [robustness(result)], robust_text(result)),
        Section(
            "Kernels whose best changes with the share", [changes(result)], changed_text(result)
        ),
        Section(
            "What it took",
            [costs(result)],
            "Core time: of all processes on these cores. Time on slices: in which they measured, "
            "compared outputs or ran models. All shares over one: the same stages counted for all "
            f"as for the first level, at {found.middle}%.",
        ),
    )
    return html.page(
        View(
            headline(result),
            sections,
            name=result.model,
            facts=[facts_text(result)],
            title=f"{result.model}: tuned at one share, run at another",
        )
    )


def heat_map(result: MatrixResult) -> Grid:
    """Return the table of latencies, redder where an artifact is further from the best."""
    found = result.findings
    cells = {(c.tuned_at, c.run_at): c for c in found.cells}
    rows = []
    for a in sorted({a for a, _ in cells}, key=lambda a: (a == DEFAULT, a)):
        row = [Cell(row_text(a))]
        for b in found.shares:
            c = cells[a, b]
            style = f"heat-{heat_of(c.loss.value)}{' own' if a == b else ''}"
            title = cell_title(a, b, c.secs, c.beside_own, c.loss)
            small = f"{100 * (c.loss.value - 1):+.1f}%"
            row.append(Cell(secs_text(c.secs), small, class_=style, title=title))
        rows.append(row)
    heads = ("tuned at \\ run at", *(f"{b}% ({sms_text(result, b)})" for b in found.shares))
    labels = ("", *(f"run at {b}%" for b in found.shares))
    return Grid(heads, rows, class_="heat", labels=labels, named=True)


def matrix_plot(result: MatrixResult) -> str:
    """Return the heat map as an SVG file of its own."""
    cells = {(c.tuned_at, c.run_at): (c.secs, c.loss.value) for c in result.findings.cells}
    title = f"{result.model}: tuned at one share, run at another"
    return heat_svg(title, [HeatMap(result.device, cells)])


def _legend() -> str:
    limits = ", ".join(f"{100 * (x - 1):.0f}%" for x in HEAT)
    return f"Redder from a loss of {limits}. Framed: run at the share that it was tuned at."


def matrix_table(result: MatrixResult) -> Group:
    """Return the verdicts and tables of a whole matrix, with a blank line after each."""
    title = Text.assemble((one_line(result.model), "bold"), f": {headline(result)}\n")
    return Group(title, shown(_parts(result), spaced=True))


def matrix_markdown(result: MatrixResult) -> str:
    """Return the verdicts and tables of a whole matrix."""
    return f"**{text(result.model)}**: {headline(result)}\n\n{written(_parts(result))}\n"


def _parts(result: MatrixResult) -> list[str | Grid | None]:
    """Return what follows the headline: verdicts, and the tables that they rest on."""
    return [
        facts_text(result),
        heat_map(result),
        f"Claims of {CLAIM_SOURCE}:",
        claims(result),
        limits_text(result),
        gains(result, f"gain of tuning there over tuning at {result.findings.shares[-1]}%"),
        robust_text(result),
        robustness(result),
        changed_text(result),
        changes(result),
        costs(result),
    ]
