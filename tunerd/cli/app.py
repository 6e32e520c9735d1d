"""The commands of `tunerd`."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from tunerd.cli.group import MARKUP, LazyGroup
from tunerd.errors import ExitCode
from tunerd.system.version import __version__

# The first line of what each says of itself, which is not imported for it.
COMMANDS = {
    "tune": "Tune MODEL for a share of a device; leave a verified artifact and a report.",
    "bench": "Measure an artifact's latency and throughput in its slice, alone and beside "
    "neighbours.",
    "profile": "Measure latency and throughput over shares and batches; find the knee.",
    "status": "Show how far a run is, while it is alive and afterwards; the run notices nothing.",
    "compare": "Say whether NEW is slower than BASE by more than is allowed; for CI.",
    "matrix": "Tune MODEL at each share, run what comes out at every share, and say what the "
    "share is worth.",
    "pack": "Join artifacts of several shares into one, which loads the kernels for the share "
    "it finds.",
    "report": "Write the report of a run again, of any run there is; or of several side by side.",
    "doctor": "Check this machine: cores, packages, compiler, Ray, and GPUs with a real slice.",
    "preflight": "Say whether somebody uses this machine's GPUs or cores. Exit code: 0 quiet, "
    "19 not quiet.",
    "run": "Make the runs of RECIPE in order, each in its own folder; the same command goes on.",
    "records": "Look at the trials of a run; export, merge, pack and unpack runs.",
}


class Program(LazyGroup):
    table = COMMANDS


app = typer.Typer(
    name="tunerd",
    help="Tune neural networks for the share of a GPU on which they will be served.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    cls=Program,
)


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
    from tunerd.system.spawn import end_with

    leash = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    end_with(leash, ExitCode.INTERRUPTED)


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
