"""`tunerd bench`: an artifact's speed at a share, alone and beside neighbours."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import FolderError, InputError


def bench(
    artifact: Annotated[Path, typer.Argument(help="An artifact folder.", show_default=False)],
    gpu_pct: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Share of a GPU. [default: as tuned]"),
    ] = None,
    cpu_pct: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Share of this machine's cores. [default: as tuned]"),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            help="What the device's other slices run: copies, memory-hog, or another artifact's "
            "folder. [default: nothing]"
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Slices that run the artifact. [default: 1, or all with copies]"),
    ] = None,
    duration: Annotated[
        str, typer.Option(help="Measure this long, alone and again beside neighbours.")
    ] = "10s",
    to: Annotated[
        Path | None, typer.Option(help="Write every inference's start and latency to this file.")
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Measure an artifact's latency and throughput in its slice, alone and beside neighbours."""
    from rich.console import Console

    from tunerd import api
    from tunerd.report.bench_table import bench_json, bench_table, rounds_json

    with Console(stderr=True, quiet=json).status("starting") as status:
        result = api.bench(
            artifact,
            gpu_pct=gpu_pct,
            cpu_pct=cpu_pct,
            beside=beside,
            replicas=replicas,
            duration_secs=_duration(duration),
            on_step=status.update,
        )
    document, raw = bench_json(result), {"rounds": rounds_json(result)}
    if to is not None:
        _write(to, json_module.dumps(document | raw) + "\n")
    if json:
        print(json_module.dumps(document | ({"raw": str(to)} if to else raw)))
        return 0
    Console(highlight=False).print(bench_table(result))
    return 0


def _write(to: Path, text: str) -> None:
    try:
        to.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FolderError(f"--to {to} cannot be written: {reason}; name another file") from None


def _duration(text: str) -> float:
    from tunerd.settings import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise InputError(f"--duration: {error}") from None
