"""`tunerd pack`: artifacts of several shares as one."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from tunerd.cli.options import AsJson, Debug


def pack(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_ARTIFACT...",
            help="Run folders or artifacts of one model, each of another share.",
            show_default=False,
        ),
    ],
    to: Annotated[Path, typer.Option(help="The new artifact folder.", show_default=False)],
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Join artifacts of several shares into one, which loads the kernels for the share it finds."""
    from tunerd.artifacts.packing import pack_shares
    from tunerd.vocabulary import unit_name

    variants = pack_shares(sources, to)
    if json:
        shares = [
            {"pct": v["share"]["pct"], "sm_counts": v["share"]["sm_counts"], **v["stored_as"]}
            for v in variants
        ]
        print(json_module.dumps({"artifact": str(to), "variants": shares}))
        return
    counts = ", ".join("/".join(map(str, v["share"]["sm_counts"])) for v in variants)
    print(f"{to}: kernels for {counts} {unit_name(variants[0]['target']['kind'])}")
