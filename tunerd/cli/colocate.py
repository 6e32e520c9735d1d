"""`tunerd colocate`: models that share a device, by a plan."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tunerd.cli.consoles import stdout_console, steps_shown
from tunerd.cli.group import Command, Group
from tunerd.cli.options import AsJson, Debug

app = typer.Typer(
    help="Run several artifacts on one device by a plan: check it, or bench it under policies.",
    no_args_is_help=True,
    cls=Group,
)

PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan, a YAML file.", show_default=False)
]


class LoadOption(StrEnum):
    CLOSED = "closed"
    POISSON = "poisson"
    BURSTS = "bursts"
    TRACE = "trace"


@app.command(cls=Command)
def check(
    plan: PlanFile,
    to: Annotated[
        Path | None,
        typer.Option(help="Write the plan to this file, with each artifact's sha256 and proofs."),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Load every member of a plan, try it, and say who runs where."""
    from tunerd import api
    from tunerd.report.colocation import checked_json, checked_table

    with steps_shown(quiet=json) as show:
        proved, stats = api.colocate_check(plan, to=to, on_step=show)
    if json:
        print(json_module.dumps(checked_json(proved, stats)))
    else:
        stdout_console().print(checked_table(proved, stats))
    return 0


@app.command(cls=Command)
def bench(
    plan: PlanFile,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy: time, streams, space, ordered or regulated; repeatable. "
            "[default: the plan's]",
            show_default=False,
        ),
    ] = None,
    load: Annotated[
        LoadOption | None,
        typer.Option(help="How requests come. [default: the plan's]", show_default=False),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(help="How long, under each policy. [default: the plan's]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for the page, and for all samples.", show_default=False),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Send a plan's load to its members under each policy; show what each member got."""
    from tunerd import api
    from tunerd.report.colocation import REPORT, bench_json, bench_table

    with steps_shown(quiet=json) as show:
        found = api.colocate_bench(
            plan,
            policies=policy or (),
            load=load.value if load else None,
            duration_secs=_secs(duration),
            out=out,
            on_step=show,
        )
    if json:
        print(json_module.dumps(bench_json(found)))
        return 0
    console = stdout_console()
    console.print(bench_table(found))
    if out is not None:
        console.print(f"report    {out / REPORT}", soft_wrap=True)
    return 0


def _secs(text: str | None) -> float | None:
    from tunerd.settings.texts import parse_duration

    if text is None:
        return None
    try:
        secs = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--duration") from None
    if not 0 < secs <= 86400:
        raise typer.BadParameter(f"'{text}' is not within a day", param_hint="--duration")
    return secs
