"""`tunerd records`: look at the trials of a run, and move them."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from tunerd.cli.group import Command, Group
from tunerd.cli.options import AsJson
from tunerd.errors import FolderError, InputError

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
    from tunerd.records.summary import summarize
    from tunerd.vocabulary import to_json

    with Store.read(run) as store:
        facts = store.facts()
        tasks = summarize(store)
        counts = {
            "trials": store.counts(is_default=False),
            "default schedules": store.counts(is_default=True),
        }
    if as_json:
        value = facts.to_json()
        del value["host"], value["settings"]
        for what, states in counts.items():
            value[what.replace(" ", "_")] = {s.value: count for s, count in states.items()}
        print(json.dumps(value | {"tasks": to_json(tasks)}, indent=2))
        return
    from rich.console import Console
    from rich.text import Text

    from tunerd.report.records_table import task_table
    from tunerd.system.text import one_line

    console = Console()
    head = f"{one_line(facts.model_name)}: {facts.pct}% of {one_line(facts.device)}"
    console.print(Text(f"{head}, {facts.slice_kind} slices", style="bold"))
    console.print(task_table(tasks))
    for what, states in counts.items():
        ended = ", ".join(f"{count:,} {state.value}" for state, count in states.items() if count)
        console.print(Text(f"{what}: {ended or 'none'}"))


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
        if format is Format.TVM:
            if to is None:
                raise InputError(
                    "TVM's database is two files in a folder, which stdout cannot be; add "
                    "--to FOLDER"
                )
            from tunerd.records.tvm_database import export_tvm

            counts = {"trials": export_tvm(store, to)}
        else:
            from tunerd.records import export as forms

            write = {
                Format.PARQUET: forms.write_parquet,
                Format.CSV: forms.write_csv,
                Format.JSON: forms.write_json,
            }[format]
            with _output(to, is_text=format is not Format.PARQUET) as stream:
                counts = asdict(write(store, stream))
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


@contextmanager
def _output(to: Path | None, *, is_text: bool) -> Iterator[BinaryIO]:
    """Yield stdout or a file that appears under its name when it is whole."""
    if to is None:
        if not is_text and sys.stdout.isatty():
            raise InputError("parquet is binary and stdout is a terminal; add --to FILE")
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    from tunerd.system.files import written_whole

    try:
        if not to.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with written_whole(to, sync=False) as stream:
            yield stream
    except OSError as error:
        raise FolderError(
            f"{to} cannot be written: {error.strerror or error}; choose another file with --to"
        ) from error


def _done(value: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(value))
    else:
        said = ", ".join(f"{name.replace('_', ' ')} {item}" for name, item in value.items())
        print(said, file=sys.stderr)
