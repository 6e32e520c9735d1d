"""`tunerd colocate`: models that share devices: the plan of a mix, a check, a bench, placement."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.consoles import stdout_console, steps_shown
from tunerd.cli.group import MARKUP, Command, Group
from tunerd.cli.options import AsJson, Debug, hidden_password

if TYPE_CHECKING:
    from tunerd.system.store_address import StoreAddress


class _Colocate(Group):
    """Takes `tunerd colocate mix.yaml` for `tunerd colocate plan mix.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and Path(args[0]).suffix in (".yaml", ".yml"):
            args = ["plan", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    help="Run several models on one device: plan who gets what, check a plan, or bench it. "
    "Or place models and tuning runs on several devices.\n\n"
    "`tunerd colocate MIX.yaml` is short for `tunerd colocate plan MIX.yaml`.\n\n"
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


class PlacementOption(StrEnum):
    EXCLUSIVE = "exclusive"
    ROUND_ROBIN = "round-robin"
    LEAST_UTILISED = "least-utilised"
    MOST_FREE_MEMORY = "most-free-memory"
    ESTIMATED = "estimated"


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
    store: Annotated[
        str | None,
        typer.Option(
            help="A team's store, as of `tunerd tune`: points that others measured are taken, and "
            "new ones go there. [default: the mix's]",
            envvar="TUNERD_STORE",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Say which share of a device each model of a mix gets, and prove it.

    The mix names models with their rates and objectives. What is not known yet is tuned and
    measured, each model at the shares that may be chosen and beside the others. The answer is a
    plan for `check`, `bench` and the engine, or that one after another is best, or that they do not
    fit, and why. The same command in the same folder goes on where it stopped.

    Exit code 0: it fits. 1: it does not. 2: not enough was measured, as in a first dry run. 3: a
    promise was not kept when the plan was run.
    """
    from tunerd import api
    from tunerd.errors import ExitCode
    from tunerd.report.mix import mix_json, mix_table

    with steps_shown(quiet=json) as show:
        found = api.colocate_plan(
            mix,
            out=out,
            dry_run=dry_run,
            prove_it=not no_proof,
            store=_address(store),
            on_step=show,
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


@app.command(cls=Command)
def place(
    jobs: Annotated[
        Path,
        typer.Argument(metavar="JOBS", help="A file of jobs, in YAML.", show_default=False),
    ],
    policy: Annotated[
        PlacementOption, typer.Option(help="Which of the devices that can take a job it gets.")
    ] = PlacementOption.ESTIMATED,
    address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a Ray cluster, or auto: its nodes' devices are used. "
            "[default: this machine's]",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            help="After a placement, in which a shared device gets no further job. "
            "[default: the file's]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder: each job's logs, and what became of it. [default: placements/NAME]",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say where each job would start; start none.")
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Start models and tuning runs on the GPUs of a machine or a Ray cluster, where they fit best.

    A job gets a device that has its memory free, which the policy chooses. Who runs out of memory
    is tried again beside fewer others, and alone in the end. Instances of MIG are devices, and are
    never changed. The same command in the same folder goes on with what has not ended well.

    Exit code 0: all ended well. 1: some failed.
    """
    from tunerd import api
    from tunerd.errors import ExitCode
    from tunerd.report import placed as shown

    grace_secs = _secs(grace, "--grace")
    if dry_run:
        foreseen = api.foresee_place(
            jobs, policy=policy.value, address=address, grace_secs=grace_secs
        )
        if json:
            print(json_module.dumps(shown.foreseen_json(foreseen)))
        else:
            stdout_console().print(shown.foreseen_table(foreseen))
        return ExitCode.BETTER if foreseen.is_fit else ExitCode.NO_GAIN
    with steps_shown(quiet=json) as show:
        found = api.colocate_place(
            jobs,
            policy=policy.value,
            address=address,
            grace_secs=grace_secs,
            out=out,
            on_step=show,
        )
    if json:
        print(json_module.dumps(shown.placed_json(found)))
    else:
        stdout_console().print(shown.placed_table(found))
    return ExitCode.NO_GAIN if found.failed else ExitCode.BETTER


@app.command(cls=Command)
def regulate(
    plan: PlanFile,
    to: Annotated[
        Path | None,
        typer.Option(
            help="The plan that is found. [default: PLAN with .regulated.yaml]", show_default=False
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="How long all of it may take, the proof too.")
    ] = "60s",
    probe: Annotated[str, typer.Option(help="How long each regulation is measured.")] = "500ms",
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Find where models stop for others, and which parts of them do not run at once.

    All members are kept busy under one regulation after another, by coordinate descent: more work
    in the same time is better, as long as no member's p99 is over its slo_ms, or clearly over what
    one after another gives it. At the end what was found is measured in turns with one after
    another and with streams, and the best of them is the policy of the plan that is written. The
    same command goes on with what was measured before.

    Exit code 0: a regulation is best. 1: it does not pay.
    """
    from tunerd import api
    from tunerd.errors import ExitCode
    from tunerd.report.regulation import regulated_json, regulated_table

    path = to if to is not None else plan.with_suffix(".regulated.yaml")
    with steps_shown(quiet=json) as show:
        found = api.colocate_regulate(
            plan,
            to=path,
            budget_secs=_secs(budget, "--budget") or 0.0,
            probe_secs=_secs(probe, "--probe") or 0.0,
            on_step=show,
        )
    if json:
        print(json_module.dumps(regulated_json(found)))
    else:
        console = stdout_console()
        console.print(regulated_table(found))
        console.print(f"plan      {path}", soft_wrap=True)
    return ExitCode.BETTER if found.pays else ExitCode.NO_GAIN


def _address(store: str | None) -> StoreAddress | None:
    from tunerd.errors import InputError
    from tunerd.system.store_address import StoreAddress

    if store is None:
        return None
    password = hidden_password()
    try:
        return StoreAddress.parse(store, password)
    except ValueError as error:
        raise InputError(f"--store cannot be used: {error}") from None


def _secs(text: str | None, flag: str = "--duration") -> float | None:
    from tunerd.settings.texts import parse_duration

    if text is None:
        return None
    try:
        secs = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None
    if not 0 <= secs <= 86400 or (secs == 0 and flag != "--grace"):
        raise typer.BadParameter(f"'{text}' is not within a day", param_hint=flag)
    return secs
