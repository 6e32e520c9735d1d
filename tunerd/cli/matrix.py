"""`tunerd matrix`: a model tuned at each of several shares, and run at all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.cli.tune import L2, SliceKind, dims_of, settings_of, shapes_of
from tunerd.errors import InputError, Interrupted

_TRIALS = 1000  # of the first level


def matrix(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    shares: Annotated[
        str, typer.Option(help="The shares, in percent: 10,25,40,50,75,100.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for all of it; goes on there. [default: runs/MODEL-matrix]"),
    ] = None,
    slice_kind: Annotated[
        SliceKind | None,
        typer.Option(
            "--slice",
            help="Kind of slice: mps for shares of a GPU, cpu for shares of the cores. [default: "
            "mps where it works, else cpu]",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Trials of the first level; a later one has 15% of them, an independent one "
            "all. [default: 1000]",
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Search time of the first level: 90s, 10m.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="How often every model is run at every share.")
    ] = 8,
    shape: Annotated[
        list[str] | None, typer.Option(help="An input's shape: images:1,3,224,224. Repeatable.")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="An open dimension's size: batch=1. Repeatable.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Another batch size.")] = None,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Tune at each share as if it were the only one, with all trials, and let it keep "
            "its own kernels. Costs a whole search for each.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the searches and of the order.")] = 0,
    tuners: Annotated[
        int | None, typer.Option(min=1, help="Search and build processes. [default: by cores]")
    ] = None,
    l2: Annotated[
        L2, typer.Option(help="What of their weights finalists find in the cache.")
    ] = L2.MODEL,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Tune MODEL at each share, run what comes out at every share, and say what the share is worth.

    The same command in the same folder goes on where it stopped.
    """
    given = dict(locals())
    from tunerd.settings.texts import sized_name

    shapes, dims = shapes_of(shape or ()), dims_of(dim or ())
    name = sized_name(model.stem, batch=batch, shapes=shapes, dims=dims)
    percents = shares_of(shares)
    kind = str(slice_kind or _usual_kind())
    given |= {
        "slice_kind": kind,
        "gpu_pct": max(percents) if kind in ("mps", "whole", "simulated") else None,
        "cpu_pct": max(percents) if kind == "cpu" else None,
        "out": out or Path("runs") / f"{name}-matrix",
        "trials": trials if trials is not None or budget is not None else _TRIALS,
        "mps": "own",
        "neighbours": "none",
        "address": "local",
        "warm_start": None,
    }
    from tunerd.report.matrix_page import write_matrix
    from tunerd.studies.matrix.execute import Asked, carry_out
    from tunerd.studies.matrix.folder import read
    from tunerd.studies.matrix.result import result_of, whole_rounds
    from tunerd.telemetry.progress import open_progress

    asked = Asked(settings_of(given), percents, rounds, independent)
    try:
        kept = carry_out(asked, lambda: open_progress(quiet=json), _say)
    except Interrupted as stopped:
        kept = read(asked.base.out)
        if not whole_rounds(kept, set(percents)):
            raise
        result = result_of(kept)
        write_matrix(result, kept.root)
        there = f"{result.rounds} of {rounds} rounds are in {kept.report}"
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


def shares_of(text: str) -> tuple[int, ...]:
    """Return the distinct percentages of `10,25,40`, in order; InputError for anything else."""
    said = [part.strip().removesuffix("%") for part in text.split(",")]
    if not all(p.isascii() and p.isdecimal() and len(p) <= 3 and 1 <= int(p) <= 100 for p in said):
        raise InputError(
            f"--shares '{text}' is no list of percentages from 1 to 100; write for example "
            "--shares 10,25,40,50,75,100"
        )
    shares = tuple(sorted({int(p) for p in said}))
    if len(shares) < 2:
        raise InputError(f"--shares '{text}' is one share; a matrix takes two at least")
    return shares


def _usual_kind() -> str:
    from tunerd.slices import member

    return "mps" if member("mps").usability().ok else "cpu"


def _say(line: str) -> None:
    from tunerd.system.text import one_line

    print(f"tunerd matrix: {one_line(line)}", file=sys.stderr, flush=True)
