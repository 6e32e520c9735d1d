"""`tunerd doctor`: what this machine can do, and how to get what is missing."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunerd.cli.options import AsJson
from tunerd.errors import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from tunerd.doctor.checks import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "-": "dim", "fail": "red"}


def doctor(json: AsJson = False) -> int:
    """Check this machine: cores, packages, compiler, Ray, and GPUs with a real slice."""
    from tunerd.doctor.checks import Status, check
    from tunerd.vocabulary import to_json

    findings = check()
    failed = [finding for finding in findings if finding.status is Status.FAIL]
    proved = any(f.name.startswith("slice of") and f.status is Status.OK for f in findings)
    cpu = all(finding.gpu_only for finding in failed)
    verdict = {"cpu_tuning": cpu, "gpu_tuning": proved and not failed}
    if json:
        print(json_module.dumps(verdict | {"findings": to_json(findings)}, indent=2))
    else:
        from rich.console import Console

        console = Console()
        console.print(findings_table(findings))
        console.print(
            f"Tuning for CPUs: {_word(verdict['cpu_tuning'])}."
            f" Tuning for GPUs: {_word(verdict['gpu_tuning'])}."
        )
    return int(ExitCode.HOST_NOT_CAPABLE) if failed else 0


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return what was found, and what to do about it, for rich to print."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "found", box=None, pad_edge=False)
    for finding in findings:
        found = Text(finding.fact)
        if finding.fix:
            found.append(f"\n-> {finding.fix}", style="italic")
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(status, Text(finding.name), found)
    return table


def _word(possible: bool) -> str:
    return "ready" if possible else "not possible here"
