"""How far a run is, on stderr: a live display on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunerd.system import logs
from tunerd.system.text import TIMES, UNKNOWN, duration_text, one_line, percent_text, secs_text

log = logging.getLogger(__name__)

LINE_EVERY_SECS = 30.0
RATE_WINDOW_SECS = 60.0
SHOWN_TASKS = 10
SEARCHING = "tuning"  # the phase in which trials end
_OTHER_LINES = 6  # of a display, beside its tasks


@dataclass(frozen=True)
class TaskProgress:
    """One task so far. `share` is its part of the model's time, 0..1.

    best_secs: of all that was measured, the default included, which stays where nothing beats it.
    """

    name: str
    weight: int  # calls per inference
    default_secs: float | None
    best_secs: float | None
    trials: int
    share: float
    task_id: str = ""


@dataclass(frozen=True)
class ProgressState:
    """A run at one moment. `trials_done` counts every trial that ended, the failed ones too."""

    elapsed_secs: float
    budget_secs: float | None
    trials_done: int
    trials_failed: int
    trials_budget: int | None
    slices_busy: int
    slices: int
    tuners_busy: int
    tuners: int
    tasks: tuple[TaskProgress, ...]
    phase: str
    message: str
    search_began_secs: float = 0.0  # after the start; the budget counts from there

    @property
    def is_searching(self) -> bool:
        return self.phase == SEARCHING

    @property
    def budget_end_secs(self) -> float | None:
        """When the budget is spent, in seconds after the start."""
        return None if self.budget_secs is None else self.search_began_secs + self.budget_secs

    @property
    def model_secs(self) -> tuple[float, float] | None:
        """The sums of calls times default and best seconds; None until every task has both."""
        default = best = 0.0
        for task in self.tasks:
            if task.default_secs is None or task.best_secs is None:
                return None
            default += task.weight * task.default_secs
            best += task.weight * task.best_secs
        return (default, best) if self.tasks else None


class Pace:
    """Trials per second of the last minute, and what is left of the budgets at that rate.

    It begins with the first state of the search, which has the trials of earlier sessions in its
    count, and ends with the last one.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, int]] = deque()

    def add(self, state: ProgressState) -> None:
        if not state.is_searching:
            self._ended.clear()
            return
        self._ended.append((state.elapsed_secs, state.trials_done))
        while len(self._ended) > 2 and state.elapsed_secs - self._ended[1][0] >= RATE_WINDOW_SECS:
            self._ended.popleft()

    @classmethod
    def of(cls, state: ProgressState, trials_per_sec: float | None) -> Self:
        """Return the pace of a run of which one state and the rate are known."""
        pace = cls()
        if trials_per_sec:
            trials = round(trials_per_sec * RATE_WINDOW_SECS)
            pace._ended.append(
                (state.elapsed_secs - trials / trials_per_sec, state.trials_done - trials)
            )
        pace.add(state)
        return pace

    @property
    def trials_per_sec(self) -> float | None:
        if not self._ended:
            return None
        (first, before), (last, now) = self._ended[0], self._ended[-1]
        return (now - before) / (last - first) if last > first and now > before else None

    def left_secs(self, state: ProgressState, since_secs: float = 0.0) -> float | None:
        """Return the seconds until the first budget is used up, `since_secs` after `state`.

        None outside of the search: nothing says how long the rest takes.
        """
        if not state.is_searching:
            return None
        left = []
        if state.budget_end_secs is not None:
            left.append(state.budget_end_secs - state.elapsed_secs)
        rate = self.trials_per_sec
        if state.trials_budget is not None and rate:
            left.append((state.trials_budget - state.trials_done) / rate)
        return max(0.0, min(left) - since_secs) if left else None


