"""Where commands print their tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 10_000  # columns; more than any line has


def stdout_console() -> Console:
    """Return a console on stdout. A pipe or a file has no width at which lines would be cut off."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)
