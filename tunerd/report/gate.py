"""GateResult -> what people and CI read: a view, JSON, github-action-benchmark's.

A view is shown as a page, on a terminal or as Markdown.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from tunerd.report import html, svg, terminal
from tunerd.report.markdown_text import code, folded, grid, text
from tunerd.report.view import Cell, Grid, Items, Pairs, Section, Tone, View
from tunerd.stats.blocks import median_interval
from tunerd.studies.compare import GateResult, Judgement, TaskJudgement
from tunerd.system.text import one_line, secs_text
from tunerd.vocabulary import to_json, unit_name
from tunerd.vocabulary.outcome import Comparison
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
_TONES: dict[SpeedVerdict | None, Tone] = {
    Verdict.FASTER: "better",
    Verdict.SAME: "better",
    Verdict.SLOWER: "bad",
    Verdict.CANNOT_TELL: "neutral",
    None: "bad",
}
_WORDS = ("", "base", "new", "change", "interval", "verdict")  # what a terminal can show
_HEADINGS = (*_WORDS, "gain")
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


# --- a page ------------------------------------------------------------------------------------


def gate_page(result: GateResult) -> str:
    """Return the page of a gate, for a job's artifacts or a mail."""
    judged, tasks, notes = result.end_to_end, result.tasks, result.notes
    claim, _, grounds = headline(result).partition(": ")
    sides = Pairs([("BASE", str(result.base.source)), ("NEW", str(result.new.source))])
    sections = (
        Section("End to end", [_summary(judged), sides] if judged else [sides]),
        Section("Tasks", [_tasks(result)], f"{_tasks_text(result)}.") if tasks else None,
        Section("Notes", [Items(notes)]) if notes else None,
    )
    return html.page(
        View(
            claim.capitalize(),
            sections,
            tone=_TONES[result.verdict],
            grounds=grounds,
            name=place_text(result),
            facts=(_how(result),),
            title=f"{place_text(result)}: {headline(result)}",
        )
    )


# --- Markdown ----------------------------------------------------------------------------------


def gate_markdown(result: GateResult) -> str:
    """Return the result as GitHub's Markdown, for a comment or a job's summary."""
    lines = [
        f"### {text(headline(result))}",
        f"{text(place_text(result))}, {_how(result)}.",
        f"BASE {code(result.base.source)}, NEW {code(result.new.source)}",
    ]
    if result.end_to_end is not None:
        lines.append(grid(_summary(result.end_to_end).only(*_WORDS)))
    if result.tasks:
        lines.append(folded(_tasks_text(result), grid(_tasks(result).only(*_WORDS))))
    lines.append("\n".join(f"- {text(note)}" for note in result.notes))
    return "\n\n".join(filter(None, lines)) + "\n"


# --- a terminal --------------------------------------------------------------------------------


def gate_table(result: GateResult) -> Group:
    """Return the result for a terminal."""
    parts: list[Grid | str | None] = []
    if result.end_to_end is not None:
        parts.append(_summary(result.end_to_end).only(*_WORDS))
    if result.tasks:
        parts += [" ", _tasks_text(result), _tasks(result).only(*_WORDS)]
    parts += [f"note: {note}" for note in result.notes]
    return Group(
        Text(f"{one_line(place_text(result))}, {_how(result)}", style="bold"),
        terminal.shown(parts),
        Text(one_line(headline(result)), style=f"bold {_VERDICTS[result.verdict][1]}"),
    )


# --- rows --------------------------------------------------------------------------------------


def _summary(judged: Judgement) -> Grid:
    views = judged.views if len(judged.views) > 1 else ()
    changes = [(view.name, view.change) for view in views]
    if judged.control is not None:
        changes.append(("default schedules", judged.control))
    scale = _scale([judged.change, *(change for _, change in changes)])
    rows = [_row("end to end", judged, verdict_text(judged.verdict), scale)]
    for name, change in changes:
        texts = (f"{change.value - 1:+.1%}", _interval(change), "")
        rows.append((name, "", "", *texts, _gain(change, Verdict.CANNOT_TELL, scale)))
    return _grid(rows)


def _tasks(result: GateResult) -> Grid:
    tasks = result.tasks[:MAX_TASKS]
    scale = _scale([task.judgement.change for task in tasks])
    return _grid([_task_row(task, scale) for task in tasks])


def _grid(rows: list[tuple[str | Cell, ...]]) -> Grid:
    return Grid(_HEADINGS, rows, _NUMBERS, class_="ranked", styles={"gain": "mark"})


def _task_row(task: TaskJudgement, scale: tuple[float, float]) -> tuple[str | Cell, ...]:
    verdict = verdict_text(task.judgement.verdict) + (", same kernel" if task.same_kernel else "")
    calls = f" x{task.weight}" if task.weight > 1 else ""
    name, *cells = _row(one_line(task.name) + calls, task.judgement, verdict, scale)
    return (Cell(str(name), is_code=True), *cells)


def _row(
    name: str, judged: Judgement, verdict: str, scale: tuple[float, float]
) -> tuple[str | Cell, ...]:
    times = (secs_text(judged.base_secs), secs_text(judged.new_secs))
    change, mark = judged.change, _gain(judged.change, judged.verdict, scale)
    return (name, *times, f"{change.value - 1:+.1%}", _interval(change), verdict, mark)


def _gain(change: Interval, verdict: SpeedVerdict, scale: tuple[float, float]) -> Cell:
    """Return a change as the gain that a page draws: to the right is faster."""
    gain = Comparison(verdict, 0.0, 0.0, 1 / change.value, 1 / change.high, 1 / change.low)
    return Cell(drawn=svg.ratio_mark(gain, scale=scale))


def _scale(changes: list[Interval]) -> tuple[float, float]:
    return svg.ratio_scale([1 / end for change in changes for end in (change.low, change.high)])


def _tasks_text(result: GateResult) -> str:
    shown = min(MAX_TASKS, len(result.tasks))
    some = f"{shown} of {len(result.tasks)} tasks" if shown < len(result.tasks) else "Tasks"
    return f"{some}, most time lost first; they explain and decide nothing"


def _change(change: Interval) -> str:
    return f"{change.value - 1:+.1%} ({_interval(change)})"


def _interval(change: Interval) -> str:
    return f"{change.low - 1:+.1%} to {change.high - 1:+.1%}"
