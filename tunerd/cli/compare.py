"""`tunerd compare`: a gate between two runs or artifacts."""

from __future__ import annotations

import json as json_module
import re
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import ExitCode, InputError

if TYPE_CHECKING:
    from tunerd.studies.compare import GateResult

_PERCENT = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,6})?)\s*%?")


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    BENCHMARK = "github-action-benchmark"


class CannotTell(StrEnum):
    PASS = "pass"
    FAIL = "fail"


def compare(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            help="A run, an artifact, or a store's run: ADDRESS#model=NAME,share=gpu40.",
            show_default=False,
        ),
    ],
    new: Annotated[
        str, typer.Argument(metavar="NEW", help="The one that is judged.", show_default=False)
    ],
    fail_above: Annotated[
        str, typer.Option(metavar="PERCENT", help="How much slower NEW may be: 5%.")
    ] = "5%",
    cannot_tell: Annotated[
        CannotTell, typer.Option(help="The exit code where it cannot be told: 2, or 0 with pass.")
    ] = CannotTell.FAIL,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure both now, in turns; artifacts always are."),
    ] = False,
    gpu_pct: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Measure at this share of a GPU. [default: as tuned]"),
    ] = None,
    cpu_pct: Annotated[
        int | None,
        typer.Option(
            min=1, max=100, help="Measure at this share of the cores. [default: as tuned]"
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="What stdout gets.")] = Format.TABLE,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Say whether NEW is slower than BASE by more than is allowed; for CI.

    Exits with 0 for better or same, 3 for worse, 2 where it cannot be told, 4 where the two cannot
    be compared.
    """
    if json and format not in (Format.TABLE, Format.JSON):
        raise InputError(f"--json and --format {format} ask for two things; leave one of them out")
    allowed = fraction_of(fail_above)
    from tunerd import api

    result = api.compare(
        base,
        new,
        fail_above=allowed,
        measure=measure,
        gpu_pct=gpu_pct,
        cpu_pct=cpu_pct,
        on_step=lambda what: print(what, file=sys.stderr),
    )
    code = exit_code_of(result, cannot_tell)
    _show(result, Format.JSON if json else format, code)
    return int(code)


def exit_code_of(result: GateResult, cannot_tell: CannotTell) -> ExitCode:
    """Return what CI sees of a result."""
    from tunerd.vocabulary.verdict import Verdict

    unsure = ExitCode.CANNOT_TELL if cannot_tell is CannotTell.FAIL else ExitCode.BETTER
    return {
        Verdict.FASTER: ExitCode.BETTER,
        Verdict.SAME: ExitCode.BETTER,
        Verdict.SLOWER: ExitCode.REGRESSION,
        Verdict.CANNOT_TELL: unsure,
        None: ExitCode.NOT_COMPARABLE,
    }[result.verdict]


def fraction_of(text: str) -> float:
    match = _PERCENT.fullmatch(text.strip())
    if not match:
        raise InputError(
            f"--fail-above '{text}' is no percentage of 0 or more; write for example 5%"
        )
    return float(match[1]) / 100.0


def _show(result: GateResult, format: Format, code: ExitCode) -> None:
    from tunerd.report import gate as forms

    if format is Format.JSON:
        print(json_module.dumps(forms.gate_json(result, int(code)), ensure_ascii=False))
    elif format is Format.BENCHMARK:
        print(json_module.dumps(forms.gate_benchmark(result), ensure_ascii=False, indent=2))
    elif format is Format.MARKDOWN:
        print(forms.gate_markdown(result), end="")
    else:
        from rich.console import Console

        Console(highlight=False).print(forms.gate_table(result))
