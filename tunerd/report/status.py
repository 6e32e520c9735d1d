"""How a run is: for a terminal, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.report.disturbance_text import trials_sentence
from tunerd.system.text import count_text, duration_text, one_line, secs_text
from tunerd.telemetry.progress import Display, Pace
from tunerd.telemetry.run_status import Life, RunStatus
from tunerd.vocabulary import to_json

_SHOWN_FAILURES = 3  # beside a display that is refreshed
_COLOURS = {"alive": "green", "finished": "green", "failed": "red", "killed": "red"}


def status_page(state: RunStatus, *, whole: bool) -> RenderableType:
    """Return a run for a console that scrolls, or, not `whole`, for one that is refreshed."""
    progress = state.progress
    parts: list[RenderableType] = [_headline(state)]
    if state.tally is not None:
        parts.append(Display(progress, Pace.of(progress, state.trials_per_sec), all_tasks=whole))
        if state.waiting and state.life.may_change:
            parts.append(Text(f"{count_text(state.waiting, 'trial')} waiting or running"))
        if sentence := trials_sentence(state.tally.disturbed):
            parts.append(Text(sentence, style="yellow"))
    if state.outcome is not None:
        parts.append(_outcome_line(state.outcome))
    shown = state.tally.failures if state.tally else ()
    parts += [_failure_line(f) for f in (shown if whole else shown[:_SHOWN_FAILURES])]
    return Group(*parts)


def _headline(state: RunStatus) -> Text:
    line = Text()
    line.append(one_line(str(state.folder)), style="bold")
    line.append(f"  {state.life}", style=_COLOURS.get(state.life, "yellow"))
    told = state.told
    ago = f"{duration_text(max(0.0, state.at - told.at))} ago" if told else ""
    match state.life:
        case Life.ALIVE | Life.STARTING:
            line.append(f", pid {state.pid}")
        case Life.KILLED if told:
            line.append(
                f": pid {told.pid} is gone and said nothing of an end, heard of last {ago}; the "
                "same command goes on"
            )
        case Life.ELSEWHERE if told:
            line.append(
                f": pid {told.pid} on {one_line(told.place.hostname)}, which cannot be seen from "
                f"here, heard of last {ago}"
            )
        case Life.STOPPED | Life.FAILED | Life.FINISHED if told:
            line.append(f" {ago}")
            if message := one_line(told.end_message).removeprefix(f"{state.life} "):
                line.append(f": {message}")
    return line


def _outcome_line(outcome: Any) -> Text:
    end = outcome["end_to_end"]
    verdict = "wrong" if outcome["verification"]["verdict"] == "wrong" else end["verdict"]
    verdict += " than the default schedules" if verdict in ("faster", "slower") else ""
    texts = [secs_text(end["base_secs"]), secs_text(end["new_secs"])]
    return Text(f"result  model {texts[0]} \N{RIGHTWARDS ARROW} {texts[1]}, {one_line(verdict)}")


def _failure_line(failure: Any) -> Text:
    said = one_line(failure.message)
    last = said[-200:] if len(said) > 200 else said
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"trial {failure.trial_id}", style="red")
    line.append(f" of {one_line(failure.task)}: {failure.kind} in {failure.stage}: {last}")
    return line


def status_json(state: RunStatus) -> dict[str, Any]:
    """Return how a run is for json.dumps: seconds and counts, null for what is not known."""
    progress, tally = state.progress, state.tally
    default_secs, best_secs = progress.model_secs or (None, None)
    end = state.outcome["end_to_end"] if state.outcome else None
    return {
        "run": str(state.folder),
        "life": str(state.life),
        "pid": state.pid,
        "sessions": tally.session if tally else 0,
        "phase": progress.phase,
        "message": progress.message,
        "end_message": state.told.end_message if state.told else "",
        "elapsed_secs": state.elapsed_secs,
        "budget_secs": progress.budget_secs,
        "left_secs": Pace.of(progress, state.trials_per_sec).left_secs(progress)
        if state.life.may_change
        else None,
        "trials": {
            "done": progress.trials_done,
            "failed": progress.trials_failed,
            "waiting": state.waiting,
            "disturbed": tally.disturbed.trials if tally else 0,
            "budget": progress.trials_budget,
            "per_sec": state.trials_per_sec,
        },
        "slices": {"busy": progress.slices_busy, "of": progress.slices},
        "tuners": {"busy": progress.tuners_busy, "of": progress.tuners},
        "cap_proofs": tally.proofs if tally else 0,
        "kernels": {"default_secs": default_secs, "best_secs": best_secs},
        "model": None
        if end is None
        else {
            "default_secs": end["base_secs"],
            "tuned_secs": end["new_secs"],
            "verdict": end["verdict"],
        },
        "tasks": to_json(state.tasks),
        "failures": to_json(tally.failures) if tally else [],
    }
