"""What a recipe will do, and how its runs ended: as text, as a table, and for json.dumps."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from tunerd.errors import ExitCode
from tunerd.report import terminal
from tunerd.report.view import Grid
from tunerd.studies.recipes import Command, PlannedRun, Recipe
from tunerd.system.text import UNKNOWN, printable, secs_text

if TYPE_CHECKING:
    from tunerd.studies.recipes.execute import Ended, Result

_HEADS = ("run", "ended", "default", "tuned", "gate", "folder")


def plan_json(recipe: Recipe, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return runs and their commands, which nothing was done for."""
    before = _command_text(recipe.preflight) if recipe.preflight else None
    return {"preflight": before, "runs": [_planned_json(run) for run in runs]}


def plan_text(recipe: Recipe, runs: Sequence[PlannedRun]) -> str:
    """Return the commands of runs as a shell takes them."""
    before = recipe.preflight
    lines = [f"# before the first run\n{_command_text(before)}"] if before else []
    for run in runs:
        lines.append(f"# {run.name}\n{_command_text(run.command)}")
        if run.gate is not None:
            lines.append(_command_text(run.gate.command))
    return printable("\n".join(lines))


def result_json(recipe: Recipe, result: Result) -> dict[str, Any]:
    """Return how each run ended, and its gate."""
    return {
        "recipe": str(recipe.path),
        "preflight_exit_code": result.preflight_code,
        "runs": [_ended_json(ended) for ended in result.runs],
        "exit_code": result.exit_code,
    }


def result_table(result: Result) -> RenderableType:
    """Return a row for each run, for rich to print."""
    rows = [
        (
            ended.run.name,
            "not begun" if ended.exit_code is None else _code_text(ended.exit_code),
            secs_text(ended.default_secs),
            secs_text(ended.tuned_secs),
            _gate_text(ended),
            str(ended.run.out),
        )
        for ended in result.runs
    ]
    return terminal.table(Grid(_HEADS, rows))


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


def _ended_json(ended: Ended) -> dict[str, Any]:
    return _planned_json(ended.run) | {
        "exit_code": ended.exit_code,
        "gate_exit_code": ended.gate_code,
        "gate_verdict": (ended.gate or {}).get("verdict"),
        "gate_headline": (ended.gate or {}).get("headline"),
        "is_base": ended.is_base,
        "verdict": (ended.outcome or {}).get("end_to_end", {}).get("verdict"),
        "default_secs": ended.default_secs,
        "tuned_secs": ended.tuned_secs,
    }


def _gate_text(ended: Ended) -> str:
    words = [str((ended.gate or {}).get("verdict", ""))]
    words += ["the base from now on"] if ended.is_base else []
    said = ", ".join(word for word in words if word)
    return said or (UNKNOWN if ended.gate_code is None else _code_text(ended.gate_code))


def _code_text(code: int) -> str:
    known = code in ExitCode.__members__.values()
    return f"{code} {ExitCode(code).name.lower().replace('_', ' ')}" if known else str(code)
