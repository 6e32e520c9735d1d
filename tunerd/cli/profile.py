"""`tunerd profile`: a model's speed over shares of a device, and the share that it needs."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.consoles import steps_shown
from tunerd.cli.options import AsJson, Debug
from tunerd.errors import InputError

if TYPE_CHECKING:
    from tunerd.api import ProfileResult

_PERCENT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%?")
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)


class SliceKind(StrEnum):
    MPS = "mps"
    WHOLE = "whole"
    CPU = "cpu"
    SIMULATED = "simulated"


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


def profile(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|RUN|ARTIFACT",
            help="An ONNX file, which gets its default schedules, or what a run has tuned.",
            show_default=False,
        ),
    ],
    shares: Annotated[
        str, typer.Option(help="Shares in percent; the whole device always is one.")
    ] = "10,20,30,40,50,60,70,80,90,100",
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes of an ONNX file: 1,8. [default: as exported]")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Shares of a GPU.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Shares of this machine's cores.")] = False,
    slice_kind: Annotated[
        SliceKind | None,
        typer.Option("--slice", help="Kind of slice. [default: mps with a GPU, else cpu]"),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(metavar="PERCENT", help="How much slower than the whole device: 10%."),
    ] = "10%",
    slo_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="Say which share answers 95 of 100 inferences in so long."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="How often each share is visited.")
    ] = 5,
    duration: Annotated[str, typer.Option(help="Of a visit, at least: 0.5s, 2s.")] = "2s",
    seed: Annotated[int, typer.Option(min=0, help="Of the order of visits.")] = 0,
    shape: Annotated[
        list[str] | None, typer.Option(help="An input's shape: images:1,3,224,224. Repeatable.")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="An open dimension's size: seq=128. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder; a profile goes on in its own. [default: profiles/NAME-gpu]"),
    ] = None,
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
    if gpu and cpu:
        raise InputError("--gpu and --cpu ask for two devices; leave one of them out")
    said = {"shares": shares, "batches": batches, "loss": loss, "duration": duration}
    pcts, wanted, allowed, secs = values_of(said)
    from tunerd import api
    from tunerd.cli.tune import dims_of, shapes_of

    with steps_shown(quiet=json or format is not Format.TABLE) as show:
        found = api.profile(
            model,
            shares=pcts,
            batches=wanted,
            device="gpu" if gpu else "cpu" if cpu else None,
            slice_kind=None if slice_kind is None else slice_kind.value,
            loss=allowed,
            slo_ms=slo_ms,
            rounds=rounds,
            duration_secs=secs,
            seed=seed,
            shapes=shapes_of(shape or ()),
            dims=dims_of(dim or ()),
            out=out,
            on_step=show,
        )
    _show(found, Format.JSON if json else format)
    return 0


def values_of(given: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], float, float]:
    """Return shares, batches, loss and a visit's seconds, by the names of the flags."""
    batches = given["batches"]
    return (
        _numbers("--shares", given["shares"], most=100),
        _numbers("--batches", batches, most=2**31 - 1) if batches is not None else (),
        _fraction(given["loss"]),
        _duration(given["duration"]),
    )


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


def _numbers(flag: str, text: str, *, most: int) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if _NUMBER.fullmatch(word)]
    if len(numbers) != len(words) or not all(1 <= n <= most for n in numbers):
        limit = "100" if most == 100 else "more"
        raise InputError(
            f"{flag} '{text}' is no list of whole numbers from 1 to {limit}; write for example "
            f"{flag} {'10,25,50,100' if most == 100 else '1,8'}"
        )
    return tuple(sorted(set(numbers)))


def _fraction(text: str) -> float:
    match = _PERCENT.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise InputError(f"--loss '{text}' is no percentage above 0; write for example 10%")
    return float(match[1]) / 100


def _duration(text: str) -> float:
    from tunerd.settings import parse_duration

    try:
        secs = parse_duration(text)
    except ValueError as error:
        raise InputError(f"--duration: {error}") from None
    if not 0.05 <= secs <= 600:
        raise InputError(f"--duration {text} of a visit must be 0.05s to 10m")
    return secs
