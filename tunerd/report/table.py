"""What a run is going to do and how it ended, on the terminal; the end as a JSON document, too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.report import terminal
from tunerd.report.figures import (
    TaskShare,
    by_share,
    median_of,
    outcome_headline,
    rivals,
    weighted_secs,
)
from tunerd.report.library_text import library_bars, library_times
from tunerd.report.run_sections import latency_bars
from tunerd.report.task_section import task_grid
from tunerd.report.view import Cell, Grid
from tunerd.system.text import (
    UNKNOWN,
    count_text,
    duration_text,
    one_line,
    percent_text,
    secs_text,
)
from tunerd.vocabulary import finite, to_json
from tunerd.vocabulary.outcome import Outcome, TaskOutcome

SHOWN_TASKS = 20
PLANNED_TASKS = 15
_NAMED = 4  # tasks, where a line has a reason that several have
_TASK_HEADS = ("Task", "Share of time", "Calls", "Default", "Best", "Ratio", "Trials")
_STYLES = {"better": "bold green", "neutral": "bold", "bad": "bold red"}


# --- the end -----------------------------------------------------------------------------------


def outcome_table(outcome: Outcome, *, share: str = "") -> RenderableType:
    """Return the verdict, before and after, and the heaviest tasks, for rich to print.

    share: as `outcome_headline` takes it.
    """
    verdict = outcome_headline(outcome, share=share)
    shares = by_share(outcome.tasks)
    lines: list[RenderableType] = [
        Text(f"{verdict.claim} {verdict.grounds}", style=_STYLES[verdict.tone]),
        *([Text(verdict.small, style="dim")] if verdict.small else []),
        *_latencies(outcome),
        *(Text(one_line(remark), style="dim") for remark in outcome.remarks),
    ]
    if shares:
        lines += [Text(""), _task_table(outcome.tasks)]
    rest = shares[SHOWN_TASKS:]
    if rest:
        left = sum(s.share or 0.0 for s in rest)
        lines.append(Text(f"and {len(rest)} more, {percent_text(left)} of the time", style="dim"))
    lines += _reasons(shares[:SHOWN_TASKS])
    lines.append(_totals_line(outcome))
    lines += [Text(bar.text) for bar in library_bars(outcome.tasks)]
    return Group(*lines)


def _latencies(outcome: Outcome) -> list[RenderableType]:
    """Return the median and its 95% interval of each way to run the model."""
    bars = latency_bars(outcome.latencies)
    if bars is None:
        return []
    rows = [(bar.name, bar.value, bar.small) for bar in bars.bars]
    heads = ("The whole model", "Median", "95% interval")
    return [Text(""), terminal.table(Grid(heads, rows, range(1, 3)))]


def _task_table(tasks: Sequence[TaskOutcome]) -> RenderableType:
    grid = task_grid(tasks)
    shown = dataclasses.replace(grid, rows=grid.rows[:SHOWN_TASKS])
    return terminal.table(shown.only(*_TASK_HEADS), gap=1, least_width=8)


def _reasons(shares: tuple[TaskShare, ...]) -> list[Text]:
    """Return a line per reason for which tasks stay at their default, with the heaviest names."""
    names: dict[str, list[str]] = {}
    for task in (entry.task for entry in shares if not entry.task.is_tuned):
        names.setdefault(one_line(task.note) or "no reason given", []).append(one_line(task.name))
    return [
        Text(f"at the default, {reason}: {_first(of)}", style="dim") for reason, of in names.items()
    ]


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _totals_line(outcome: Outcome) -> Text:
    tuned = sum(t.is_tuned for t in outcome.tasks)
    trials, failed = sum(t.trials for t in outcome.tasks), sum(t.failed for t in outcome.tasks)
    default, best = weighted_secs(outcome.tasks)
    line = (
        f"{tuned} of {len(outcome.tasks)} tasks use a tuned schedule; {trials:,} trials, "
        f"{failed:,} failed"
    )
    if taken := sum(t.taken is not None for t in outcome.tasks):
        line += f"; {count_text(taken, 'task')} from the store"
    if default is not None and best is not None:
        line += f"; kernels {secs_text(default)} with the defaults, {secs_text(best)} as shipped"
    return Text(line)


# --- the plan ----------------------------------------------------------------------------------


def plan_table(plan: Mapping[str, Any]) -> RenderableType:
    """Return what `preparation.describe` says a run would do, for rich to print."""
    tasks = plan["tasks"]
    heaviest = sorted(tasks, key=lambda t: t["weight"] * t["flops"], reverse=True)
    shown, rest = heaviest[:PLANNED_TASKS], heaviest[PLANNED_TASKS:]
    facts = [(Cell(name, style="dim"), fact) for name, fact in _plan_facts(plan)]
    lines: list[RenderableType] = [
        Text(one_line(plan["model"]["name"]), style="bold"),
        terminal.table(Grid(("", ""), facts)),
        "",
        terminal.table(_slices(plan["slices"])),
        "",
        terminal.table(_planned_tasks(shown), gap=1, least_width=8),
    ]
    if rest:
        calls = sum(t["weight"] for t in rest)
        left = f"and {count_text(len(rest), 'lighter task')}, {count_text(calls, 'call')}"
        lines.append(Text(left, style="dim"))
    lines.append(Text(_limits_sentence(plan)))
    return Group(*lines)


def _plan_facts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    target = dict(json.loads(plan["target"]))
    kind = target.pop("kind")
    options = ", ".join(f"{name} {_plain(value)}" for name, value in target.items())
    model, tuners = plan["model"], plan["tuners"]
    nodes = {w["node_id"] for w in (*tuners, *plan["slices"])} - {None}
    return [
        ("inputs", "; ".join(_tensor(spec) for spec in model["inputs"])),
        ("outputs", "; ".join(_tensor(spec) for spec in model["outputs"])),
        *(("note", note) for note in model["notes"]),
        ("folder", plan["out"]),
        ("share", f"{plan['share_pct']}% of {plan['device']}"),
        *(
            [("tenants", f"{count_text(plan['tenants'], 'model')} in a launch")]
            if plan["tenants"]
            else []
        ),
        ("target", f"{kind}: {options}"),
        *(("slices", bound) for bound in plan["bound"]),
        ("tuners", _tuners(tuners)),
        *([("nodes", f"{len(nodes)} of a Ray cluster")] if nodes else []),
        *(("warm start", earlier["sentence"]) for earlier in plan["warm_start"]),
    ]


def _slices(slices: Sequence[Mapping[str, Any]]) -> Grid:
    rows = []
    for each in slices:
        environment = "\n".join(f"{k}={one_line(v)}" for k, v in each["environment"].items())
        where = each["gpu_uuid"] or _cores(each["cores"]) or each["kind"]
        rows.append(
            (each["slice_id"], where, Cell(environment or "nothing added", is_message=True))
        )
    return Grid(("slice", "runs on", "environment of its runner"), rows)


def _planned_tasks(tasks: Sequence[Mapping[str, Any]]) -> Grid:
    rows = []
    for task in tasks:
        flops, calls = task["flops"], task["weight"]
        mflop = [f"{n * flops / 1e6:,.1f}" if flops else UNKNOWN for n in (1, calls)]
        rows.append((task["name"], f"{calls:,}", *mflop))
    return Grid(("task", "calls", "MFLOP a call", "MFLOP in all"), rows, range(1, 4))


def _limits_sentence(plan: Mapping[str, Any]) -> str:
    trials, budget = plan["trials"], plan["budget_secs"]
    limits = [count_text(trials, "trial")] if trials is not None else []
    limits += [f"{duration_text(budget)} of search"] if budget is not None else []
    until = " or ".join(limits) or "little more can be gained"
    estimate = plan["estimate_secs"]
    takes = "the time is not limited" if estimate is None else f"about {duration_text(estimate)}"
    return f"{count_text(len(plan['tasks']), 'task')}, tuned until {until}; {takes}"


def _tensor(spec: Mapping[str, Any]) -> str:
    return f"{spec['name']} {spec['dtype']}[{','.join(map(str, spec['shape']))}]"


def _tuners(tuners: Sequence[Mapping[str, Any]]) -> str:
    if any(t["cores"] for t in tuners):
        return "; ".join(f"{t['tuner_id']} on {_cores(t['cores'])}" for t in tuners)
    cpus = sum(t["cpus"] for t in tuners)
    return f"{count_text(len(tuners), 'process', 'processes')} on {count_text(cpus, 'CPU')}"


def _cores(cores: Sequence[int]) -> str:
    return f"{'core' if len(cores) == 1 else 'cores'} {','.join(map(str, cores))}" if cores else ""


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- the document ------------------------------------------------------------------------------


def outcome_json(outcome: Outcome, *, share: str = "") -> dict[str, Any]:
    """Return `outcome` for json.dumps, with the figures that the page shows beside the raw values.

    Numbers that are infinite or NaN become None: JSON has no word for them.
    """
    verdict = outcome_headline(outcome, share=share)
    default, best = weighted_secs(outcome.tasks)
    shares = {s.task.task_id: s.share for s in by_share(outcome.tasks)}
    document: dict[str, Any] = to_json(outcome)
    for task, described in zip(outcome.tasks, document["tasks"], strict=True):
        described |= {
            "is_tuned": task.is_tuned,
            "from_store": task.taken is not None,
            "share_of_time": shares[task.task_id],
            "libraries_secs": {name: time.secs for name, time in library_times(task).items()},
            "libraries_searched": [
                n for n, time in library_times(task).items() if time.is_searched
            ],
        }
    for latency, described in zip(outcome.latencies, document["latencies"], strict=True):
        seen = median_of(latency)
        described |= {
            "median_secs": seen.value if seen else None,
            "median_low_secs": seen.low if seen else None,
            "median_high_secs": seen.high if seen else None,
        }
    document |= {
        "verdict": outcome.end_to_end.verdict,
        "ratio": outcome.end_to_end.ratio,
        "headline": verdict.text,
        "rivals": [{"name": rival.name} | to_json(rival.compared) for rival in rivals(outcome)],
        "hit_rate": outcome.hit_rate,
        "tasks_tuned": sum(t.is_tuned for t in outcome.tasks),
        "tasks_from_store": sum(t.taken is not None for t in outcome.tasks),
        "trials": sum(t.trials for t in outcome.tasks),
        "trials_failed": sum(t.failed for t in outcome.tasks),
        "kernels_default_secs": default,
        "kernels_best_secs": best,
        "libraries": [to_json(bar) for bar in library_bars(outcome.tasks)],
    }
    found: dict[str, Any] = finite(document)
    return found
