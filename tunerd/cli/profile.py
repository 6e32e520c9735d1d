"""`tunerd profile`: a model's speed over shares of a device, and the share that it needs."""

from __future__ import annotations

import contextlib
import json as json_module
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import InputError, Interrupted

if TYPE_CHECKING:
    from tunerd.studies.profile.profile import Profile
    from tunerd.studies.profile.subject import Subject

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
    subject = _subject(model, wanted, shape or (), dim or ())
    kind = str(slice_kind) if slice_kind else _kind(subject, gpu=gpu, cpu=cpu)
    if (gpu and kind == "cpu") or (cpu and kind in ("mps", "whole")):
        raise InputError(f"--slice {kind} is of the other device; leave one of the two flags out")
    from tunerd.cli.tune import sized_name
    from tunerd.studies.profile.folder import REPORT
    from tunerd.studies.profile.measuring import Effort
    from tunerd.studies.profile.plan import plan_shares
    from tunerd.studies.profile.profile import profile as measured
    from tunerd.studies.profile.profile import so_far

    planned = plan_shares(kind, pcts)
    name = sized_name(_name(model), {"shape": shape, "dim": dim})
    root = out or Path("profiles") / f"{name}-{'cpu' if kind == 'cpu' else 'gpu'}"
    effort = Effort(rounds, secs, seed)
    slo_secs = None if slo_ms is None else slo_ms / 1e3
    try:
        with saying(quiet=json or format is not Format.TABLE) as say:
            found = measured(
                subject, planned, root, effort=effort, say=say, loss=allowed, slo_secs=slo_secs
            )
    except Interrupted as stopped:
        part = so_far(subject, planned, root, loss=allowed, slo_secs=slo_secs)
        if part is None:
            raise
        write_report(part, root)
        there = f"{part.rounds} of {rounds} rounds are in {root / REPORT}"
        raise Interrupted(f"{stopped}; {there}") from None
    write_report(found, root)
    _show(found, Format.JSON if json else format, root)
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


def write_report(found: Profile, root: Path) -> None:
    """Write the page and the document of a profile into its folder."""
    from tunerd.report.frame import write_page
    from tunerd.report.share_page import share_page
    from tunerd.report.share_words import profile_json
    from tunerd.studies.profile.folder import REPORT, RESULT, write_json

    write_json(root / RESULT, profile_json(found))
    write_page(root / REPORT, share_page(found))


@contextlib.contextmanager
def saying(*, quiet: bool) -> Iterator[Callable[[str], None]]:
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


def _show(found: Profile, format: Format, root: Path) -> None:
    from tunerd.report.share_words import profile_json
    from tunerd.studies.profile.folder import REPORT

    if format is Format.JSON:
        document = profile_json(found) | {"report": str(root / REPORT)}
        print(json_module.dumps(document, ensure_ascii=False))
        return
    from tunerd.report.share_table import share_markdown, share_table

    if format is Format.MARKDOWN:
        print(share_markdown(found), end="")
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(share_table(found))
    console.print(f"report    {root / REPORT}", soft_wrap=True)


def _subject(
    model: Path, batches: Sequence[int], shapes: Sequence[str], dims: Sequence[str]
) -> Subject:
    from tunerd.cli.tune import dims_of, shapes_of
    from tunerd.studies.profile.subject import is_artifact, subject_of_artifact, subject_of_model

    if model.is_dir() or is_artifact(model):
        if shapes or dims:
            raise InputError(
                f"--shape and --dim fix the inputs of an ONNX file, and {model} has fixed ones; "
                "leave them out"
            )
        return subject_of_artifact(model, batches)
    return subject_of_model(model, batches, shapes=shapes_of(shapes), dims=dims_of(dims))


def _kind(subject: Subject, *, gpu: bool, cpu: bool) -> str:
    from tunerd.slices import member

    if gpu or cpu:
        return "mps" if gpu else "cpu"
    if subject.target_kind:
        return "mps" if subject.target_kind == "cuda" else "cpu"
    return "mps" if member("mps").usability().ok else "cpu"


def _name(model: Path) -> str:
    resolved = model.resolve()
    if resolved.name == "artifact":
        resolved = resolved.parent
    return resolved.stem if model.is_file() else resolved.name


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
