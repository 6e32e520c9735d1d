"""`tunerd tenant`: one more model for an artifact that serves several of its architecture."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from tunerd.cli.options import AsJson, Debug


def tenant(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.onnx",
            help="Of the architecture of the artifact's own model, with other weights.",
            show_default=False,
        ),
    ],
    like: Annotated[
        Path,
        typer.Option(help="The artifact, tuned with --tenants, or its run.", show_default=False),
    ],
    to: Annotated[Path, typer.Option(help="The new folder of weights.", show_default=False)],
    verify: Annotated[
        bool, typer.Option(help="Run it and compare with ONNX Runtime, on the artifact's device.")
    ] = True,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make another model's weights a tenant of an artifact, whose kernels are tuned already."""
    from tunerd.studies.tenant import make_tenant
    from tunerd.vocabulary import to_json

    made = make_tenant(model, like, to, verify=verify)
    if json:
        print(json_module.dumps(to_json(made) | {"folder": str(made.folder)}))
        return
    print(f"{made.folder}: {made.weight_bytes / (1 << 20):.1f} MiB of weights of {made.name}")
    if made.verification is not None:
        print(f"{made.verification.verdict.value}: {made.verification.message}")
