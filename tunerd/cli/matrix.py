"""`tunerd matrix`: a model tuned at each of several shares, and run at all of them."""

from __future__ import annotations

import sys

from tunerd.cli.options import AsJson, Debug
from tunerd.settings.studies import MatrixSettings


def matrix(settings: MatrixSettings, json: AsJson = False, debug: Debug = False) -> int:
    """Tune MODEL at each share, run what comes out at every share, and say what the share is worth.

    The same command in the same folder goes on where it stopped.
    """
    from tunerd import api
    from tunerd.telemetry.progress import open_progress

    made = api.carry_out_matrix(settings, lambda: open_progress(quiet=json), _say)
    if json:
        print((made.folder / "matrix-result.json").read_text(), end="")
    else:
        from tunerd.cli.consoles import stdout_console
        from tunerd.report.matrix_page import matrix_table

        console = stdout_console()
        console.print(matrix_table(made.result))
        console.print(f"report    {made.report}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _say(line: str) -> None:
    from tunerd.system.text import one_line

    print(f"tunerd matrix: {one_line(line)}", file=sys.stderr, flush=True)
