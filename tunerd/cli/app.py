"""The commands of `tunerd`."""

from __future__ import annotations

import os
import threading
from enum import StrEnum
from typing import Annotated

import typer

from tunerd.cli.bench import bench
from tunerd.cli.compare import compare
from tunerd.cli.doctor import doctor
from tunerd.cli.help import Command, Group
from tunerd.cli.matrix import matrix
from tunerd.cli.pack import pack
from tunerd.cli.preflight import preflight
from tunerd.cli.profile import profile
from tunerd.cli.records import app as records
from tunerd.cli.report import report
from tunerd.cli.run import run
from tunerd.cli.status import status
from tunerd.cli.tune import tune
from tunerd.errors import ExitCode
from tunerd.system.version import __version__

app = typer.Typer(
    name="tunerd",
    help="Tune neural networks for the share of a GPU on which they will be served.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # in rich's own, "[default: ...]" is markup and left out
    cls=Group,
)
app.command(cls=Command)(tune)
app.command(cls=Command)(bench)
app.command(cls=Command)(profile)
app.command(cls=Command)(status)
app.command(cls=Command)(compare)
app.command(cls=Command)(matrix)
app.command(cls=Command)(pack)
app.command(cls=Command)(report)
app.command(cls=Command)(doctor)
app.command(cls=Command)(preflight)
app.command(cls=Command)(run)
app.add_typer(records, name="records")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tunerd {__version__}")
        raise typer.Exit


def _end_with_stdin() -> None:
    """Have this process end, at once, when its standard input does; its children get an empty one.

    Whoever started it was killed then. What it has stored goes on, as after a kill of its own.
    """
    leash = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        while os.read(leash, 1):
            pass
        os._exit(ExitCode.INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what is done to stderr.")] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            envvar="TUNERD_LOG_FORMAT",
            help="json: log what is done to stderr, one JSON object per line, and nothing else.",
        ),
    ] = LogFormat.TEXT,
    leash: Annotated[
        bool, typer.Option("--leash", hidden=True, help="End with the standard input.")
    ] = False,
) -> None:
    from tunerd.system import logs

    if leash:
        _end_with_stdin()
    logs.set_up(verbose=verbose, as_json=log_format is LogFormat.JSON)
