"""What the sections of the page are made of: a heading with a lead, pairs, a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from tunerd.report.markup import Child, Markup, element
from tunerd.system.text import TIMES, UNKNOWN, count_text, ratio_texts
from tunerd.vocabulary.outcome import Comparison
from tunerd.vocabulary.verdict import Verdict

_NO_STYLES: Mapping[str, str] = MappingProxyType({})


def section(title: str, *children: Child, lead: Child = None) -> Markup:
    heading = element("h2", title)
    return element(
        "section", heading, element("p", lead, class_="lead") if lead else None, *children
    )


def caption(text: str) -> Markup:
    return element("p", text, class_="caption")


def left_out(count: int, one: str) -> Markup | None:
    """Return how many lines are not shown, None where all are."""
    return caption(f"And {count_text(count, f'more {one}')}.") if count > 0 else None


def pairs(rows: Sequence[tuple[str, Child]], class_: str = "pairs") -> Markup:
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value if value else UNKNOWN))
            for name, value in rows
        ),
        class_=class_,
    )


def table(heads: Sequence[str], rows: Iterable[Markup], class_: str) -> Markup:
    head = element("thead", element("tr", *(element("th", h, scope="col") for h in heads)))
    return element("table", head, element("tbody", *rows), class_=class_)


def row(
    heads: Iterable[str],
    cells: Iterable[Child],
    *,
    name: Child = None,
    styles: Mapping[str, str] = _NO_STYLES,
    class_: str | None = None,
) -> Markup:
    """Return a line of a table, each of its cells with its head, which narrow screens show there.

    Args:
        name: heads the line, before the cells; it has no head.
        styles: classes of cells, by head.
    """
    return element(
        "tr",
        element("th", name, scope="row") if name is not None else None,
        *(
            element("td", cell, class_=styles.get(head), data_label=head or None)
            for head, cell in zip(heads, cells, strict=True)
        ),
        class_=class_,
    )


def ratio_cell(compared: Comparison | None) -> Child:
    """Return a ratio over its interval, or that it cannot be told."""
    if compared is None:
        return UNKNOWN
    ratio, interval = ratio_texts(compared.interval)
    said = "cannot tell" if compared.verdict is Verdict.CANNOT_TELL else f"{ratio}{TIMES}"
    return element("div", said, element("small", interval))
