"""The runs of a recipe, one after the other, each in a process of its own.

A process per run, so that native code that crashes in one takes no other with it, and memory goes
back. A process is handed its settings as JSON on its standard input, calls the function that the
command of that name is, and is on a leash: its standard input ends with this process, however that
ends, and then it ends, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import IO, Any

from tunerd.errors import ExitCode, FolderError, TunerdError
from tunerd.records import Store
from tunerd.settings import TuneSettings
from tunerd.studies.recipes.recipe import Command, Gate, PlannedRun, Recipe
from tunerd.studies.sizes import runs_of
from tunerd.system import spawn
from tunerd.system.text import reason_of

# Of the command line, which is above this module: what calls a command with settings.
PROGRAM = (sys.executable, "-P", "-m", "tunerd.cli.child")
_ENDED_WELL = (ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL)  # there is an artifact


@dataclass(frozen=True)
class Ended:
    """How one run of a recipe ended. None: it was not reached."""

    run: PlannedRun
    exit_code: int | None = None
    gate_code: int | None = None
    gate: dict[str, Any] | None = None  # what `tunerd compare --json` printed
    is_base: bool = False  # the base is a link, and leads to this run now
    outcome: dict[str, Any] | None = None  # as the run's store keeps it

    @property
    def worst(self) -> int:
        return max(self.exit_code or 0, self.gate_code or 0)

    @property
    def has_failed(self) -> bool:
        """No artifact, a regression, or no comparison; not: no gain, and cannot tell."""
        return self.worst not in _ENDED_WELL

    @property
    def default_secs(self) -> float | None:
        """The median of the model with default schedules, None where it was not measured."""
        return self._median_secs("default")

    @property
    def tuned_secs(self) -> float | None:
        """The median of the tuned model, None where it was not measured."""
        return self._median_secs("tuned")

    def _median_secs(self, name: str) -> float | None:
        samples = {x["name"]: x["run_secs"] for x in (self.outcome or {}).get("latencies", ())}
        return median(samples[name]) if samples.get(name) else None


@dataclass(frozen=True)
class Result:
    """How a recipe ended."""

    preflight_code: int | None  # None: nothing was looked at before
    runs: tuple[Ended, ...]
    is_interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """The worst of all, which is the largest."""
        codes = [self.preflight_code or 0, *(run.worst for run in self.runs)]
        return max(*codes, int(ExitCode.INTERRUPTED) if self.is_interrupted else 0)


def carry_out(
    recipe: Recipe,
    runs: Sequence[PlannedRun],
    *,
    fail_fast: bool = False,
    say: Callable[[str], None] = lambda line: None,
    stdout: IO[Any] | int | None = None,
    program: Sequence[str] = PROGRAM,
) -> Result:
    """Make `runs`, and go on after one that fails unless `fail_fast`.

    Ctrl-C and SIGTERM are passed on to the run under way, which ends in order; no other is begun.
    What the commands print goes to `stdout`, to this process's own if not given.
    """
    with _Children(program, stdout) as children:
        preflight_code = None
        if recipe.preflight is not None:
            say("looking at the machine")
            preflight_code = children.run(recipe.preflight)
            if preflight_code:
                return Result(preflight_code, tuple(map(Ended, runs)), children.is_stopped)
        ended: list[Ended] = []
        for number, run in enumerate(runs, 1):
            if children.is_stopped or (fail_fast and any(e.has_failed for e in ended)):
                ended.append(Ended(run))
                continue
            say(f"{number} of {len(runs)}: {run.name} in {run.out}")
            one = _carry_out_one(run, children)
            if one.gate is not None:
                error = one.gate.get("error", {}).get("message")
                say(f"{run.name}, gate: {error or one.gate.get('headline')}")
            ended.append(one)
    return Result(preflight_code, tuple(ended), children.is_stopped)


def _carry_out_one(run: PlannedRun, children: _Children) -> Ended:
    before, _ = _outcome(run)
    code = children.run(run.command)
    if code == ExitCode.INTERRUPTED:
        children.is_stopped = True
    if code not in _ENDED_WELL:
        return Ended(run, code)
    saved_at, outcome = _outcome(run)
    if saved_at == before:  # Python itself ends with 1, where tunerd has not even begun
        return Ended(run, ExitCode.BUG)
    gate = run.gate
    if gate is None or children.is_stopped:
        return Ended(run, code, outcome=outcome)
    if gate.base_follows and not os.path.lexists(gate.base):
        _point(gate, run)
        return Ended(run, code, is_base=True, outcome=outcome)
    gate_code, said = children.ask(gate.command)
    is_better = said is not None and said.get("verdict") == "better"
    if gate.base_follows and is_better:
        _point(gate, run)
    return Ended(run, code, gate_code, said, gate.base_follows and is_better, outcome)


def _outcome(run: PlannedRun) -> tuple[float | None, dict[str, Any] | None]:
    """Return the last outcome that a run has kept, and when; of several sizes that of the last."""
    settings = run.command.settings
    folders = [run.out]
    if isinstance(settings, TuneSettings) and settings.sizes:
        folders = [each.settings.out for each in runs_of(settings)]
    try:
        with Store.read(folders[-1]) as store:
            return store.outcome_saved_at(), store.outcome()
    except TunerdError:  # there is no run yet, or its own exit code says what is to be said
        return None, None


def _point(gate: Gate, run: PlannedRun) -> None:
    """Make the base a link to a run, at once and never half."""
    base = gate.base
    if base.exists() and not base.is_symlink():
        raise FolderError(
            f"{base} is no link, and base-follows would replace it; name a link, or leave "
            "base-follows out"
        )
    beside = base.with_name(f".{base.name}.new")
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        beside.symlink_to(os.path.relpath(run.out.resolve(), base.parent.resolve()))
        beside.replace(base)
    except OSError as error:
        raise FolderError(f"{base} cannot be made a link: {reason_of(error)}") from error


class _Children:
    """Runs `tunerd` commands one at a time, and passes signals on to the one that runs."""

    def __init__(self, program: Sequence[str], stdout: IO[Any] | int | None) -> None:
        self.is_stopped = False
        self._program = program
        self._stdout = stdout
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Children:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.is_stopped = True
        child = self._child
        if child is not None and child.returncode is None:
            child.send_signal(number)

    def run(self, command: Command) -> int:
        """Run a command and return its exit code; 128 and the number after a signal."""
        if self._stdout is None:
            sys.stdout.flush()
        code, _ = self._run(command, self._stdout, as_json=False)
        return code

    def ask(self, command: Command) -> tuple[int, dict[str, Any] | None]:
        """Run a command for its document; return its exit code, and the document if it has one."""
        code, printed = self._run(command, subprocess.PIPE, as_json=True)
        try:
            said = json.loads(printed)
        except ValueError:  # it was killed
            return code, None
        return code, said if isinstance(said, dict) else None

    def _run(
        self, command: Command, stdout: IO[Any] | int | None, *, as_json: bool
    ) -> tuple[int, bytes]:
        request = {"command": command.name, "settings": dict(command.said), "json": as_json}
        leash, held = os.pipe()  # no other process has `held`
        with os.fdopen(held, "wb", buffering=0) as wire:
            with os.fdopen(leash, "rb") as stdin:
                # Out of the terminal's group: it would get Ctrl-C twice, from there and from here.
                self._child = subprocess.Popen(
                    self._program,
                    env=spawn.environment(),
                    stdin=stdin,
                    stdout=stdout,
                    process_group=0,
                )
            if self.is_stopped:  # the signal came while the process was being made
                self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(BrokenPipeError):  # its exit code says what became of it
                wire.write(json.dumps(request).encode() + b"\n")
            printed, _ = self._child.communicate()
        code = self._child.returncode
        self._child = None
        return (code if code >= 0 else 128 - code), printed or b""