class Progress(ABC):
    """Takes the state of a run as often as it changes. close() is idempotent."""

    def begin(self, message: str) -> None:  # noqa: B027 - most show nothing then
        """Show on a terminal what is done before there is a state; does nothing elsewhere."""

    @abstractmethod
    def update(self, state: ProgressState) -> None:
        """Take the newest state; cheap enough to call for every event."""

    @abstractmethod
    def warn(self, sentence: str) -> None:
        """Show a sentence that stays."""

    @abstractmethod
    def close(self) -> None:
        """Show the last state and give the terminal back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_progress(
    *,
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return the progress that fits: none when `quiet`, live on a terminal, lines elsewhere.

    Where stderr is to hold JSON, its lines are logged.
    """
    if logs.is_json():
        return LoggedProgress(clock)
    if quiet:
        return QuietProgress()
    console = console if console is not None else Console(stderr=True)
    return LiveProgress(console, clock) if console.is_terminal else LineProgress(console, clock)


class QuietProgress(Progress):
    """Shows nothing: for --quiet, and for --json where nobody watches."""

    def update(self, state: ProgressState) -> None:
        pass

    def warn(self, sentence: str) -> None:
        pass

    def close(self) -> None:
        pass


class _SpacedProgress(Progress):
    """One line every 30 seconds and one for each change of phase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pace = Pace()
        self._phase: str | None = None
        self._said_at = 0.0
        self._unsaid: ProgressState | None = None

    def update(self, state: ProgressState) -> None:
        self._pace.add(state)
        self._unsaid = state
        if state.phase != self._phase or self._clock() - self._said_at >= LINE_EVERY_SECS:
            self._say(state)

    def warn(self, sentence: str) -> None:
        self._put(one_line(sentence))

    def close(self) -> None:
        if self._unsaid is not None:
            self._say(self._unsaid)

    def _say(self, state: ProgressState) -> None:
        self._phase, self._said_at, self._unsaid = state.phase, self._clock(), None
        self._put(state_line(state, self._pace))

    @abstractmethod
    def _put(self, line: str) -> None: ...


class LineProgress(_SpacedProgress):
    """Lines on a console that nobody watches."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console

    def _put(self, line: str) -> None:
        self._console.out(f"tunerd: {line}", highlight=False)


class LoggedProgress(_SpacedProgress):
    """Lines in the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)

    def _put(self, line: str) -> None:
        log.info("%s", line)


def state_line(state: ProgressState, pace: Pace) -> str:
    """Return `state` as one line for a log."""
    parts = [f"{one_line(state.phase)} {duration_text(state.elapsed_secs)}"]
    of = f"/{state.trials_budget}" if state.trials_budget is not None else ""
    parts.append(f"{state.trials_done}{of} trials ({state.trials_failed} failed)")
    if pace.trials_per_sec:
        parts.append(f"{pace.trials_per_sec:.1f}/s")
    if state.is_searching:  # what works at other times is not counted
        parts.append(f"slices {state.slices_busy}/{state.slices} busy")
        parts.append(f"tuners {state.tuners_busy}/{state.tuners}")
    left = pace.left_secs(state)
    if left is not None:
        parts.append(f"{duration_text(left)} left")
    if state.model_secs:
        default, best = state.model_secs
        parts.append(f"kernels {secs_text(default)} -> {secs_text(best)}")
    if state.message:
        parts.append(one_line(state.message))
    return ", ".join(parts).replace("\N{NO-BREAK SPACE}", " ")


class LiveProgress(Progress):
    """A display that redraws itself, between states too: a long build leaves the clock running."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = Pace()
        self._state: ProgressState | None = None
        self._updated_at = 0.0
        self._started = False
        # What the run prints on stdout is its result and must not be moved to stderr.
        self._live = Live(
            get_renderable=self._display, console=console, redirect_stdout=False, transient=False
        )

    def begin(self, message: str) -> None:
        self.update(
            ProgressState(0.0, None, 0, 0, None, 0, 0, 0, 0, (), phase="starting", message=message)
        )

    def update(self, state: ProgressState) -> None:
        self._pace.add(state)
        self._state, self._updated_at = state, self._clock()
        if not self._started:
            self._started = True
            self._live.start()

    def warn(self, sentence: str) -> None:
        self._live.console.print(Text(one_line(sentence), style="yellow"))

    def close(self) -> None:
        if self._started:
            self._live.stop()

    def _display(self) -> Display:
        return Display(self._state, self._pace, self._clock() - self._updated_at)


