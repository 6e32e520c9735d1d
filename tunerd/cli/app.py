"""The commands of `tunerd`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tunerd.cli.group import MARKUP, LazyGroup
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
    "colocate": "Run several models on one device: plan who gets what, check a plan, or bench it. "
    "Or place models and tuning runs on several devices.",
    "pack": "Join artifacts of several shares into one, which loads the kernels for the share "
    "it finds.",
    "tenant": "Make another model's weights a tenant of an artifact, whose kernels are tuned "
    "already.",
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
) -> None:
    from tunerd.system import logs

    logs.set_up(verbose=verbose, as_json=log_format is LogFormat.JSON)
