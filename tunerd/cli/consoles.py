"""Where commands print: tables on stdout, and what is done next on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 10_000  # columns; more than any line has


def stdout_console() -> Console:
    """Return a console on stdout. A pipe or a file has no width at which lines would be cut off."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


@contextlib.contextmanager
def steps_shown(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows on stderr what is done next: in place on a terminal, else line by line."""
    if quiet:
        yield lambda message: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda message: print(message, file=sys.stderr, flush=True)
        return
    with console.status("starting") as status:
        yield status.update