@dataclass(frozen=True)
class Display:
    """What fits of a state into the console, for one refresh."""

    state: ProgressState | None
    pace: Pace
    since_secs: float = 0.0
    all_tasks: bool = False  # and all lines, for a console that scrolls

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state = self.state
        if state is None:
            return
        width, height = options.max_width, options.height or console.size.height
        if self.all_tasks:
            height = len(state.tasks) + _OTHER_LINES
        lines: list[Text | Padding | Table] = [self._phase_line(state)]
        if height >= 4 and state.is_searching:
            lines.append(self._bar(state, width))
        if height >= 3:
            lines.append(self._counts_line(state))
        room = height - len(lines) - 2  # the table's heading, and the line that the cursor is on
        if room >= 1 and width >= 30 and state.tasks:
            most = len(state.tasks) if self.all_tasks else SHOWN_TASKS
            lines.append(_task_table(state, min(room, most), width))
        yield Group(*lines)

    def _phase_line(self, state: ProgressState) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(one_line(state.phase), style="bold")
        line.append(f"  {duration_text(state.elapsed_secs + self.since_secs)}")
        left = self.pace.left_secs(state, self.since_secs)
        if left is not None:
            line.append(f", {duration_text(left)} left")
        if state.message:
            line.append(f"  {one_line(state.message)}", style="dim")
        return line

    def _bar(self, state: ProgressState, width: int) -> Padding:
        done = [0.0]
        if state.budget_end_secs:
            done.append((state.elapsed_secs + self.since_secs) / state.budget_end_secs)
        if state.trials_budget:
            done.append(state.trials_done / state.trials_budget)
        bounded = len(done) > 1
        bar = ProgressBar(
            total=1.0 if bounded else None,
            completed=min(1.0, max(done)),
            width=max(1, min(width, 60)),
            pulse=not bounded,
        )
        return Padding(bar, 0, expand=False)  # a bar on its own does not end its line

    def _counts_line(self, state: ProgressState) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        of = f" of {state.trials_budget}" if state.trials_budget is not None else ""
        line.append(f"{state.trials_done}{of} trials, ")
        line.append(f"{state.trials_failed} failed", style="red" if state.trials_failed else "")
        if self.pace.trials_per_sec:
            line.append(f", {self.pace.trials_per_sec:.1f}/s")
        if state.is_searching:
            line.append(f"  slices {state.slices_busy}/{state.slices} busy")
            line.append(f", tuners {state.tuners_busy}/{state.tuners}")
        if state.model_secs:
            default, best = state.model_secs
            line.append(f"  kernels {secs_text(default)} → {secs_text(best)}", style="green")
        return line


def _task_table(state: ProgressState, rows: int, width: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=False, header_style="dim", show_edge=False)
    table.add_column("task", no_wrap=True, overflow="ellipsis", max_width=max(8, width - 48))
    wide = width >= 64
    for heading in ("default", "best", "so far", *(("trials", "share") if wide else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    heaviest = sorted(state.tasks, key=lambda task: task.share, reverse=True)[:rows]
    for task in heaviest:
        gain = Text(UNKNOWN)
        if task.default_secs and task.best_secs:
            better = task.best_secs < task.default_secs
            gain = Text(f"{task.default_secs / task.best_secs:.2f}{TIMES}", style="green" * better)
        cells = [
            Text(one_line(task.name)),
            Text(secs_text(task.default_secs)),
            Text(secs_text(task.best_secs)),
            gain,
        ]
        if wide:
            cells += [Text(f"{task.trials:,}"), Text(percent_text(task.share))]
        table.add_row(*cells)
    return table
