"""GateResult -> what people and CI read: a table, Markdown, JSON, github-action-benchmark's."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from tunerd.report import terminal
from tunerd.report.markdown_text import code, folded, grid, text
from tunerd.report.view import Cell, Grid
from tunerd.stats.blocks import median_interval
from tunerd.studies.compare import GateResult, Judgement, TaskJudgement
from tunerd.system.text import one_line, secs_text
from tunerd.vocabulary import to_json, unit_name
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

MAX_TASKS = 10  # shown to people; JSON has all
# What a gate calls NEW, and its colour. None: the sides are not comparable.
_VERDICTS: dict[SpeedVerdict | None, tuple[str, str]] = {
    Verdict.FASTER: ("better", "green"),
    Verdict.SAME: ("same", "green"),
    Verdict.SLOWER: ("worse", "red"),
    Verdict.CANNOT_TELL: ("cannot tell", "yellow"),
    None: ("not comparable", "red"),
}
_HEADINGS = ("", "base", "new", "change", "interval", "")
_NUMBERS = range(1, 5)


def headline(result: GateResult) -> str:
    """Return one line: the verdict and what it means."""
    allowed = f"{100 * result.fail_above:.3g}%"
    judged = result.end_to_end
    meanings: dict[SpeedVerdict | None, str] = {
        Verdict.FASTER: "NEW is faster than BASE",
        Verdict.SAME: f"NEW is not slower than BASE by more than {allowed}",
        Verdict.SLOWER: f"NEW is slower than BASE by more than {allowed}",
        Verdict.CANNOT_TELL: judged.why if judged else "",
        None: "; ".join(result.differences),
    }
    return f"{verdict_text(result.verdict)}: {meanings[result.verdict]}"


def verdict_text(verdict: SpeedVerdict | None) -> str:
    """Return what a gate calls NEW: better, same or worse, or that it cannot say."""
    return _VERDICTS[verdict][0]


def place_text(result: GateResult) -> str:
    """Return the model and where its times were taken."""
    side, rounds = result.new, result.measured
    if rounds is not None:
        counts, device, pct = str(rounds.proof.sm_count), rounds.proof.device, rounds.pct
    elif side.place is not None:
        counts, device = " or ".join(map(str, side.place.sm_counts)), side.place.device
        pct = side.pcts[0]
    else:
        return side.model_name
    unit = unit_name(side.target_kind, 1 if counts == "1" else None)
    return f"{side.model_name} at {pct}% of {device or 'a device'} ({counts} {unit})"


def _how(result: GateResult) -> str:
    if result.measured is not None:
        return f"both measured now, in turns, in {len(result.measured.run_secs)} processes"
    return "by the samples that the runs stored"


# --- JSON --------------------------------------------------------------------------------------


def gate_json(result: GateResult, exit_code: int) -> dict[str, Any]:
    """Return the whole result as what json.dumps takes, the samples measured now included."""
    value: dict[str, Any] = to_json(result)
    value["verdict"] = verdict_text(result.verdict)
    value["end_to_end"] = _judgement_json(result.end_to_end) if result.end_to_end else None
    value["tasks"] = [
        to_json(t) | {"judgement": _judgement_json(t.judgement), "added_secs": t.added_secs}
        for t in result.tasks
    ]
    return value | {"headline": headline(result), "exit_code": exit_code}


def _judgement_json(judged: Judgement) -> dict[str, Any]:
    views = [{"name": view.name, "change": _ratio_json(view.change)} for view in judged.views]
    value: dict[str, Any] = to_json(judged)
    return value | {
        "verdict": verdict_text(judged.verdict),
        "change": _ratio_json(judged.change),
        "views": views,
        "control": _ratio_json(judged.control) if judged.control else None,
    }


def _ratio_json(change: Interval) -> dict[str, float]:
    return {"ratio": change.value, "low": change.low, "high": change.high}


def gate_benchmark(result: GateResult) -> list[dict[str, Any]]:
    """Return NEW's latency as `customSmallerIsBetter` of github-action-benchmark reads it.

    One entry and no tasks: that action alerts on any entry that moved, and of many some always do.
    """
    if result.measured is not None:
        run_secs = [s for _, new_secs in result.measured.run_secs for s in new_secs]
    else:
        run_secs = list(result.new.timing.run_secs) if result.new.timing else []
    if not run_secs:
        return []
    middle = median_interval(run_secs)
    extra = [headline(result), f"base {result.base.source}", f"new {result.new.source}"]
    if result.end_to_end is not None:
        extra.insert(1, f"change {_change(result.end_to_end.change)}")
    return [
        {
            "name": one_line(place_text(result)),
            "unit": "ms",
            "value": 1e3 * sorted(run_secs)[len(run_secs) // 2],
            "range": f"± {1e3 * (middle.high - middle.low) / 2:.3g}",
            "extra": "\n".join(one_line(line) for line in extra),
        }
    ]


# --- Markdown ----------------------------------------------------------------------------------


def gate_markdown(result: GateResult) -> str:
    """Return the result as GitHub's Markdown, for a comment or a job's summary."""
    lines = [
        f"### {text(headline(result))}",
        f"{text(place_text(result))}, {_how(result)}.",
        f"BASE {code(result.base.source)}, NEW {code(result.new.source)}",
    ]
    if result.end_to_end is not None:
        lines.append(grid(_summary(result.end_to_end)))
    if result.tasks:
        lines.append(folded(_tasks_text(result), grid(_tasks(result))))
    lines.append("\n".join(f"- {text(note)}" for note in result.notes))
    return "\n\n".join(filter(None, lines)) + "\n"


# --- a terminal --------------------------------------------------------------------------------


def gate_table(result: GateResult) -> Group:
    """Return the result for a terminal."""
    parts: list[Grid | str | None] = []
    if result.end_to_end is not None:
        parts.append(_summary(result.end_to_end))
    if result.tasks:
        parts += [" ", _tasks_text(result), _tasks(result)]
    parts += [f"note: {note}" for note in result.notes]
    return Group(
        Text(f"{one_line(place_text(result))}, {_how(result)}", style="bold"),
        terminal.shown(parts),
        Text(one_line(headline(result)), style=f"bold {_VERDICTS[result.verdict][1]}"),
    )


# --- rows --------------------------------------------------------------------------------------


def _summary(judged: Judgement) -> Grid:
    rows = [_row("end to end", judged, verdict_text(judged.verdict))]
    if len(judged.views) > 1:
        rows += [
            (view.name, "", "", f"{view.change.value - 1:+.1%}", _interval(view.change), "")
            for view in judged.views
        ]
    if judged.control is not None:
        change = judged.control
        control = ("default schedules", "", "", f"{change.value - 1:+.1%}")
        rows.append((*control, _interval(change), ""))
    return Grid(_HEADINGS, rows, _NUMBERS)


def _tasks(result: GateResult) -> Grid:
    return Grid(_HEADINGS, list(map(_task_row, result.tasks[:MAX_TASKS])), _NUMBERS)


def _task_row(task: TaskJudgement) -> tuple[str | Cell, ...]:
    verdict = verdict_text(task.judgement.verdict) + (", same kernel" if task.same_kernel else "")
    calls = f" x{task.weight}" if task.weight > 1 else ""
    name, *cells = _row(one_line(task.name) + calls, task.judgement, verdict)
    return (Cell(name, is_code=True), *cells)


def _row(name: str, judged: Judgement, verdict: str) -> tuple[str, ...]:
    times = (secs_text(judged.base_secs), secs_text(judged.new_secs))
    change = judged.change
    return (name, *times, f"{change.value - 1:+.1%}", _interval(change), verdict)


def _tasks_text(result: GateResult) -> str:
    shown = min(MAX_TASKS, len(result.tasks))
    some = f"{shown} of {len(result.tasks)} tasks" if shown < len(result.tasks) else "Tasks"
    return f"{some}, most time lost first; they explain and decide nothing"


def _change(change: Interval) -> str:
    return f"{change.value - 1:+.1%} ({_interval(change)})"


def _interval(change: Interval) -> str:
    return f"{change.low - 1:+.1%} to {change.high - 1:+.1%}"
