"""`tunerd run`: the runs that a recipe asks for."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tunerd.studies.recipes import Command, PlannedRun, Recipe
    from tunerd.studies.recipes.execute import Ended, Result


def run(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe, a YAML file.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only the run or entry of this name. Repeatable.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Say this of every run. Repeatable."),
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="End with the first run that fails.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipes, and do nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and their commands, and do nothing.")
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Make the runs of RECIPE in order, each in its own folder; the same command goes on.

    The exit code is the worst of the runs and their gates: the largest.
    """
    from tunerd.studies.recipes import json_schema, read_recipe

    if schema:
        print(json_module.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0
    if recipe is None:
        raise InputError("a recipe is missing; give a YAML file, for example recipes/cpu.yaml")
    read = read_recipe(recipe, set_ or ())
    runs = read.only(only) if only else read.runs
    if dry_run:
        _print_plan(read, runs, json)
        return 0
    from tunerd.studies.recipes.execute import carry_out

    impossible = _impossible(runs) if read.preflight is not None else {}
    if len(impossible) == len(runs):  # each says so itself, and none needs a quiet machine
        read = replace(read, preflight=None)
    else:
        for name, why in impossible.items():
            _say(f"{name} is impossible here: {why}")
    result = carry_out(
        read, runs, fail_fast=fail_fast, say=_say, stdout=sys.stderr if json else None
    )
    if json:
        print(json_module.dumps(_document(read, result), ensure_ascii=False))
    else:
        _print_summary(result)
    return result.exit_code


def _impossible(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """Return by name why this machine cannot make a run, as far as its kind of slice tells."""
    from tunerd.cluster.job import cluster_address
    from tunerd.settings import TuneSettings
    from tunerd.slices import member

    asked = {run.name: run.command.settings for run in runs}
    here = {
        name: each.slice_kind
        for name, each in asked.items()
        if isinstance(each, TuneSettings) and cluster_address(each.address) is None
    }
    usable = {kind: member(kind).usability() for kind in set(here.values())}
    return {name: usable[kind].why for name, kind in here.items() if not usable[kind].ok}


def _say(line: str) -> None:
    from tunerd.system.text import one_line

    print(f"tunerd run: {one_line(line)}", file=sys.stderr, flush=True)


def _command_text(command: Command) -> str:
    return shlex.join(["tunerd", *command.argv])


def _planned_json(run: PlannedRun) -> dict[str, Any]:
    gate = run.gate
    return {
        "name": run.name,
        "entry": run.entry or None,
        "out": str(run.out),
        "command": _command_text(run.command),
        "gate": None
        if gate is None
        else {
            "base": str(gate.base),
            "base_follows": gate.base_follows,
            "command": _command_text(gate.command),
        },
    }


def _print_plan(recipe: Recipe, runs: Sequence[PlannedRun], as_json: bool) -> None:
    before = _command_text(recipe.preflight) if recipe.preflight else None
    if as_json:
        document = {"preflight": before, "runs": [_planned_json(run) for run in runs]}
        print(json_module.dumps(document, ensure_ascii=False))
        return
    from tunerd.system.text import printable

    lines = [f"# before the first run\n{before}"] if before else []
    for run in runs:
        lines.append(f"# {run.name}\n{_command_text(run.command)}")
        if run.gate is not None:
            lines.append(_command_text(run.gate.command))
    print(printable("\n".join(lines)))


def _document(recipe: Recipe, result: Result) -> dict[str, Any]:
    return {
        "recipe": str(recipe.path),
        "preflight_exit_code": result.preflight_code,
        "runs": [_ended_json(ended) for ended in result.runs],
        "exit_code": result.exit_code,
    }


def _ended_json(ended: Ended) -> dict[str, Any]:
    default, tuned = _medians(ended)
    return _planned_json(ended.run) | {
        "exit_code": ended.exit_code,
        "gate_exit_code": ended.gate_code,
        "gate_verdict": (ended.gate or {}).get("verdict"),
        "gate_headline": (ended.gate or {}).get("headline"),
        "is_base": ended.is_base,
        "verdict": (ended.outcome or {}).get("end_to_end", {}).get("verdict"),
        "default_secs": default,
        "tuned_secs": tuned,
    }


def _medians(ended: Ended) -> tuple[float | None, float | None]:
    from statistics import median

    samples = {x["name"]: x["run_secs"] for x in (ended.outcome or {}).get("latencies", ())}
    default, tuned = (samples.get(name) for name in ("default", "tuned"))
    return (median(default) if default else None, median(tuned) if tuned else None)


def _print_summary(result: Result) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if result.preflight_code:
        console.print("The machine is not quiet, and no run was begun.")
        return
    console.print("")
    console.print(_summary(result))


def _gate_words(ended: Ended) -> str:
    words = [str((ended.gate or {}).get("verdict", ""))]
    words += ["the base from now on"] if ended.is_base else []
    return ", ".join(word for word in words if word)


def _summary(result: Result) -> Table:
    from rich.table import Table
    from rich.text import Text

    from tunerd.errors import ExitCode
    from tunerd.system.text import UNKNOWN, secs_text

    def word(code: int | None) -> str:
        if code is None:
            return UNKNOWN
        known = code in ExitCode.__members__.values()
        return f"{code} {ExitCode(code).name.lower().replace('_', ' ')}" if known else str(code)

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for heading in ("ended", "default", "tuned", "gate"):
        table.add_column(heading)
    table.add_column("folder", overflow="fold")
    for ended in result.runs:
        default, tuned = _medians(ended)
        table.add_row(
            Text(ended.run.name),
            Text(word(ended.exit_code) if ended.exit_code is not None else "not begun"),
            Text(secs_text(default)),
            Text(secs_text(tuned)),
            Text(_gate_words(ended) or word(ended.gate_code)),
            Text(str(ended.run.out)),
        )
    return table
