"""Progress goes to stderr: a display where somebody watches, a line now and then elsewhere."""

# ruff: noqa: RUF001  the multiplication sign is what people read

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from tunerd.telemetry.progress import (
    LineProgress,
    LiveProgress,
    Pace,
    ProgressState,
    QuietProgress,
    TaskProgress,
    open_progress,
)


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tasks(count: int) -> tuple[TaskProgress, ...]:
    return tuple(
        TaskProgress(f"conv2d_{i}", 2, 400e-6, 100e-6 * (1 + i % 5), 12 + i, (i + 1) / 1000)
        for i in range(count)
    )


STATE = ProgressState(
    elapsed_secs=60.0,
    budget_secs=600.0,
    trials_done=312,
    trials_failed=4,
    trials_budget=None,
    slices_busy=2,
    slices=2,
    tuners_busy=3,
    tuners=4,
    tasks=tasks(14),
    phase="tuning",
    message="",
)


def at(secs: float, **changes: object) -> ProgressState:
    return dataclasses.replace(STATE, elapsed_secs=secs, **changes)  # type: ignore[arg-type]


def watched(width: int = 100, height: int = 30) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height)


def unwatched() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")


def shown(state: ProgressState, width: int = 100, height: int = 30) -> list[str]:
    """The lines that a terminal of this size shows for `state`, without colours."""
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height
    )
    progress = LiveProgress(console, Clock())
    progress._pace.add(at(0.0, trials_done=0))
    progress._pace.add(state)
    progress._state, progress._updated_at = state, 100.0
    console.print(progress._display())
    return output(console).splitlines()


# --- which one ---------------------------------------------------------------------------------


def test_a_terminal_gets_the_display_a_log_gets_lines_and_quiet_gets_none() -> None:
    assert isinstance(open_progress(console=watched()), LiveProgress)
    assert isinstance(open_progress(console=unwatched()), LineProgress)
    assert isinstance(open_progress(console=watched(), quiet=True), QuietProgress)


def test_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress() as progress:
        progress.update(STATE)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "312 trials (4 failed)" in captured.err


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress(quiet=True) as progress:
        progress.update(STATE)
    assert capsys.readouterr() == ("", "")


# --- lines -------------------------------------------------------------------------------------


def test_a_log_gets_one_line_every_thirty_seconds() -> None:
    console, clock = unwatched(), Clock()
    with LineProgress(console, clock) as progress:
        for second in range(95):
            clock.now = 100.0 + second
            progress.update(at(float(second), trials_done=second))
    lines = output(console).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "tunerd: tuning 0 s",
        "tunerd: tuning 30 s",
        "tunerd: tuning 1 min",
        "tunerd: tuning 1 min 30 s",
        "tunerd: tuning 1 min 34 s",
    ]


def test_a_change_of_phase_is_a_line_at_once() -> None:
    console = unwatched()
    with LineProgress(console, Clock()) as progress:
        progress.update(at(1.0, phase="import"))
        progress.update(at(2.0, phase="import"))
        progress.update(at(3.0, phase="tuning"))
    assert len(output(console).splitlines()) == 2


def test_the_last_state_is_said_once() -> None:
    console = unwatched()
    progress = LineProgress(console, Clock())
    progress.update(at(1.0))
    progress.update(at(2.0, trials_done=999))
    progress.close()
    progress.close()
    lines = output(console).splitlines()
    assert len(lines) == 2
    assert "999 trials" in lines[-1]


def test_a_line_tells_what_a_person_asks_for() -> None:
    console = unwatched()
    clock = Clock()
    with LineProgress(console, clock) as progress:
        progress.update(at(0.0, trials_done=0))
        clock.now += 60
        progress.update(at(60.0, message="the slice mps-0-1 starts again"))
    assert output(console).splitlines()[1] == (
        "tunerd: tuning 1 min, 312 trials (4 failed), 5.2/s, slices 2/2 busy, tuners 3/4, "
        "9 min left, kernels 11.2 ms -> 8.00 ms, the slice mps-0-1 starts again"
    )


def test_a_line_stays_one_line_whatever_a_message_holds() -> None:
    console = unwatched()
    with LineProgress(console, Clock()) as progress:
        progress.update(at(1.0, message="[red]two\nlines\x1b[2J"))
    (line,) = output(console).splitlines()
    assert "[red]two lines" in line
    assert "\x1b" not in line


def test_a_warning_is_a_line_of_its_own_at_once() -> None:
    console = unwatched()
    with LineProgress(console, Clock()) as progress:
        progress.warn("GPU-1: 1 process of others: [red]\x1b[2J")
        progress.update(STATE)
    warning, _ = output(console).splitlines()
    assert warning.startswith("tunerd: GPU-1: 1 process of others: [red]")
    assert "\x1b" not in warning


def test_a_warning_stays_above_the_display() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    with LiveProgress(console, Clock()) as progress:
        progress.update(STATE)
        progress.warn("GPU-1 is quiet again")
    assert output(console).count("GPU-1 is quiet again") == 1


# --- the display -------------------------------------------------------------------------------


