"""The commands of `tunerd`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from tunerd import __version__
from tunerd.cli.bench import bench
from tunerd.cli.compare import compare
from tunerd.cli.doctor import doctor
from tunerd.cli.pack import pack
from tunerd.cli.preflight import preflight
from tunerd.cli.records import app as records
from tunerd.cli.report import report
from tunerd.cli.run import run
from tunerd.cli.tune import tune

app = typer.Typer(
    name="tunerd",
    help="Tune neural networks for the share of a GPU on which they will be served.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(tune)
app.command()(bench)
app.command()(compare)
app.command()(pack)
app.command()(report)
app.command()(doctor)
app.command()(preflight)
app.command()(run)
app.add_typer(records, name="records")


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
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
