"""A recipe to the runs that it asks for: lists of settings, each checked and with a name.

A recipe says the keys of a command's settings: at its top for all runs, in each entry under `runs`
again, and on the command line last of all. `null` takes back what was said before.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ValidationError

from tunerd.errors import InputError
from tunerd.settings.option import Key, Option, keys_of, problem_of, with_environment
from tunerd.settings.problems import did_you_mean
from tunerd.settings.studies import COMMANDS, CompareSettings, PreflightSettings
from tunerd.studies.recipes import document
from tunerd.studies.recipes.document import Place, Value

MAX_RUNS = 1000
RUNS, GATE, PREFLIGHT = "runs", "gate", "preflight"
MODEL, OUT = "model", "out"  # the keys that name a run, and where it goes
NAME = "{name}"  # in a path: the name of the run
DEFAULT_OUT = f"runs/{NAME}"
ENTRY_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}"
_NAMING = (MODEL, "batch")

Said = dict[str, Value]  # by key
Chosen = dict[str, tuple[Value, ...]]  # one value, or more of a key that may be repeated


class GateSettings(CompareSettings):
    """What a recipe says of a gate: all of `tunerd compare`, and one thing that needs many runs."""

    base_follows: Annotated[
        bool,
        Option("The base is a link: the first run makes it, and each run that is better moves it."),
    ] = False


GATE_KEYS = tuple(key for key in keys_of(GateSettings) if key.field != "new")


@dataclass(frozen=True)
class Command:
    """A command of tunerd, and its settings as texts by field, which are all good."""

    name: str
    said: Mapping[str, str | tuple[str, ...]]
    settings: BaseModel

    @property
    def argv(self) -> tuple[str, ...]:
        """Return the command line that is the same, less the program's name."""
        words = [self.name]
        for key in keys_of(COMMANDS[self.name]):
            texts = self.said.get(key.field, ())
            for text in (texts,) if isinstance(texts, str) else texts:
                words += key.words(text)
        return tuple(words)


@dataclass(frozen=True)
class Gate:
    """What a run is compared with."""

    base: Path
    base_follows: bool
    command: Command


@dataclass(frozen=True)
class PlannedRun:
    name: str
    entry: str  # its name under `runs`; "" where the recipe has no `runs`
    out: Path
    command: Command
    gate: Gate | None


