"""A recipe to the runs that it asks for, each as the command line that makes it."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd.errors import InputError
from tunerd.studies.recipes.document import Items, Place, Scalar, Value, read_file
from tunerd.studies.recipes.keys import BASE_FOLLOWS, NAME, Command, Commands, Key, did_you_mean
from tunerd.studies.recipes.merge import Entry, Section, read_entries, read_overrides, read_top

MAX_RUNS = 1000
MODEL, OUT = "model", "out"  # the keys that name a run, and where it goes
DEFAULT_OUT = f"runs/{NAME}"
_NAMING = (MODEL, "batch")
# How the command line begins, which knows no places.
_BEGINNING = re.compile(r"(Invalid value for '[^']*': )?(Value error, )?(--[a-z-]+: )?")


@dataclass(frozen=True)
class Gate:
    """What a run is compared with, and the command line of it, less the program's name."""

    base: Path
    base_follows: bool
    argv: tuple[str, ...]


@dataclass(frozen=True)
class PlannedRun:
    name: str
    entry: str  # its name under `runs`; "" where the recipe has no `runs`
    out: Path
    argv: tuple[str, ...]  # a command line, less the program's name
    gate: Gate | None


@dataclass(frozen=True)
class Recipe:
    path: Path
    preflight: tuple[str, ...] | None  # a command line; None: nothing is looked at before
    runs: tuple[PlannedRun, ...]

    def only(self, names: Sequence[str]) -> tuple[PlannedRun, ...]:
        """Return the runs of these names or of these entries, in the recipe's order."""
        known = {name for run in self.runs for name in (run.name, run.entry) if name}
        for name in names:
            if name not in known:
                raise InputError(
                    f"--only {name}: {self.path} has no such run; {did_you_mean(name, known)}"
                )
        return tuple(run for run in self.runs if {run.name, run.entry} & set(names))


