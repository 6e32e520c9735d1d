"""`tunerd status`: how a run is, from another terminal."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunerd.cli.options import AsJson
from tunerd.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunerd.telemetry.run_status import RunStatus

_REFRESH_SECS = 1.0


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False,
    json: AsJson = False,
) -> None:
    """Show how far a run is, while it is alive and afterwards; the run notices nothing.

    Says whether it is alive, has ended or was killed, what it has found so far, and what failed.
    """
    from tunerd.telemetry.run_status import status_of

    if json and watch:
        raise InputError("--json prints one document and --watch many; give one of the two")
    if json:
        from tunerd.report.status import status_json

        print(json_module.dumps(status_json(status_of(run)), ensure_ascii=False))
        return
    from tunerd.cli.consoles import stdout_console
    from tunerd.report.status import status_page

    console = stdout_console()
    if watch:
        _watch(run, console)
    else:
        console.print(status_page(status_of(run), whole=True))


def _watch(run: Path, console: Console) -> None:
    """Refresh until the run ends; Ctrl-C ends the watching, which is no error."""
    from tunerd.telemetry.run_status import status_of

    def states() -> Iterator[RunStatus]:
        while True:
            state = status_of(run)
            yield state
            if not state.life.may_change:
                return
            time.sleep(_REFRESH_SECS)

    try:
        if console.is_terminal:
            _refresh(states(), console)
        else:
            _print_lines(states(), console)
    except KeyboardInterrupt:
        pass


def _refresh(states: Iterator[RunStatus], console: Console) -> None:
    from rich.live import Live

    from tunerd.report.status import status_page

    with Live(console=console, auto_refresh=False) as live:
        for state in states:
            live.update(status_page(state, whole=False), refresh=True)


def _print_lines(states: Iterator[RunStatus], console: Console) -> None:
    """Print a line when the life or the phase changes, and now and then."""
    from tunerd.telemetry.progress import LINE_EVERY_SECS, Pace, state_line

    said_at, said = 0.0, ("", "")
    for state in states:
        progress = state.progress
        now = (str(state.life), progress.phase)
        if now != said or state.at - said_at >= LINE_EVERY_SECS:
            said_at, said = state.at, now
            line = state_line(progress, Pace.of(progress, state.trials_per_sec))
            console.out(f"{state.life}: {line}", highlight=False)
