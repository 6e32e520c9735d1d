"""`tunerd compare`: a gate between two runs or artifacts."""

from __future__ import annotations

import json as json_module
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import ExitCode, InputError
from tunerd.settings.studies import CompareSettings

if TYPE_CHECKING:
    from tunerd.studies.compare import GateResult


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"
    BENCHMARK = "github-action-benchmark"


def compare(
    settings: CompareSettings,
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
    from tunerd import api

    result = api.compare(
        settings.base,
        settings.new,
        fail_above=settings.fail_above,
        measure=settings.measure,
        gpu_pct=settings.gpu_pct,
        cpu_pct=settings.cpu_pct,
        on_step=lambda what: print(what, file=sys.stderr),
    )
    code = exit_code_of(result, settings.cannot_tell)
    _show(result, Format.JSON if json else format, code)
    return int(code)


def exit_code_of(result: GateResult, cannot_tell: str) -> ExitCode:
    """Return what CI sees of a result."""
    from tunerd.vocabulary.verdict import Verdict

    unsure = ExitCode.CANNOT_TELL if cannot_tell == "fail" else ExitCode.BETTER
    return {
        Verdict.FASTER: ExitCode.BETTER,
        Verdict.SAME: ExitCode.BETTER,
        Verdict.SLOWER: ExitCode.REGRESSION,
        Verdict.CANNOT_TELL: unsure,
        None: ExitCode.NOT_COMPARABLE,
    }[result.verdict]


def _show(result: GateResult, format: Format, code: ExitCode) -> None:
    from tunerd.report import gate as forms

    if format is Format.JSON:
        print(json_module.dumps(forms.gate_json(result, int(code)), ensure_ascii=False))
    elif format is Format.BENCHMARK:
        print(json_module.dumps(forms.gate_benchmark(result), ensure_ascii=False, indent=2))
    elif format is Format.MARKDOWN:
        print(forms.gate_markdown(result), end="")
    elif format is Format.HTML:
        print(forms.gate_page(result), end="")
    else:
        from rich.console import Console

        Console(highlight=False).print(forms.gate_table(result))
