"""`tunerd preflight`: is this machine quiet enough to measure on?"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import ExitCode
from tunerd.settings.studies import PreflightSettings

if TYPE_CHECKING:
    from tunerd.doctor.checks import Finding


def preflight(settings: PreflightSettings, json: AsJson = False, debug: Debug = False) -> int:
    """Say whether somebody uses this machine's GPUs or cores. Exit code: 0 quiet, 19 not quiet."""
    from tunerd.doctor.checks import Status
    from tunerd.doctor.preflight import Limits
    from tunerd.doctor.preflight import preflight as look
    from tunerd.vocabulary import to_json

    limits = Limits(
        settings.max_load,
        settings.max_mem_pct,
        settings.max_busy_pct,
        settings.mps == "external",
    )
    findings = look(
        limits, with_gpus=not settings.cpu_only, wait_secs=settings.wait_secs, tell=_tell
    )
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