def read_recipe(path: Path, commands: Commands, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and plan its runs; no other file is looked at, and nothing is done.

    `overrides` are `KEY=VALUE`, said of every run after all that the recipe says; of a gate or of
    the check before the runs they are `gate.KEY=VALUE` and `preflight.KEY=VALUE`.
    """
    return plan_recipe(read_file(path), path, commands, overrides)


def plan_recipe(
    root: Value, path: Path, commands: Commands, overrides: Sequence[str] = ()
) -> Recipe:
    """Plan the runs of a recipe that has been read; `root` may be a part of a file."""
    top = read_top(root, commands)
    changes = read_overrides(overrides, commands)
    runs: list[PlannedRun] = []
    for entry in read_entries(root, commands):
        said = top.then(entry.sayings).then(changes)
        runs += _runs(Entry(entry.name, entry.place, said), commands)
        if len(runs) > MAX_RUNS:
            raise root.place.error(f"these are more than {MAX_RUNS:,} runs; make several recipes")
    _require_distinct(runs, root.place)
    before = top.then(changes).preflight
    return Recipe(path, _preflight(before, commands.preflight), tuple(runs))


def _runs(entry: Entry, commands: Commands) -> list[PlannedRun]:
    """Return the runs of one entry: each combination of the values that it gives to its keys."""
    tune = entry.sayings.tune
    choices = {
        key.name: _choices(key, tune[key.name]) for key in commands.tune.keys if key.name in tune
    }
    choices = {name: values for name, values in choices.items() if values}
    if MODEL not in choices:
        raise entry.place.error(f"{MODEL} is missing; give an ONNX file")
    if math.prod(map(len, choices.values())) > MAX_RUNS:
        raise entry.place.error(f"these are more than {MAX_RUNS:,} runs; make several recipes")
    varied = [name for name, values in choices.items() if len(values) > 1]
    return [
        _run(entry, dict(zip(choices, chosen, strict=True)), varied, commands)
        for chosen in itertools.product(*choices.values())
    ]


Chosen = tuple[Scalar, ...]  # of a key: one value, or more of a flag that may be repeated


def _choices(key: Key, value: Value) -> list[Chosen]:
    """Return the values that a key takes in turn; none where `null` takes an earlier one back."""
    if isinstance(value, Scalar) and value.text is None:
        return []
    said = value.values if isinstance(value, Items) else (value,)
    scalars = tuple(_scalar(key, each) for each in said)
    if not scalars and not key.is_repeatable:
        raise value.place.error(f"{key.name}: the list is empty; give a value, or null for none")
    if key.is_repeatable:
        return [scalars] if scalars else []
    return [(scalar,) for scalar in scalars]


def _scalar(key: Key, value: Value) -> Scalar:
    if not isinstance(value, Scalar):
        raise value.place.error(f"{key.name}: a value is wanted here, not a list or a mapping")
    if not value.text:
        raise value.place.error(f"{key.name} has no value; write null to take back an earlier one")
    if key.kind == "boolean" and value.text not in ("true", "false"):
        raise value.place.error(f"{key.name}: '{value.text}' is neither true nor false")
    return value


def _run(
    entry: Entry, chosen: dict[str, Chosen], varied: Sequence[str], commands: Commands
) -> PlannedRun:
    name = _name(entry, chosen, varied)
    chosen.setdefault(OUT, (Scalar(entry.place, DEFAULT_OUT),))
    argv = _command_line(commands.tune, chosen, name, entry.place)
    (out,) = chosen[OUT]
    folder = Path(_path(out, name))
    gate = _gate(entry.sayings.gate, commands.gate, name, folder)
    return PlannedRun(name, entry.name, folder, argv, gate)


def _name(entry: Entry, chosen: Mapping[str, Chosen], varied: Sequence[str]) -> str:
    """Return what tells a run from the others: its entry and what varies within it."""
    # Without an entry of a name, model, share and batch are the name, as in `tunerd tune`.
    told = [*varied] if entry.name else [k for k in chosen if k in _NAMING or k.endswith("-pct")]
    told += [key for key in varied if key not in told]
    parts = [entry.name] if entry.name else []
    for key in told:
        ((value),) = chosen[key]
        text = Path(str(value.text)).stem if key == MODEL else str(value.text)
        prefix = "" if key == MODEL else key.removesuffix("-pct")
        parts.append(re.sub(r"[^\w.+-]+", "-", prefix + text).strip("-.") or "x")
    return "-".join(parts)[:200]


def _gate(section: Section | None, command: Command, name: str, out: Path) -> Gate | None:
    if section is None or section.is_null:
        return None
    chosen = _once_each(section, (*command.keys, BASE_FOLLOWS))
    follows = chosen.pop(BASE_FOLLOWS.name, None)
    base, new = command.arguments
    if base.name not in chosen:
        raise section.place.error(f"gate: {base.name} is missing; give the run to compare with")
    chosen[new.name] = (Scalar(Place("", Path(), has_lines=False), str(out.absolute())),)
    argv = _command_line(command, chosen, name, section.place)
    is_following = follows is not None and follows[0].text == "true"
    return Gate(Path(_path(chosen[base.name][0], name)), is_following, argv)


def _preflight(section: Section | None, command: Command) -> tuple[str, ...] | None:
    if section is None or section.is_null:
        return None
    return _command_line(command, _once_each(section, command.keys), "", section.place)


def _once_each(section: Section, keys: Sequence[Key]) -> dict[str, Chosen]:
    chosen: dict[str, Chosen] = {}
    for key in keys:
        if key.name not in section.said:
            continue
        value = section.said[key.name]
        choices = _choices(key, value)
        if len(choices) > 1:
            raise value.place.error(f"{key.name}: one value is wanted here, and this is a list")
        if choices:
            chosen[key.name] = choices[0]
    return chosen


def _command_line(
    command: Command, chosen: Mapping[str, Chosen], name: str, place: Place
) -> tuple[str, ...]:
    """Return a command line that the command takes; an error is said where its value is."""
    argv = [command.name]
    for key in command.keys:
        for value in chosen.get(key.name, ()):
            text = _path(value, name) if key.kind == "path" else str(value.text)
            argv += key.words(text)
    try:
        command.check(argv)
    except InputError as error:
        raise _placed(str(error), command, chosen, place) from None
    return tuple(argv)


def _placed(
    message: str, command: Command, chosen: Mapping[str, Chosen], place: Place
) -> InputError:
    """Return the error at the value of the first key that it speaks of."""
    named = {key.flag: key.name for key in command.keys} | {
        key.name.upper(): key.name for key in command.arguments
    }
    for word in re.findall(r"--[a-z][a-z-]*|\b[A-Z]{2,}\b", message):
        key = named.get(word, "")
        if key in chosen:
            said = [value for value in chosen[key] if str(value.text) in message]
            where = (said or chosen[key])[0].place
            return where.error(f"{key}: {_BEGINNING.sub('', message, count=1)}")
    return place.error(message)


def _path(value: Scalar, name: str) -> str:
    """Return a path that is right from this process's folder, relative where it is below."""
    text = os.path.expanduser(str(value.text).replace(NAME, name))
    path = os.path.normpath(os.path.join(os.path.realpath(value.place.folder), text))
    here = os.getcwd()
    inside = os.path.commonpath([here, path]) == here
    return os.path.relpath(path, here) if inside else path


def _require_distinct(runs: Sequence[PlannedRun], place: Place) -> None:
    names: dict[str, PlannedRun] = {}
    folders: dict[Path, PlannedRun] = {}
    for run in runs:
        if run.name in names:
            raise place.error(
                f"two runs are named {run.name}; give them entries of their own under `runs`"
            )
        if run.out in folders:
            raise place.error(
                f"{folders[run.out].name} and {run.name} share the folder {run.out}; write "
                f"{NAME} in `{OUT}`"
            )
        names[run.name] = folders[run.out] = run
