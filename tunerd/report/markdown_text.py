"""Text that stays text in GitHub's Markdown, whatever file it came from; tables, and folds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tunerd.report.view import Block, Cell, Grid, Items, Words
from tunerd.system.text import UNKNOWN, one_line

MOST_CHARS = 200  # of a name
_MARKUP = re.compile(r"[!-/:-@\[-`{-~]")  # ASCII punctuation, which is all that Markdown reads
_PLAIN = set(".,;()%-'\"/+=")
_MENTIONS = set("@#:")
_COLON = re.compile(r":(?=\s|$)")  # which begins neither an address nor an emoji
_ADDRESS = re.compile(r"(?<=www)\.", re.IGNORECASE)


def code(name: str) -> str:
    """Return a name as code, in which nothing is markup, a mention, a reference or an emoji.

    What is no plain word is written in entities: those make text only, also between the bars of a
    table (https://spec.commonmark.org/0.31.2/#entity-and-numeric-character-references). An empty
    comment after an at sign keeps an address from becoming a link.
    """
    name = one_line(name)
    if len(name) > MOST_CHARS:
        name = f"{name[: MOST_CHARS - 1]}…"
    if re.fullmatch(r"[\w.-]+( [\w.-]+)*", name):
        return f"`{name}`"
    return f"<code>{_MARKUP.sub(_entity, name) or UNKNOWN}</code>"


def text(words: str) -> str:
    """Return a sentence in which nothing is markup or a mention."""
    words = one_line(words)
    plain = {m.start() for m in _COLON.finditer(words)}
    marked = {m.start() for m in _ADDRESS.finditer(words)}

    def written(match: re.Match[str]) -> str:
        is_plain = match[0] in _PLAIN or match.start() in plain
        return match[0] if is_plain and match.start() not in marked else _entity(match)

    return _MARKUP.sub(written, words)


def _entity(match: re.Match[str]) -> str:
    entity = f"&#{ord(match[0])};"
    return f"{entity}<!-- -->" if match[0] in _MENTIONS else entity


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: range = range(0)) -> str:
    """Return a table of cells that are Markdown; columns in `numbers` are aligned to the right."""
    rule = ("--:" if i in numbers else "---" for i in range(len(heads)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def folded(summary: str, body: str, *, left: int = 0) -> str:
    """Return a part that is closed at first. The blank lines make what is in it Markdown."""
    more = f"\n\nand {left:,} more" if left > 0 else ""
    return f"<details><summary>{text(summary)}</summary>\n\n{body}{more}\n\n</details>"


def grid(of: Grid) -> str:
    """Return a table of plain texts, the small print of a cell in parentheses."""
    rows = ([_cell(cell) for cell in row] for row in of.rows)
    return table([text(head) for head in of.heads], rows, numbers=of.numbers)


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return text(cell)
    small = cell.small[:MOST_CHARS]
    said = code(cell.text) if cell.is_code else text(cell.text)
    return f"{said} ({text(small)})" if small else said


def written(blocks: Iterable[Block | str | None]) -> str:
    """Return sentences, lists and tables with a blank line between them."""
    parts = []
    for block in blocks:
        if isinstance(block, Grid):
            parts.append(grid(block))
        elif isinstance(block, Items):
            parts.append("\n".join(f"- {text(each)}" for each in block.texts))
        elif block:
            parts.append(text(block.text if isinstance(block, Words) else str(block)))
    return "\n\n".join(filter(None, parts))
