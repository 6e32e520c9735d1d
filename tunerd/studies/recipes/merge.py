"""What a recipe says key by key: at its top, in each entry, and on the command line instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunerd.studies.recipes import document
from tunerd.studies.recipes.document import Mapping, Place, Scalar, Value
from tunerd.studies.recipes.keys import Commands, Key, did_you_mean

RUNS, GATE, PREFLIGHT = "runs", "gate", "preflight"
_ENTRY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")

Said = dict[str, Value]  # by key


@dataclass(frozen=True)
class Section:
    """What is said of a gate or of the check before the runs. `null` takes an earlier one back."""

    place: Place
    said: Said = field(default_factory=dict)
    is_null: bool = False

    def then(self, later: Section | None) -> Section:
        if later is None:
            return self
        if later.is_null or self.is_null:
            return later
        return Section(later.place, self.said | later.said)


@dataclass(frozen=True)
class Sayings:
    """All that one place says."""

    tune: Said
    gate: Section | None = None
    preflight: Section | None = None

    def then(self, later: Sayings) -> Sayings:
        """Return what holds when `later` is said after this."""
        return Sayings(
            self.tune | later.tune,
            self.gate.then(later.gate) if self.gate else later.gate,
            self.preflight.then(later.preflight) if self.preflight else later.preflight,
        )


@dataclass(frozen=True)
class Entry:
    """One entry under `runs`; "" is the name of a recipe's top that has no `runs`."""

    name: str
    place: Place
    sayings: Sayings


def read_top(root: Value, commands: Commands) -> Sayings:
    """Return what a recipe says for all of its runs."""
    return _sayings("a recipe", root, commands, (PREFLIGHT, GATE, RUNS))


def read_entries(root: Value, commands: Commands) -> Iterator[Entry]:
    """Yield what a recipe's entries say; without `runs` the top is its one entry."""
    runs = _mapping(root, "a recipe").get(RUNS)
    if runs is None:
        yield Entry("", root.place, Sayings({}))
        return
    entries = _mapping(runs, RUNS).entries
    if not entries:
        raise runs.place.error(f"{RUNS}: there is no entry; write NAME: and its keys below")
    for name, value in entries:
        if not _ENTRY_NAME.fullmatch(name.text or ""):
            raise name.place.error(
                f"{RUNS}: '{name.text}' cannot be a name; names are letters, digits and . _ + -, "
                "at most 100, a letter or digit first"
            )
        # An entry of a name alone takes all from the top.
        if isinstance(value, Scalar) and not value.text:
            value = Mapping(name.place, ())
        yield Entry(str(name.text), name.place, _sayings("an entry", value, commands, (GATE,)))


def read_overrides(overrides: Sequence[str], commands: Commands) -> Sayings:
    """Return what `KEY=VALUE` on the command line say, in the order given."""
    total = Sayings({})
    for text in overrides:
        path, equals, value_text = text.partition("=")
        place = Place("--set", Path(), has_lines=False)
        if not equals:
            raise place.error(f"'{text}' is not KEY=VALUE; write for example --set trials=100")
        value = document.read(value_text, place) if value_text.strip() else Scalar(place, "")
        for word in reversed(path.split(".", 1)):
            value = Mapping(place, ((Scalar(place, word), value),))
        total = total.then(_sayings("this", value, commands, (PREFLIGHT, GATE)))
    return total


def _sayings(what: str, value: Value, commands: Commands, sections: Sequence[str]) -> Sayings:
    keys_of = {GATE: commands.gate_keys, PREFLIGHT: commands.preflight.keys}
    tune: Said = {}
    found: dict[str, Section] = {}
    allowed = {key.name for key in commands.tune.keys} | set(sections)
    for key, inner in _mapping(value, what).entries:
        word = str(key.text)
        if word not in allowed:
            hint = did_you_mean(word, allowed)
            if word in (RUNS, *keys_of):
                hint = "it belongs at the top of the recipe"
            raise key.place.error(f"there is no key {word}; {hint}")
        if word in keys_of:
            found[word] = _section(key, inner, keys_of[word])
        elif word != RUNS:
            tune[word] = inner
    return Sayings(tune, found.get(GATE), found.get(PREFLIGHT))


def _section(name: Scalar, value: Value, keys: Sequence[Key]) -> Section:
    if isinstance(value, Scalar) and not value.text:
        return Section(name.place, is_null=value.text is None)
    said: Said = {}
    allowed = {key.name for key in keys}
    for key, inner in _mapping(value, str(name.text)).entries:
        if key.text not in allowed:
            raise key.place.error(
                f"{name.text} has no key {key.text}; {did_you_mean(str(key.text), allowed)}"
            )
        said[str(key.text)] = inner
    return Section(name.place, said)


def _mapping(value: Value, what: str) -> Mapping:
    if isinstance(value, Mapping):
        return value
    raise value.place.error(f"{what} is made of lines `key: value`, and this is none")
