"""`tunerd profile`: a model's speed over shares of a device, and the share that it needs."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tunerd.cli.consoles import steps_shown
from tunerd.cli.options import AsJson, Debug
from tunerd.errors import InputError
from tunerd.settings.studies import ProfileSettings

if TYPE_CHECKING:
    from tunerd.api import ProfileResult


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


def profile(
    settings: ProfileSettings,
    format: Annotated[Format, typer.Option(help="What stdout gets.")] = Format.TABLE,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Measure latency and throughput over shares and batches; find the knee.

    The knee is the smallest share at which an inference takes at most --loss longer than on the
    whole device. The same command in the same folder measures only what is missing.
    """
    if json and format not in (Format.TABLE, Format.JSON):
        raise InputError(f"--json and --format {format} ask for two things; leave one of them out")
    from tunerd import api

    with steps_shown(quiet=json or format is not Format.TABLE) as show:
        found = api.profile(
            settings.model,
            shares=settings.shares,
            batches=settings.batches or (),
            device="gpu" if settings.gpu else "cpu" if settings.cpu else None,
            slice_kind=settings.slice_kind,
            loss=settings.loss,
            slo_ms=settings.slo_ms,
            rounds=settings.rounds,
            duration_secs=settings.duration_secs,
            seed=settings.seed,
            shapes=settings.shapes,
            dims=settings.dims,
            out=settings.out,
            on_step=show,
        )
    _show(found, Format.JSON if json else format)
    return 0


def _show(result: ProfileResult, format: Format) -> None:
    from tunerd.report.share_text import profile_json

    found = result.profile
    if format is Format.JSON:
        document = profile_json(found) | {"report": str(result.report)}
        print(json_module.dumps(document, ensure_ascii=False))
        return
    from tunerd.report.share_text import share_markdown, share_table

    if format is Format.MARKDOWN:
        print(share_markdown(found), end="")
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(share_table(found))
    console.print(f"report    {result.report}", soft_wrap=True)
