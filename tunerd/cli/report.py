"""`tunerd report`: the page of a run, rebuilt from its folder, or runs side by side."""

from __future__ import annotations

import json as json_module
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunerd.cli.options import Debug
from tunerd.errors import FolderError, InputError
from tunerd.system.text import printable, reason_of

if TYPE_CHECKING:
    from tunerd.report.comparison import NamedRun

STDOUT = Path("-")


class Format(StrEnum):
    HTML = "html"
    MARKDOWN = "markdown"
    JSON = "json"


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)
    ],
    to: Annotated[
        Path | None,
        typer.Option(help="A file, or - for stdout. [default: RUN/report.html; else stdout]"),
    ] = None,
    format: Annotated[
        Format | None, typer.Option(help="A page, text for a pull request, or a document.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    debug: Debug = False,
) -> None:
    """Write the report of a run again, of any run there is; or of several side by side.

    A run that was killed or is still alive is shown as far as it got.
    """
    if json and format not in (None, Format.JSON):
        raise InputError(f"--json and --format {format} ask for two things; leave one of them out")
    wanted = Format.JSON if json else format or Format.HTML
    to = to or _default_place(runs, wanted)
    from tunerd.records import Store
    from tunerd.report.comparison import named
    from tunerd.report.run_view import run_view_of

    views = []
    for run in runs:
        with Store.read(run) as store:
            views.append(run_view_of(store))
    text = _text(named(runs, views), wanted)
    if to == STDOUT:
        sys.stdout.write(text)
        return
    _write(to, text)
    print(f"report    {printable(str(to))}")


def _default_place(runs: list[Path], wanted: Format) -> Path:
    if wanted is not Format.HTML:
        return STDOUT
    if len(runs) > 1:
        raise InputError("the page of several runs belongs to none of them; add --to FILE")
    return runs[0] / "report.html"


def _text(runs: tuple[NamedRun, ...], wanted: Format) -> str:
    from tunerd.report import comparison_page, document, markdown, page

    only = runs[0].view if len(runs) == 1 else None
    match wanted:
        case Format.HTML:
            return page.report_page(only) if only else comparison_page.comparison_page(runs)
        case Format.MARKDOWN:
            return markdown.run_markdown(only) if only else markdown.comparison_markdown(runs)
        case Format.JSON:
            value = document.run_view_json(only) if only else document.comparison_json(runs)
            return json_module.dumps(value, allow_nan=False) + "\n"


def _write(to: Path, text: str) -> None:
    from tunerd.report.html import write_page

    try:
        if not to.name or to.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        write_page(to, text)
    except OSError as error:
        raise FolderError(
            f"{to} cannot be written: {reason_of(error)}; name a file in a folder of yours "
            "with --to"
        ) from error
