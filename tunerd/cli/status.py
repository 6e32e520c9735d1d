"""`tunerd status`: how a run is, from another terminal."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.options import AsJson
from tunerd.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from tunerd.telemetry.run_status import RunStatus

_REFRESH_SECS = 1.0
_SHOWN_FAILURES = 3  # beside a display that is refreshed


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False,
    json: AsJson = False,
) -> None:
    """Show how far a run is, while it is alive and afterwards; the run notices nothing.

    Says whether it is alive, has ended or was killed, what it has found so far, and what failed.
    """
    from tunerd.telemetry.run_status import status_of

    if json and watch:
        raise InputError("--json prints one document and --watch many; give one of the two")
    if json:
        print(json_module.dumps(_document(status_of(run)), ensure_ascii=False))
        return
    from tunerd.cli.consoles import stdout_console

    console = stdout_console()
    if watch:
        _watch(run, console)
    else:
        console.print(_page(status_of(run), whole=True))


def _watch(run: Path, console: Console) -> None:
    """Refresh until the run ends; Ctrl-C ends the watching, which is no error."""
    from tunerd.telemetry.run_status import status_of

    def states() -> Iterator[RunStatus]:
        while True:
            state = status_of(run)
            yield state
            if not state.life.may_change:
                return
            time.sleep(_REFRESH_SECS)

    try:
        if console.is_terminal:
            _refresh(states(), console)
        else:
            _print_lines(states(), console)
    except KeyboardInterrupt:
        pass


def _refresh(states: Iterator[RunStatus], console: Console) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        for state in states:
            live.update(_page(state, whole=False), refresh=True)


def _print_lines(states: Iterator[RunStatus], console: Console) -> None:
    """Print a line when the life or the phase changes, and now and then."""
    from tunerd.telemetry.progress import LINE_EVERY_SECS, Pace, state_line

    said_at, said = 0.0, ("", "")
    for state in states:
        progress = state.progress
        now = (str(state.life), progress.phase)
        if now != said or state.at - said_at >= LINE_EVERY_SECS:
            said_at, said = state.at, now
            line = state_line(progress, Pace.of(progress, state.trials_per_sec))
            console.out(f"{state.life}: {line}", highlight=False)


def _page(state: RunStatus, *, whole: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tunerd.report.disturbance_words import trials_sentence
    from tunerd.system.text import count_text
    from tunerd.telemetry.progress import Display, Pace

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


_COLOURS = {"alive": "green", "finished": "green", "failed": "red", "killed": "red"}


def _headline(state: RunStatus) -> Text:
    from rich.text import Text

    from tunerd.system.text import duration_text, one_line
    from tunerd.telemetry.run_status import Life

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
    from rich.text import Text

    from tunerd.system.text import one_line, secs_text

    end = outcome["end_to_end"]
    verdict = "wrong" if outcome["verification"]["verdict"] == "wrong" else end["verdict"]
    texts = [secs_text(end["base_secs"]), secs_text(end["new_secs"])]
    return Text(f"result  model {texts[0]} \N{RIGHTWARDS ARROW} {texts[1]}, {one_line(verdict)}")


def _failure_line(failure: Any) -> Text:
    from rich.text import Text

    from tunerd.system.text import one_line

    said = one_line(failure.message)
    last = said[-200:] if len(said) > 200 else said
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"trial {failure.trial_id}", style="red")
    line.append(f" of {one_line(failure.task)}: {failure.kind} in {failure.stage}: {last}")
    return line


def _document(state: RunStatus) -> dict[str, Any]:
    """Return what programs read: seconds and counts, null for what is not known."""
    from tunerd.telemetry.progress import Pace
    from tunerd.vocabulary import to_json

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
