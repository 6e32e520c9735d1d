"""`tunerd tune`: from an ONNX file to a verified, tuned artifact."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tunerd.cli.consoles import steps_shown
from tunerd.cli.options import AsJson, Debug
from tunerd.errors import ExitCode, InputError

if TYPE_CHECKING:
    from tunerd.api import Run
    from tunerd.settings import TuneSettings
    from tunerd.studies.profile.auto import Choice
    from tunerd.vocabulary.verdict import Verdict


_MAX_SIZE = 2**31 - 1  # settings.MAX_COUNT, which is not imported for --help
_T = TypeVar("_T")

AUTO = "auto"
_AUTO_PCT = 0  # what stands for it among percentages


def share_of(text: str) -> int:
    """Return the percentage that a share's flag names; 0 for an automatic one."""
    if text == AUTO:
        return _AUTO_PCT
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= 100):
        raise typer.BadParameter(f"'{text}' is neither a whole number from 1 to 100 nor {AUTO}")
    return int(text)


class SliceKind(StrEnum):
    MPS = "mps"
    WHOLE = "whole"
    CPU = "cpu"
    SIMULATED = "simulated"


class Mps(StrEnum):
    OWN = "own"
    EXTERNAL = "external"


class Neighbours(StrEnum):
    NONE = "none"
    BUSY = "busy"
    AS_TUNED = "as-tuned"


class L2(StrEnum):
    MODEL = "model"
    COLD = "cold"
    WARM = "warm"


def tune(
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    gpu_pct: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            parser=share_of,
            metavar="N|auto",
            help="Tune for this share of a GPU, in percent; auto: choose it by a profile.",
        ),
    ] = None,
    cpu_pct: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            parser=share_of,
            metavar="N|auto",
            help="Tune for this share of this machine's cores; auto: choose it by a profile.",
        ),
    ] = None,
    slo_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="With auto: the smallest share at which 95 of 100 inferences of the default model "
            "take at most so many milliseconds.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder; a run goes on in its own. [default: runs/MODEL-gpu40]"),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many trials, earlier ones included.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Search for this long: 90s, 10m, 1.5h.")
    ] = None,
    slices: Annotated[
        int | None, typer.Option(min=1, help="Slices per device. [default: as many as fit]")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="An input's shape: images:1,3,224,224. Repeatable.")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="An open dimension's size: batch=1. Repeatable.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Another batch size.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    slice_kind: Annotated[
        SliceKind | None,
        typer.Option("--slice", help="Kind of slice. [default: mps for GPUs, cpu for cores]"),
    ] = None,
    mps: Annotated[
        Mps, typer.Option(help="Start an MPS daemon of our own, or use the one that is there.")
    ] = Mps.OWN,
    address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster: HOST:PORT, auto or local. [default: a Ray job's own, else a "
            "private local one]"
        ),
    ] = None,
    tuners: Annotated[
        int | None, typer.Option(min=1, help="Search and build processes. [default: by cores]")
    ] = None,
    warm_start: Annotated[
        list[Path] | None,
        typer.Option(help="Learn from another run, of any share or model. Repeatable."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="TUNERD_STORE",
            help="A team's store: postgresql+psycopg://user@host/database, sqlite:////a/file.",
        ),
    ] = None,
    require_hit: Annotated[
        bool, typer.Option("--require-hit", help="Do not tune: build from the store's records.")
    ] = False,
    neighbours: Annotated[
        Neighbours,
        typer.Option(help="What the device's other slices do while finalists are measured."),
    ] = Neighbours.NONE,
    l2: Annotated[
        L2, typer.Option(help="What of their weights finalists find in the cache.")
    ] = L2.MODEL,
    fidelity: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Measure so many more candidates of each task again, to judge the search's "
            "ranking; each costs its build and 20 to 40 samples of 2 to 5 ms. They never win.",
        ),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Tune MODEL for a share of a device; leave a verified artifact and a report.

    Exit codes: 0 faster, 1 no gain, 2 cannot tell; 10 and more: no artifact, or not all that comes
    after it. The same command in the same folder goes on where it stopped.
    """
    given = dict(locals())  # the flags by name, and nothing else yet
    from tunerd.cluster.job import require_kept

    settings = settings_of(given | _store(store))
    require_kept(settings.out)
    is_auto = settings.share_from == AUTO
    if dry_run:
        _print_plan(settings, json)
        return 0
    from tunerd import api
    from tunerd.telemetry.progress import open_progress

    choice = None
    if is_auto:
        settings, choice = _choose_share(settings, quiet=json)
    with open_progress(quiet=json) as progress:
        run = api.carry_out(settings, progress)
    code = _exit_code(run.verdict)
    if choice is not None:
        with steps_shown(quiet=json) as show:
            run = api.review_share(run, settings, choice, show)
    if json:
        _print_json(run, code)
    else:
        _print(run, settings)
    return int(code)


def _choose_share(settings: TuneSettings, *, quiet: bool) -> tuple[TuneSettings, Choice]:
    """Return the settings with a share, and say on stderr which it is."""
    from tunerd import api
    from tunerd.report.choice_text import choice_sentence

    with steps_shown(quiet=quiet) as show:
        resolved, choice = api.choose_share(settings, show)
    if not quiet:
        print(choice_sentence(choice), file=sys.stderr, flush=True)
    return resolved, choice


def _exit_code(verdict: Verdict) -> ExitCode:
    from tunerd.vocabulary.verdict import Verdict

    codes = {Verdict.FASTER: ExitCode.BETTER, Verdict.CANNOT_TELL: ExitCode.CANNOT_TELL}
    return codes.get(verdict, ExitCode.NO_GAIN)


def _print_json(run: Run, code: ExitCode) -> None:
    from tunerd.report.choice_text import share_json
    from tunerd.report.run_result import run_json

    share = run.share
    document = run_json(run.view, run.outcome) | {
        "share": None
        if share is None
        else share_json(share.aftermath) | {"report": str(share.report)},
        "report": str(run.report_path),
        "exit_code": int(code),
    }
    print(json_module.dumps(document, ensure_ascii=False))


def _print(run: Run, settings: TuneSettings) -> None:
    from rich.console import Console

    from tunerd.report.choice_text import share_sentences
    from tunerd.report.run_result import run_result

    console = Console()
    console.print(run_result(run.view, run.outcome, fidelity=bool(settings.fidelity)))
    for sentence in share_sentences(run.share.aftermath) if run.share else ():
        console.print(sentence, highlight=False)
    console.print(f"artifact  {run.artifact.path}", highlight=False, soft_wrap=True)
    console.print(f"report    {run.report_path}", highlight=False, soft_wrap=True)


def _print_plan(settings: TuneSettings, as_json: bool) -> None:
    from tunerd import api
    from tunerd.telemetry.progress import open_progress

    with open_progress(quiet=as_json) as progress:
        plan = api.plan_of(settings, progress.warn)
    if as_json:
        print(json_module.dumps(plan.details))
        return
    from rich.console import Console

    from tunerd.report.table import plan_table

    Console().print(plan_table(plan.details))


def settings_of(given: Mapping[str, Any]) -> TuneSettings:
    """Return the settings that parsed flags, by the names of `tune`'s parameters, amount to.

    A flag that has a setting's name is that setting; what is said here are the others.
    """
    from pydantic import ValidationError

    from tunerd.cluster.job import cluster_address
    from tunerd.settings import TuneSettings
    from tunerd.settings.texts import sized_name

    gpu_pct, cpu_pct = given["gpu_pct"], given["cpu_pct"]
    is_auto = _AUTO_PCT in (gpu_pct, cpu_pct)
    pct = gpu_pct if gpu_pct is not None else cpu_pct
    share = f"{'cpu' if gpu_pct is None else 'gpu'}{AUTO if pct == _AUTO_PCT else pct}"
    shapes, dims = shapes_of(given["shape"] or ()), dims_of(given["dim"] or ())
    name = sized_name(given["model"].stem, batch=given.get("batch"), shapes=shapes, dims=dims)
    values = {name: given[name] for name in TuneSettings.model_fields if name in given} | {
        "gpu_pct": 100 if gpu_pct == _AUTO_PCT else gpu_pct,
        "cpu_pct": 100 if cpu_pct == _AUTO_PCT else cpu_pct,
        "share_from": AUTO if is_auto else "flag",
        "out": given["out"] or Path("runs") / f"{name}-{share}",
        "slice_kind": str(given["slice_kind"] or ("cpu" if gpu_pct is None else "mps")),
        "shapes": shapes,
        "dims": dims,
        "budget_secs": _budget(given["budget"]),
        "mps": str(given["mps"]),
        "neighbours": str(given["neighbours"]),
        "l2": str(given["l2"]),
        "address": cluster_address(given["address"]),
        "warm_start": tuple(given["warm_start"] or ()),
    }
    try:
        return TuneSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if not where:
            raise InputError(message) from None
        flag = "MODEL" if where == "model" else f"--{where.replace('_', '-')}"
        raise InputError(f"{flag} {first['input']}: {message}") from None


def _store(text: str | None) -> dict[str, Any]:
    """Return what the settings hold of a store; runs this program again to hide a password."""
    if text is None:
        return {}
    import os

    from tunerd.system.store_address import hide_password, password_from

    try:
        hide_password()
    except ValueError as error:
        raise InputError(f"--store cannot be used: {error}") from None
    os.environ.pop("TUNERD_STORE", None)  # Ray's processes would have it, and a password in it
    return {"store": text, "store_password": password_from(os.environ)}


def shapes_of(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return what --shape says, by the inputs' names."""
    return _once("--shape", [_shape(text) for text in texts])


