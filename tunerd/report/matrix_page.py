"""A matrix as a page: the heat map, the claims, the gain, the robustness, the cost."""

from __future__ import annotations

import json
from pathlib import Path

from tunerd.report.components import caption, section, table
from tunerd.report.heat_plot import HEAT, HeatMap, heat_of, heat_svg
from tunerd.report.layout import page, write_page
from tunerd.report.markup import Child, Markup, element
from tunerd.report.matrix_tables import matrix_markdown
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
from tunerd.studies.matrix.claims import DEFAULT
from tunerd.studies.matrix.result import MatrixResult, result_json
from tunerd.system.text import secs_text


def write_matrix(result: MatrixResult, root: Path) -> None:
    """Write a matrix's document, Markdown, page and heat map into its folder."""
    text = json.dumps(result_json(result), allow_nan=False)
    write_page(root / "matrix-result.json", text + "\n")
    write_page(root / "report.md", matrix_markdown(result))
    write_page(root / "report.html", matrix_page(result))
    write_page(root / "heatmap.svg", matrix_plot(result))


def matrix_page(result: MatrixResult) -> str:
    """Return the page of a whole matrix."""
    found = result.findings
    changed = changes(result)
    return page(
        f"{result.model}: tuned at one share, run at another",
        section(
            "Tuned at, run at",
            heat_map(result),
            caption(_legend()),
            lead="Rows: the share that an artifact was tuned at. Columns: the share that it runs "
            "at. Median latency, and how much that is over the best artifact at the share.",
        ),
        section(
            "The claims",
            claims(result).page(),
            caption(
                "Yes where the whole 95% interval lies above 1.01, no where it lies below, cannot "
                "tell otherwise: a difference within 1% is none. In order: the least time of "
                "another share's artifact over that of the share's own; the time of the one tuned "
                "at 100% over the share's own, geometric mean over the smaller shares; the "
                "worst loss of the better end's artifact over that of the one tuned at "
                f"{found.middle}%."
            ),
            caption(limits_text(result)),
            lead=f"Of {CLAIM_SOURCE}.",
        ),
        section(
            f"What tuning at the share gains over tuning at {found.shares[-1]}%",
            gains(result, "gain (95% interval)").page(),
        ),
        section(
            "Robustness",
            robustness(result).page(),
            lead=robust_text(result),
        ),
        section(
            "Kernels whose best changes with the share",
            changed.page() if changed else None,
            lead=changed_text(result),
        ),
        section(
            "What it took",
            costs(result).page(),
            lead="Core time: of all processes on these cores. Time on slices: in which they "
            "measured, compared outputs or ran models. All shares over one: the same stages "
            f"counted for all as for the first level, at {found.middle}%.",
        ),
        head=element(
            "header",
            element(
                "p",
                element("bdi", result.model, class_="model"),
                element("span", facts_text(result)),
                class_="eyebrow",
            ),
            element("h1", headline(result)),
        ),
    )


def heat_map(result: MatrixResult) -> Markup:
    """Return the table of latencies, redder where an artifact is further from the best."""
    found = result.findings
    cells = {(c.tuned_at, c.run_at): c for c in found.cells}
    rows = sorted({a for a, _ in cells}, key=lambda a: (a == DEFAULT, a))
    body = []
    for a in rows:
        line: list[Child] = [element("th", row_text(a), scope="row")]
        for b in found.shares:
            c = cells[a, b]
            line.append(
                element(
                    "td",
                    element("div", secs_text(c.secs)),
                    element("small", f"{100 * (c.loss.value - 1):+.1f}%"),
                    class_=f"heat-{heat_of(c.loss.value)}{' own' if a == b else ''}",
                    title=cell_title(a, b, c.secs, c.beside_own, c.loss),
                    data_label=f"run at {b}%",
                    tabindex=0,
                )
            )
        body.append(element("tr", *line))
    heads = ["", *(f"{b}% · {sms_text(result, b)}" for b in found.shares)]
    return element("div", table(heads, body, "heat"), class_="scroll")


def matrix_plot(result: MatrixResult) -> str:
    """Return the heat map as an SVG file of its own."""
    cells = {(c.tuned_at, c.run_at): (c.secs, c.loss.value) for c in result.findings.cells}
    title = f"{result.model}: tuned at one share, run at another"
    return heat_svg(title, [HeatMap(result.device, cells)])


def _legend() -> str:
    limits = ", ".join(f"{100 * (x - 1):.0f}%" for x in HEAT)
    return f"Redder from a loss of {limits}. Framed: run at the share that it was tuned at."
