"""`tunerd matrix`: a model tuned at each of several shares, and run at all of them."""

from __future__ import annotations

import sys

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import Interrupted
from tunerd.settings import TuneSettings
from tunerd.settings.studies import MatrixSettings

_TRIALS = 1000  # of the first level


def matrix(settings: MatrixSettings, json: AsJson = False, debug: Debug = False) -> int:
    """Tune MODEL at each share, run what comes out at every share, and say what the share is worth.

    The same command in the same folder goes on where it stopped.
    """
    from tunerd.report.matrix_page import write_matrix
    from tunerd.studies.matrix.execute import Asked, carry_out
    from tunerd.studies.matrix.folder import read
    from tunerd.studies.matrix.result import result_of, whole_rounds
    from tunerd.telemetry.progress import open_progress

    asked = Asked(_first(settings), settings.shares, settings.rounds, settings.independent)
    try:
        kept = carry_out(asked, lambda: open_progress(quiet=json), _say)
    except Interrupted as stopped:
        kept = read(asked.base.out)
        if not whole_rounds(kept, set(settings.shares)):
            raise
        result = result_of(kept)
        write_matrix(result, kept.root)
        there = f"{result.rounds} of {settings.rounds} rounds are in {kept.report}"
        raise Interrupted(f"{stopped}; {there}") from None
    _say("resampling")
    result = result_of(kept)
    write_matrix(result, kept.root)
    if json:
        print((kept.root / "matrix-result.json").read_text(), end="")
    else:
        from tunerd.cli.consoles import stdout_console
        from tunerd.report.matrix_tables import matrix_table

        console = stdout_console()
        console.print(matrix_table(result))
        console.print(f"report    {kept.report}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _first(settings: MatrixSettings) -> TuneSettings:
    """Return what the first level is tuned with; its folder is the matrix's."""
    from pathlib import Path

    from tunerd.settings.option import checked
    from tunerd.settings.texts import sized_name

    kind = settings.slice_kind or _usual_kind()
    shared = ("model", "budget_secs", "shapes", "dims", "batch", "seed", "tuners", "l2")
    name = sized_name(
        settings.model.stem, batch=settings.batch, shapes=settings.shapes, dims=settings.dims
    )
    has_limit = settings.trials is not None or settings.budget_secs is not None
    return checked(
        TuneSettings,
        {field: getattr(settings, field) for field in shared}
        | {
            "cpu_pct" if kind == "cpu" else "gpu_pct": max(settings.shares),
            "slice_kind": kind,
            "out": settings.out or Path("runs") / f"{name}-matrix",
            "trials": settings.trials if has_limit else _TRIALS,
        },
    )


def _usual_kind() -> str:
    from tunerd.slices import member

    return "mps" if member("mps").usability().ok else "cpu"


def _say(line: str) -> None:
    from tunerd.system.text import one_line

    print(f"tunerd matrix: {one_line(line)}", file=sys.stderr, flush=True)