def test_the_display_shows_the_ten_heaviest_tasks() -> None:
    lines = shown(STATE)
    assert [line.split()[0] for line in lines[-10:]] == [f"conv2d_{i}" for i in range(13, 3, -1)]
    assert "400 µs" in lines[-1]
    assert "500 µs" in lines[-1]
    assert "0.80×" in lines[-1]


def test_the_display_shows_phase_counts_and_time_left() -> None:
    text = "\n".join(shown(STATE))
    assert "tuning  1 min, 9 min left" in text
    assert "\n312 trials, 4 failed, 5.2/s  slices 2/2 busy, tuners 3/4" in text
    assert "kernels 11.2 ms → 8.00 ms" in text


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5, 8, 50])
@pytest.mark.parametrize("width", [1, 2, 7, 29, 40, 63, 200])
def test_the_display_fits_into_any_terminal(width: int, height: int) -> None:
    lines = shown(dataclasses.replace(STATE, message="a message " * 20), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 3), (80, 24)])
def test_the_live_display_starts_and_stops_in_any_terminal(width: int, height: int) -> None:
    console = watched(width, height)
    with LiveProgress(console, Clock()) as progress:
        progress.update(at(0.0))
        progress.update(at(1.0, tasks=(), slices=0, slices_busy=0, budget_secs=None))
    assert output(console)
    progress.close()


def test_a_display_without_any_state_shows_nothing() -> None:
    console = watched()
    with LiveProgress(console, Clock()):
        pass
    assert output(console) == ""


def test_the_clock_runs_on_between_two_states() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    with LiveProgress(console, clock) as progress:
        progress.update(STATE)
        clock.now += 30
    assert "tuning  1 min 30 s, 8 min 30 s left" in output(console)


def test_unknown_numbers_are_dashes() -> None:
    unknown = TaskProgress("conv", 1, None, None, 0, 1.0)
    lines = shown(dataclasses.replace(STATE, tasks=(unknown,), budget_secs=None))
    assert lines[-1].split() == ["conv", "–", "–", "–", "0", "100.0%"]
    assert "left" not in lines[0]


@pytest.mark.parametrize("phase", ["starting", "finishing"])
def test_outside_of_the_search_there_is_no_bar_no_rate_and_no_time_left(phase: str) -> None:
    state = dataclasses.replace(STATE, phase=phase, trials_budget=312, message="building them")
    lines = shown(state)
    assert lines[0] == f"{phase}  1 min  building them"
    assert lines[1] == "312 of 312 trials, 4 failed  kernels 11.2 ms → 8.00 ms"


def test_a_line_after_the_search_says_what_goes_on_and_nothing_of_a_pace() -> None:
    console = unwatched()
    with LineProgress(console, Clock()) as progress:
        progress.update(at(0.0, trials_done=0))
        progress.update(at(60.0, trials_budget=312))
        progress.update(at(61.0, trials_budget=312, phase="finishing", message="building them"))
    last = output(console).splitlines()[-1]
    assert last == (
        "tunerd: finishing 1 min 01 s, 312/312 trials (4 failed), kernels 11.2 ms -> 8.00 ms, "
        "building them"
    )


# --- pace --------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_last_minute() -> None:
    pace = Pace()
    for second in range(0, 601, 10):
        done = second if second <= 300 else 300 + 5 * (second - 300)
        pace.add(at(float(second), trials_done=done))
    assert pace.trials_per_sec == pytest.approx(5.0)


def test_the_rate_of_a_resumed_run_leaves_out_what_was_done_before() -> None:
    pace = Pace()
    pace.add(at(0.0, trials_done=1000))
    pace.add(at(10.0, trials_done=1020))
    assert pace.trials_per_sec == 2.0


def test_trials_that_a_session_takes_over_as_it_starts_are_no_pace() -> None:
    pace = Pace()
    pace.add(at(0.1, trials_done=0, phase="starting"))
    state = at(3.4, trials_done=112, trials_budget=400, budget_secs=None)
    pace.add(state)
    assert (pace.trials_per_sec, pace.left_secs(state)) == (None, None)
    later = dataclasses.replace(state, elapsed_secs=13.4, trials_done=132)
    pace.add(later)
    assert (pace.trials_per_sec, pace.left_secs(later)) == (2.0, 134.0)


def test_a_search_that_finds_nothing_to_do_has_no_rate() -> None:
    console = unwatched()
    with LineProgress(console, Clock()) as progress:
        progress.update(at(0.1, trials_done=0, phase="starting"))
        progress.update(at(3.4, trials_done=400, trials_budget=400))
        progress.update(at(3.9, trials_done=400, trials_budget=400))
    assert "/s" not in output(console)


def test_time_left_is_that_of_the_first_budget_to_end() -> None:
    pace = Pace()
    pace.add(at(0.0, trials_done=0))
    state = at(100.0, trials_done=200, trials_budget=400)
    pace.add(state)
    assert pace.left_secs(state) == 100.0
    assert pace.left_secs(dataclasses.replace(state, budget_secs=110.0)) == 10.0
    assert pace.left_secs(state, since_secs=500.0) == 0.0


def test_a_budget_counts_from_the_beginning_of_the_search() -> None:
    state = at(40.0, budget_secs=30.0, search_began_secs=15.0)
    assert Pace().left_secs(state) == 5.0
    assert Pace().left_secs(dataclasses.replace(state, search_began_secs=40.0)) == 30.0
