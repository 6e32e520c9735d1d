"""`tunerd colocate`: models that share a device: the plan of a mix, a check, a bench."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tunerd.cli.consoles import stdout_console, steps_shown
from tunerd.cli.group import MARKUP, Command, Group
from tunerd.cli.options import AsJson, Debug


class _Colocate(Group):
    """Takes `tunerd colocate mix.yaml` for `tunerd colocate plan mix.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and Path(args[0]).suffix in (".yaml", ".yml"):
            args = ["plan", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    help="Run several models on one device: plan who gets what, check a plan, or bench it.\n\n"
    "Policies: time, streams, space, ordered, regulated, space-time.",
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    cls=_Colocate,
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
def plan(
    mix: Annotated[
        Path, typer.Argument(metavar="MIX", help="A mix, a YAML file.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder: the plan, and all that was measured. [default: mixes/NAME]",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Explain the plan by what was measured before; measure nothing."
        ),
    ] = False,
    no_proof: Annotated[
        bool, typer.Option("--no-proof", help="Do not run the plan with the mix's rates.")
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Say which share of a device each model of a mix gets, and prove it.

    The mix names models with their rates and objectives. What is not known yet is tuned and
    measured, each model at the shares that may be chosen and beside the others. The answer is a
    plan for `check`, `bench` and the engine, or that one after another is best, or that they do not
    fit, and why. The same command in the same folder goes on where it stopped.

    Exit code 0: it fits. 1: it does not. 2: not enough was measured. 3: a promise was not kept when
    the plan was run.
    """
    from tunerd import api
    from tunerd.errors import ExitCode
    from tunerd.report.mix import mix_json, mix_table

    with steps_shown(quiet=json) as show:
        found = api.colocate_plan(
            mix, out=out, dry_run=dry_run, prove_it=not no_proof, on_step=show
        )
    if json:
        print(json_module.dumps(mix_json(found)))
    else:
        console = stdout_console()
        console.print(mix_table(found, is_dry=dry_run))
        if not dry_run:
            console.print(f"report    {found.report}", soft_wrap=True)
    if found.answer.said == "unknown":
        return ExitCode.CANNOT_TELL
    if not found.answer.is_fit:
        return ExitCode.NO_GAIN
    return ExitCode.REGRESSION if found.proof and not found.proof.is_kept else ExitCode.BETTER


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
            help="A policy: time, streams, space, ordered, regulated or space-time; repeatable. "
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
