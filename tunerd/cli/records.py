"""`tunerd records`: look at the trials of a run, and move them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.group import Command, Group
from tunerd.cli.options import AsJson
from tunerd.errors import InputError

if TYPE_CHECKING:
    from tunerd.records import Store

app = typer.Typer(
    help="Look at the trials of a run; export, merge, pack and unpack runs.",
    no_args_is_help=True,
    cls=Group,
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]


class Format(StrEnum):
    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"
    TVM = "tvm"


@app.command(cls=Command)
def show(run: Run, as_json: AsJson = False) -> None:
    """Print a run's tasks: trials, and the search's best beside the default."""
    from tunerd.records import Store
    from tunerd.records.summary import summarize_run
    from tunerd.report.records_table import summary_json, summary_page

    with Store.read(run) as store:
        found = summarize_run(store)
    if as_json:
        print(json.dumps(summary_json(found), indent=2))
        return
    from rich.console import Console

    Console().print(summary_page(found))


@app.command(cls=Command)
def export(
    run: Run,
    format: Annotated[
        Format,
        typer.Option(
            help="json is a line per trial; tvm is MetaSchedule's database, a folder of two files.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Path | None, typer.Option(help="A file, or a folder for tvm; stdout if left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write every trial of a run, also while the run is alive."""
    if as_json and to is None:
        raise InputError("--json describes the file that --to names; add --to, or leave --json out")
    from tunerd.records import Store

    with Store.read(run) as store:
        counts = _export_tvm(store, to) if format is Format.TVM else _export(store, format, to)
    if to is not None:
        _done({"file": str(to), "format": format.value} | counts, as_json)


@app.command(cls=Command)
def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", show_default=False)],
    to: Annotated[Path, typer.Option(help="The new run folder.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Join runs of one model on one kind of device and share into a new run."""
    from tunerd.runs.merge import merge_runs

    merged = merge_runs(runs, to)
    _done({"run": str(to)} | asdict(merged), as_json)


@app.command(cls=Command)
def pack(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To write, .tar.gz.")],
    as_json: AsJson = False,
) -> None:
    """Write a run folder into one file, also while the run is alive."""
    from tunerd.runs.archive import pack as pack_run

    pack_run(run, file)
    _done({"file": str(file), "bytes": file.stat().st_size}, as_json)


@app.command(cls=Command)
def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="That `pack` wrote.")],
    run: Run,
    as_json: AsJson = False,
) -> None:
    """Make a run folder of a packed run; `tunerd tune` goes on in it on the same GPU model."""
    from tunerd.runs.archive import unpack as unpack_run

    unpack_run(file, run)
    _done({"run": str(run)}, as_json)


def _export_tvm(store: Store, to: Path | None) -> dict[str, Any]:
    if to is None:
        raise InputError(
            "TVM's database is two files in a folder, which stdout cannot be; add --to FOLDER"
        )
    from tunerd.records.tvm_database import export_tvm

    return {"trials": export_tvm(store, to)}


def _export(store: Store, format: Format, to: Path | None) -> dict[str, Any]:
    from tunerd.records.export import WRITERS, write_file

    write = WRITERS[format.value]
    if to is not None:
        return asdict(write_file(store, to, write))
    if format is Format.PARQUET and sys.stdout.isatty():
        raise InputError("parquet is binary and stdout is a terminal; add --to FILE")
    sys.stdout.flush()
    written = write(store, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    return asdict(written)


def _done(value: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(value))
    else:
        said = ", ".join(f"{name.replace('_', ' ')} {item}" for name, item in value.items())
        print(said, file=sys.stderr)
