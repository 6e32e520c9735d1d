"""`tunerd run`: the runs that a recipe asks for."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import InputError

if TYPE_CHECKING:
    from tunerd.studies.recipes.execute import Result


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
    from tunerd.report import recipe_result as forms

    if dry_run:
        if json:
            print(_document(forms.plan_json(read, runs)))
        else:
            print(forms.plan_text(read, runs))
        return 0
    from tunerd.studies.recipes.execute import carry_out
    from tunerd.studies.recipes.possible import impossible_runs

    impossible = impossible_runs(runs) if read.preflight is not None else {}
    if len(impossible) == len(runs):  # each says so itself, and none needs a quiet machine
        read = replace(read, preflight=None)
    else:
        for name, why in impossible.items():
            _say(f"{name} is impossible here: {why}")
    result = carry_out(
        read, runs, fail_fast=fail_fast, say=_say, stdout=sys.stderr if json else None
    )
    if json:
        print(_document(forms.result_json(read, result)))
    else:
        _print_result(result)
    return result.exit_code


def _document(value: dict[str, Any]) -> str:
    return json_module.dumps(value, ensure_ascii=False)


def _print_result(result: Result) -> None:
    from rich.console import Console

    from tunerd.report.recipe_result import result_table

    console = Console(highlight=False)
    if result.preflight_code:
        console.print("The machine is not quiet, and no run was begun.")
        return
    console.print("")
    console.print(result_table(result))


def _say(line: str) -> None:
    from tunerd.system.text import one_line

    print(f"tunerd run: {one_line(line)}", file=sys.stderr, flush=True)
