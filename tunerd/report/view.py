"""What a result says, before it is a page, a terminal's lines or Markdown: sections of blocks.

Texts are plain: each renderer escapes what it must. Only `Markup`, which `tunerd.report.svg` makes,
goes into a page as it is.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from markupsafe import Markup

from tunerd.system.text import count_text

Tone = Literal["better", "neutral", "bad"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, on pages and in Markdown with small print, and a drawing."""

    text: str = ""
    small: str = ""
    drawn: Markup | None = None
    is_code: bool = False
    is_message: bool = False  # its lines are kept
    class_: str = ""
    title: str = ""  # what the pointer shows
    style: str = ""  # on a terminal

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Grid:
    """A table, as wide as its heads; the columns in `numbers` are aligned to the right.

    Args:
        styles: classes of columns on a page, by head.
        labels: of cells on narrow pages, where those are not the heads.
        keys: classes of the colours that stand before heads.
        named: whether the first cell of a row is its heading.
        muted: numbers of rows in which nothing was gained.
    """

    block: ClassVar = "grid"
    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numbers: range = range(0)
    class_: str = "plain"
    styles: Mapping[str, str] = field(default_factory=dict)
    labels: Sequence[str] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    named: bool = False
    muted: Container[int] = ()

    def only(self, *heads: str) -> Grid:
        """Return the columns with these heads, the numbers among them aligned as they were."""
        at = [list(self.heads).index(head) for head in heads]
        right = [i for i, number in enumerate(at) if number in self.numbers]
        rows = [[row[i] for i in at] for row in self.rows]
        numbers = range(right[0], right[-1] + 1) if right else range(0)
        return Grid(heads, rows, numbers, muted=self.muted)


@dataclass(frozen=True)
class Words:
    """A paragraph; `class_` is "caption" for small print below a table or plot."""

    block: ClassVar = "words"
    text: str
    class_: str = ""


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    block: ClassVar = "items"
    texts: Sequence[str]


@dataclass(frozen=True)
class Pairs:
    """Names and what they are; an empty text is not known. Lists are one below the other."""

    block: ClassVar = "pairs"
    rows: Sequence[tuple[str, str | Sequence[str]]]
    class_: str = "pairs"


@dataclass(frozen=True)
class Plot:
    """A drawing with its legend, whose colours are in the order of the names."""

    block: ClassVar = "plot"
    drawn: Markup
    title: str = ""
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Bar:
    name: str
    drawn: Markup
    value: str
    small: str


@dataclass(frozen=True)
class Bars:
    block: ClassVar = "bars"
    bars: Sequence[Bar]
    title: str = ""


@dataclass(frozen=True)
class Fold:
    """Blocks that are closed at first."""

    block: ClassVar = "fold"
    summary: str
    blocks: Sequence[Block | None]


Block = Grid | Words | Items | Pairs | Plot | Bars | Fold


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block | None] = ()  # those that are None are left out
    lead: str = ""
    class_: str = ""


@dataclass(frozen=True)
class View:
    """All of a page.

    Args:
        claim: the headline, with `grounds` below it and `small` in small print.
        name: of the model, above the headline, with `facts` beside it.
        figures: the few numbers that matter most, by name.
    """

    claim: str
    sections: Sequence[Section | None]
    tone: Tone = "neutral"
    grounds: str = ""
    small: str = ""
    name: str = ""
    facts: Sequence[str] = ()
    figures: Sequence[tuple[str, str]] = ()
    title: str = ""  # of the window; empty: the claim


def caption(text: str) -> Words:
    return Words(text, "caption")


def left_out(count: int, one: str) -> Words | None:
    """Say how many lines are not shown; None where all are."""
    return caption(f"And {count_text(count, f'more {one}')}.") if count > 0 else None