def dims_of(texts: Sequence[str]) -> dict[str, int]:
    """Return what --dim says, by the dimensions' names."""
    return _once("--dim", [_dim(text) for text in texts])


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition(":")
    shape = tuple(_size(s) for s in sizes.split(","))
    if not name or None in shape:
        raise InputError(
            f"--shape '{text}' is not NAME:SIZES with sizes of 1 or more, up to {_MAX_SIZE}; write "
            "for example --shape images:1,3,224,224"
        )
    return name, tuple(s for s in shape if s is not None)


def _dim(text: str) -> tuple[str, int]:
    name, _, text_of_size = text.rpartition("=")
    size = _size(text_of_size)
    if not name or size is None:
        raise InputError(
            f"--dim '{text}' is not NAME=SIZE with a size of 1 or more, up to {_MAX_SIZE}; write "
            "for example --dim batch=1"
        )
    return name, size


def _size(text: str) -> int | None:
    """Return a dimension's size, None where the text is none."""
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_SIZE))):
        return None
    return int(text) if 1 <= int(text) <= _MAX_SIZE else None


def _once(flag: str, given: list[tuple[str, _T]]) -> dict[str, _T]:
    """Return what a repeated flag says by name; InputError where it says two things of one."""
    values: dict[str, _T] = {}
    for name, value in given:
        if values.setdefault(name, value) != value:
            raise InputError(f"{flag} is given twice for '{name}', with other sizes; give it once")
    return values


def _budget(text: str | None) -> float | None:
    if text is None:
        return None
    from tunerd.settings import parse_duration

    try:
        secs = parse_duration(text)
    except ValueError as error:
        raise InputError(f"--budget: {error}") from None
    if secs <= 0:
        raise InputError(f"--budget {text} leaves no time; give more than 0s")
    return secs
