"""YAML text to values that know their line and column: text, lists and mappings, and no more.

The events of PyYAML's safe parser are put together here and not by its constructors: that keeps
the text of each value, which the setting's own parser reads, refuses keys that are said twice, tags
and merge keys, and bounds what aliases unfold to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tunerd.errors import InputError
from tunerd.system.text import reason_of

MAX_BYTES = 256 << 10
MAX_DEPTH = 16
MAX_VALUES = 20_000  # with aliases unfolded
_NULLS = ("~", "null", "Null", "NULL")  # YAML 1.2, 10.3.2
# Paths and flags hold none of these: C0 and C1 controls, lone surrogates.
_NOT_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Place:
    """Where something was said. Lines and columns from 1; 0 where there are none."""

    source: str  # as the user named it
    folder: Path  # relative paths are relative to it
    line: int = 0
    column: int = 0
    has_lines: bool = True  # False for a value on the command line

    def at(self, line: int, column: int) -> Place:
        return replace(self, line=line, column=column) if self.has_lines else self

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def error(self, message: str) -> InputError:
        return InputError(f"{self}: {message}")


@dataclass(frozen=True)
class Value:
    """What was said at a place: text as it is written, without its quotes, None for `null`."""

    place: Place
    content: str | tuple[Value, ...] | dict[str, Value] | None
    key: Place | None = None  # of what is said by a key: where the key stands

    def entries(self, what: str) -> dict[str, Value]:
        """Return the values by key; InputError where there are no keys, which `what` needs."""
        if isinstance(self.content, dict):
            return self.content
        raise self.place.error(f"{what} is made of lines `key: value`, and this is none")


def read_file(path: Path) -> Value:
    """Read a recipe's file; InputError says what is wrong with it, and where."""
    place = Place(str(path), path.parent)
    try:
        if not path.is_file():
            raise place.error("there is no such file; give a recipe, for example nightly.yaml")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise place.error(f"it cannot be read: {reason_of(error)}") from None
    except ValueError:  # a NUL in the path
        raise place.error("this is no path") from None
    if len(content) > MAX_BYTES:
        raise place.error(f"a recipe has at most {MAX_BYTES >> 10} KiB; this is no recipe")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise place.at(line, 1).error("this is not UTF-8; save the recipe as UTF-8") from None
    return read(text, place)


def read(text: str, place: Place) -> Value:
    """Read one YAML document; `place` names its source."""
    try:
        return _Reader(text, place).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place.at(mark.line + 1, mark.column + 1) if mark else place
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise where.error(f"this is no YAML: {said}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise place.error(f"this is no YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OverflowError) as error:  # PyYAML, of "\UFFFFFFFF": chr() is out of range
        raise place.error(f"this is no YAML: {error}") from None


class _Reader:
    def __init__(self, text: str, place: Place) -> None:
        self._place = place
        self._events: Iterator[yaml.Event] = yaml.parse(text, yaml.SafeLoader)
        self._anchors: dict[str, tuple[Value, int]] = {}  # and how many values it holds
        self._count = 0

    def document(self) -> Value:
        for event in self._events:
            if isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent):
                continue
            if isinstance(event, yaml.StreamEndEvent):
                raise self._place.error(
                    "the recipe is empty; it needs at least `model` and a share"
                )
            value = self._value(event, 0)
            next(self._events)  # the document's end
            rest = next(self._events)
            if not isinstance(rest, yaml.StreamEndEvent):
                raise self._at(rest).error("a second document begins; a recipe is one document")
            return value
        raise self._place.error("the recipe is empty; it needs at least `model` and a share")

    def _at(self, event: yaml.Event) -> Place:
        mark = event.start_mark
        assert mark is not None  # the parser gives each event one
        return self._place.at(mark.line + 1, mark.column + 1)

    def _value(self, event: yaml.Event, depth: int) -> Value:
        place = self._at(event)
        before = self._count
        self._count_in(place, 1)
        if depth > MAX_DEPTH:
            raise place.error(f"values lie in each other more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, place)
        assert isinstance(event, yaml.NodeEvent)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise place.error(f"tags such as {tag} are not read; leave it out")
        content: Any
        if isinstance(event, yaml.ScalarEvent):
            content = self._text(event, place)
        elif isinstance(event, yaml.SequenceStartEvent):
            content = tuple(self._items(depth))
        else:
            content = self._pairs(depth)
        value = Value(place, content)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._count - before)
        return value

    def _count_in(self, place: Place, values: int) -> None:
        self._count += values
        if self._count > MAX_VALUES:
            raise place.error(f"more than {MAX_VALUES:,} values, aliases unfolded; make it smaller")

    def _alias(self, event: yaml.AliasEvent, place: Place) -> Value:
        # An anchor counts once its value has ended, so none can hold itself.
        if event.anchor not in self._anchors:
            raise place.error(f"the alias *{event.anchor} has no anchor before it that is complete")
        value, size = self._anchors[event.anchor]
        self._count_in(place, size)
        return value

    def _text(self, event: yaml.ScalarEvent, place: Place) -> str | None:
        if event.implicit[0] and event.value in _NULLS:
            return None
        if found := _NOT_TEXT.search(event.value):
            raise place.error(f"the character U+{ord(found[0]):04X} is allowed in no value")
        return str(event.value)

    def _items(self, depth: int) -> Iterator[Value]:
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._value(event, depth + 1)

    def _pairs(self, depth: int) -> dict[str, Value]:
        pairs: dict[str, Value] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            word = key.content
            if not isinstance(word, str) or not word:
                raise key.place.error("a key must be a word")
            if word == "<<":
                raise key.place.error("merge keys are not read; say it at the top, for all runs")
            if word in pairs:
                first = pairs[word].key
                assert first is not None
                raise key.place.error(
                    f"{word} is said twice, first in line {first.line}; say it once"
                )
            value = self._value(next(self._events), depth + 1)
            pairs[word] = replace(value, key=key.place)
        return pairs
