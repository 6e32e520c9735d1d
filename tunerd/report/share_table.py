"""What `tunerd profile` found, on the terminal and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunerd.report.markdown import text
from tunerd.report.share_words import HEADS, row_texts, sentences, title_text
from tunerd.report.words import one_line

if TYPE_CHECKING:
    from tunerd.shares.profile import Profile


_SHOWN = (0, 1, 2, 4, 5, 6)  # of HEADS: what 80 columns hold


def share_table(profile: Profile) -> RenderableType:
    """Return a line for each batch and share, and what they say, for rich to print."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("batch", justify="right")
    table.add_column("share", no_wrap=True)
    for head in (profile.unit, *(HEADS[i].lower() for i in _SHOWN[2:])):
        table.add_column(head, justify="right", no_wrap=True)
    for curve in profile.curves:
        for point in curve.points:
            cells = row_texts(point)
            table.add_row(Text(str(curve.batch)), *(Text(cells[i]) for i in _SHOWN))
    title = Text(one_line(title_text(profile)), style="bold")
    return Group(title, table, *(Text(each) for each in sentences(profile)))


def share_markdown(profile: Profile) -> str:
    """Return a heading, a table and what it says."""
    heads = ("Batch", HEADS[0], profile.unit, *HEADS[2:])
    lines = [f"### {text(title_text(profile))}", ""]
    lines.append(f"| {' | '.join(heads)} |")
    lines.append(f"|{' --: |' * len(heads)}")
    for curve in profile.curves:
        for point in curve.points:
            cells = (str(curve.batch), *row_texts(point))
            lines.append(f"| {' | '.join(map(text, cells))} |")
    lines += ["", *(f"- {text(each)}" for each in sentences(profile))]
    return "\n".join(lines) + "\n"