@dataclass(frozen=True)
class Recipe:
    path: Path
    preflight: Command | None  # None: nothing is looked at before
    runs: tuple[PlannedRun, ...]

    def only(self, names: Sequence[str]) -> tuple[PlannedRun, ...]:
        """Return the runs of these names or of these entries, in the recipe's order."""
        known = {name for run in self.runs for name in (run.name, run.entry) if name}
        for name in names:
            if name not in known:
                raise InputError(
                    f"--only {name}: {self.path} has no such run; {_meant(name, known)}"
                )
        return tuple(run for run in self.runs if {run.name, run.entry} & set(names))


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and plan its runs; no other file is looked at, and nothing is done.

    `overrides` are `KEY=VALUE`, said of every run after all that the recipe says; of a gate or of
    the check before the runs they are `gate.KEY=VALUE` and `preflight.KEY=VALUE`.
    """
    return plan_recipe(document.read_file(path), path, overrides)


def plan_recipe(
    root: Value, path: Path, overrides: Sequence[str] = (), *, command: str = "tune"
) -> Recipe:
    """Plan the runs of a recipe that has been read, each of `command`; `root` may be a part."""
    keys = keys_of(COMMANDS[command])
    top = _known("a recipe", root, keys, (PREFLIGHT, GATE, RUNS))
    changes = _overrides(overrides, keys)
    runs: list[PlannedRun] = []
    for name, place, said in _entries(top.pop(RUNS, None), root.place, keys):
        runs += _runs(command, name, place, _then(_then(top, said), changes))
        if len(runs) > MAX_RUNS:
            raise root.place.error(f"these are more than {MAX_RUNS:,} runs; make several recipes")
    _require_distinct(runs, root.place)
    check = _section(_then(top, changes).get(PREFLIGHT), keys_of(PreflightSettings))
    before = None if check is None else _command("preflight", check[1], "", check[0])
    return Recipe(path, before, tuple(runs))


def _meant(word: str, allowed: Iterable[str]) -> str:
    return did_you_mean(word.lower().replace("_", "-").lstrip("-"), allowed)


# --- what is said ------------------------------------------------------------------------------


def _known(what: str, value: Value, keys: Sequence[Key], sections: Sequence[str]) -> Said:
    """Return what is said by key; InputError for a key that is not known there."""
    said = dict(value.entries(what))
    allowed = {key.name for key in keys} | set(sections)
    for word, inner in said.items():
        if word not in allowed:
            is_elsewhere = word in (RUNS, GATE, PREFLIGHT) and sections
            hint = "it belongs at the top of the recipe" if is_elsewhere else _meant(word, allowed)
            subject = f"there is no key {word}" if sections else f"{what} has no key {word}"
            raise _key_place(inner).error(f"{subject}; {hint}")
    for section, its_keys in ((GATE, GATE_KEYS), (PREFLIGHT, keys_of(PreflightSettings))):
        if section in sections and section in said and said[section].content:
            _known(section, said[section], its_keys, ())
    return said


def _key_place(value: Value) -> Place:
    return value.key or value.place


def _then(first: Said, later: Said) -> Said:
    """Return what holds when `later` is said after `first`; sections are joined key by key."""
    both = first | later
    for section in {GATE, PREFLIGHT} & first.keys() & later.keys():
        old, new = first[section].content, later[section].content
        if isinstance(old, dict) and new is not None:
            joined = old | (new if isinstance(new, dict) else {})
            both[section] = replace(later[section], content=joined)
    return both


def _entries(
    runs: Value | None, place: Place, keys: Sequence[Key]
) -> Iterator[tuple[str, Place, Said]]:
    """Yield name, place and keys of each entry; without `runs` the top is the one entry."""
    if runs is None:
        yield "", place, {}
        return
    entries = runs.entries(RUNS)
    if not entries:
        raise runs.place.error(f"{RUNS}: there is no entry; write NAME: and its keys below")
    for name, value in entries.items():
        if not re.fullmatch(ENTRY_NAME, name):
            raise _key_place(value).error(
                f"{RUNS}: '{name}' cannot be a name; names are letters, digits and . _ + -, "
                "at most 100, a letter or digit first"
            )
        if not value.content:  # an entry of a name alone takes all from the top
            value = replace(value, content={})
        yield name, _key_place(value), _known("an entry", value, keys, (GATE,))


def _overrides(overrides: Sequence[str], keys: Sequence[Key]) -> Said:
    total: Said = {}
    place = Place("--set", Path(), has_lines=False)
    for text in overrides:
        path, equals, value_text = text.partition("=")
        if not equals:
            raise place.error(f"'{text}' is not KEY=VALUE; write for example --set trials=100")
        value = document.read(value_text, place) if value_text.strip() else Value(place, "")
        for word in reversed(path.split(".", 1)):
            value = Value(place, {word: replace(value, key=place)})
        total = _then(total, _known("this", value, keys, (PREFLIGHT, GATE)))
    return total


# --- runs --------------------------------------------------------------------------------------


def _runs(command: str, entry: str, place: Place, said: Said) -> list[PlannedRun]:
    """Return the runs of one entry: each combination of the values that it gives to its keys."""
    choices = _choices(keys_of(COMMANDS[command]), said)
    if MODEL not in choices:
        raise place.error(f"{MODEL} is missing; give an ONNX file")
    if math.prod(map(len, choices.values())) > MAX_RUNS:
        raise place.error(f"these are more than {MAX_RUNS:,} runs; make several recipes")
    varied = [name for name, values in choices.items() if len(values) > 1]
    gate = _section(said.get(GATE), GATE_KEYS)
    runs = []
    for each in itertools.product(*choices.values()):
        chosen = dict(zip(choices, each, strict=True))
        name = _name(entry, chosen, varied)
        chosen.setdefault(OUT, (Value(place, DEFAULT_OUT),))
        planned = _command(command, chosen, name, place)
        out = Path(str(planned.said[OUT]))
        runs.append(PlannedRun(name, entry, out, planned, _gate(gate, name, out)))
    return runs


def _choices(keys: Sequence[Key], said: Said) -> dict[str, list[tuple[Value, ...]]]:
    """Return the values that each key takes in turn, of those keys that are not taken back."""
    found: dict[str, list[tuple[Value, ...]]] = {}
    for key in keys:
        value = said.get(key.name)
        if value is None or value.content is None:
            continue
        several = value.content if isinstance(value.content, tuple) else (value,)
        if not several and not key.option.is_repeatable:
            raise value.place.error(
                f"{key.name}: the list is empty; give a value, or null for none"
            )
        for each in several:
            _require_text(key, each)
        if several:
            found[key.name] = [several] if key.option.is_repeatable else [(v,) for v in several]
    return found


def _require_text(key: Key, value: Value) -> None:
    if isinstance(value.content, tuple | dict):
        raise value.place.error(f"{key.name}: a value is wanted here, not a list or a mapping")
    if not value.content:
        raise value.place.error(f"{key.name} has no value; write null to take back an earlier one")
    if key.takes is bool and value.content not in ("true", "false"):
        raise value.place.error(f"{key.name}: '{value.content}' is neither true nor false")


def _name(entry: str, chosen: Chosen, varied: Sequence[str]) -> str:
    """Return what tells a run from the others: its entry and what varies within it."""
    # Without an entry of a name, model, share and batch are the name, as in `tunerd tune`.
    told = [*varied] if entry else [k for k in chosen if k in _NAMING or k.endswith("-pct")]
    told += [key for key in varied if key not in told]
    parts = [entry] if entry else []
    for key in told:
        ((value),) = chosen[key]
        text = Path(str(value.content)).stem if key == MODEL else str(value.content)
        prefix = "" if key == MODEL else key.removesuffix("-pct")
        parts.append(re.sub(r"[^\w.+-]+", "-", prefix + text).strip("-.") or "x")
    return "-".join(parts)[:200]


def _section(value: Value | None, keys: Sequence[Key]) -> tuple[Place, Chosen] | None:
    """Return where a gate or a check is asked for, and what is said of it; None for neither."""
    if value is None or value.content is None:
        return None
    said = value.content if isinstance(value.content, dict) else {}
    chosen: Chosen = {}
    for name, choices in _choices(keys, said).items():
        if len(choices) > 1:
            raise said[name].place.error(f"{name}: one value is wanted here, and this is a list")
        chosen[name] = choices[0]
    return _key_place(value), chosen


def _gate(section: tuple[Place, Chosen] | None, name: str, out: Path) -> Gate | None:
    if section is None:
        return None
    place, chosen = section
    if "base" not in chosen:
        raise place.error("gate: base is missing; give the run to compare with")
    follows = chosen.get("base-follows")
    new = Value(Place("", Path(), has_lines=False), str(out.absolute()))
    others = {key: value for key, value in chosen.items() if key != "base-follows"}
    command = _command("compare", others | {"new": (new,)}, name, place)
    is_following = follows is not None and follows[0].content == "true"
    return Gate(Path(str(command.said["base"])), is_following, command)


def _command(name: str, chosen: Chosen, run: str, place: Place) -> Command:
    """Return a command whose settings are good; an error is said where its value is."""
    model = COMMANDS[name]
    said: dict[str, str | tuple[str, ...]] = {}
    for key in keys_of(model):
        if key.name in chosen:
            texts = tuple(
                _path(value, run) if key.is_path else str(value.content)
                for value in chosen[key.name]
            )
            said[key.field] = texts if key.option.is_repeatable else texts[0]
    try:
        settings = model.model_validate(with_environment(model, said), strict=False)
    except ValidationError as error:
        raise _placed(*problem_of(error, model), model, chosen, place) from None
    if "store" in said and getattr(settings, "store_password", None) is not None:
        raise chosen["store"][0].place.error(
            "store: it holds a password, which a recipe must not; leave it out, and set "
            "PGPASSWORD or ~/.pgpass where the recipe runs"
        )
    return Command(name, said, settings)


def _placed(
    of: Key | None, message: str, model: type[BaseModel], chosen: Chosen, place: Place
) -> InputError:
    """Return the error at its value: that of its key, or of the first key that it speaks of."""
    named = {key.shown: key.name for key in keys_of(model)}
    words = [of.shown] if of else re.findall(r"--[a-z][a-z0-9-]*|\b[A-Z]{2,}\b", message)
    for word in words:
        if (key := named.get(word, "")) in chosen:
            said = [value for value in chosen[key] if str(value.content) in message]
            return (said or chosen[key])[0].place.error(f"{key}: {message}")
    return place.error(message)


def _path(value: Value, run: str) -> str:
    """Return a path that is right from this process's folder, relative where it is below."""
    text = os.path.expanduser(str(value.content).replace(NAME, run))
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
