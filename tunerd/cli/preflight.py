"""`tunerd preflight`: is this machine quiet enough to measure on?"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import ExitCode, InputError

if TYPE_CHECKING:
    from tunerd.doctor.checks import Finding


class PreflightMps(StrEnum):
    NONE = "none"
    EXTERNAL = "external"


def preflight(
    max_load: Annotated[
        float, typer.Option(min=0, help="Load average of the last minute, per core.")
    ] = 0.5,
    max_mem_pct: Annotated[
        float, typer.Option(min=0, max=100, help="GPU memory in use, in percent.")
    ] = 2.0,
    max_busy_pct: Annotated[
        float, typer.Option(min=0, max=100, help="GPU utilisation, in percent.")
    ] = 5.0,
    mps: Annotated[
        PreflightMps, typer.Option(help="An MPS daemon of somebody is to be used: external.")
    ] = PreflightMps.NONE,
    cpu_only: Annotated[
        bool, typer.Option("--cpu-only", help="Look at the cores alone, not at GPUs.")
    ] = False,
    wait: Annotated[
        str | None, typer.Option(help="Look again until it is quiet, for so long: 90s, 10m.")
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Say whether somebody uses this machine's GPUs or cores. Exit code: 0 quiet, 19 not quiet."""
    from tunerd.doctor.checks import Status
    from tunerd.doctor.preflight import Limits
    from tunerd.doctor.preflight import preflight as look
    from tunerd.vocabulary import to_json

    wait_secs = wait_secs_of({"wait": wait})
    limits = Limits(max_load, max_mem_pct, max_busy_pct, mps is PreflightMps.EXTERNAL)
    findings = look(limits, with_gpus=not cpu_only, wait_secs=wait_secs, tell=_tell)
    is_quiet = not any(finding.status is Status.FAIL for finding in findings)
    code = 0 if is_quiet else int(ExitCode.NOT_QUIET)
    if json:
        document = {"quiet": is_quiet, "findings": to_json(findings), "exit_code": code}
        print(json_module.dumps(document))
        return code
    from rich.console import Console

    from tunerd.cli.doctor import findings_table

    console = Console()
    console.print(findings_table(findings))
    console.print("This machine is quiet." if is_quiet else "This machine is not quiet.")
    return code


def _tell(busy: Sequence[Finding], left_secs: float) -> None:
    from tunerd.system.text import duration_text, one_line

    why = "; ".join(f"{finding.name}: {finding.fact}" for finding in busy)
    line = f"waiting for quiet, {duration_text(left_secs)} at most: {one_line(why)}"
    print(f"tunerd preflight: {line}", file=sys.stderr, flush=True)


def wait_secs_of(given: Mapping[str, Any]) -> float:
    """Return the seconds that parsed flags, by the names of `preflight`'s parameters, wait for."""
    from tunerd.settings import parse_duration

    try:
        return parse_duration(given["wait"] or "0s")
    except ValueError as error:
        raise InputError(f"--wait: {error}") from None
