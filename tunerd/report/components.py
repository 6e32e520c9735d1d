"""What the sections of the page are made of: a heading with a lead, pairs, a table."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report.markup import Child, Markup, element
from tunerd.system.text import UNKNOWN


def section(title: str, *children: Child, lead: Child = None) -> Markup:
    heading = element("h2", title)
    return element(
        "section", heading, element("p", lead, class_="lead") if lead else None, *children
    )


def pairs(rows: Sequence[tuple[str, Child]], class_: str = "pairs") -> Markup:
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value if value else UNKNOWN))
            for name, value in rows
        ),
        class_=class_,
    )


def table(heads: Sequence[str], rows: Sequence[Markup], class_: str) -> Markup:
    head = element("thead", element("tr", *(element("th", h, scope="col") for h in heads)))
    return element("table", head, element("tbody", *rows), class_=class_)
