"""A report's page and its terminal table, as they are read."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.lib.report_runs import gpu_outcome, view
from tunerd.report.html import write_page
from tunerd.report.page import report_page
from tunerd.report.table import outcome_table
from tunerd.vocabulary.outcome import Comparison, Outcome
from tunerd.vocabulary.verdict import Verdict


def write(folder: Path, outcome: Outcome | None, **changes: Any) -> str:
    path = folder / "report.html"
    write_page(path, report_page(view(outcome, **changes)))
    return path.read_text(encoding="utf-8")


def plain(text: str) -> str:
    """Return `text` with each run of white space, no-break spaces too, as one blank."""
    return " ".join(text.split())


class Page(HTMLParser):
    """The page as a strict reader sees it: balanced tags, its text, its attributes."""

    VOID = frozenset({"meta", "col", "br", "wbr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return plain(" ".join(self.pieces))


def terminal(outcome: Outcome, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(outcome_table(outcome))
    return plain(console.export_text())


def with_verdict(verdict: Verdict, ratio: float = 1.02) -> Outcome:
    outcome = gpu_outcome()
    compared = Comparison(verdict, 5.9e-3, 5.9e-3 / ratio, ratio, ratio - 0.05, ratio + 0.05)
    return dataclasses.replace(outcome, end_to_end=compared)
