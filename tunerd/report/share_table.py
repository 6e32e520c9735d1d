"""What `tunerd profile` found, on the terminal and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunerd.report.markdown_text import table, text
from tunerd.report.share_text import HEADS, row_texts, sentences, title_text
from tunerd.system.text import one_line

if TYPE_CHECKING:
    from tunerd.studies.profile.profile import Profile


_SHOWN = (0, 1, 2, 4, 5, 6)  # of HEADS: what 80 columns hold


def share_table(profile: Profile) -> RenderableType:
    """Return a line for each batch and share, and what they say, for rich to print."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("batch", justify="right")
    shown.add_column("share", no_wrap=True)
    for head in (profile.unit, *(HEADS[i].lower() for i in _SHOWN[2:])):
        shown.add_column(head, justify="right", no_wrap=True)
    for curve in profile.curves:
        for point in curve.points:
            cells = row_texts(point)
            shown.add_row(Text(str(curve.batch)), *(Text(cells[i]) for i in _SHOWN))
    title = Text(one_line(title_text(profile)), style="bold")
    return Group(title, shown, *(Text(each) for each in sentences(profile)))


def share_markdown(profile: Profile) -> str:
    """Return a heading, a table and what it says."""
    heads = ("Batch", HEADS[0], profile.unit, *HEADS[2:])
    rows = [
        [text(cell) for cell in (str(curve.batch), *row_texts(point))]
        for curve in profile.curves
        for point in curve.points
    ]
    lines = [f"### {text(title_text(profile))}", "", table(heads, rows, numbers=range(len(heads)))]
    lines += ["", *(f"- {text(each)}" for each in sentences(profile))]
    return "\n".join(lines) + "\n"
