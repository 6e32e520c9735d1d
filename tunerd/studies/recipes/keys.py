"""What a recipe may say: the flags of three commands, as the command line describes them.

Nothing here lists a flag. The command line hands over its commands as `Command`s, and what it
takes is what a recipe takes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

NAME = "{name}"  # in a path: the name of the run

Kind = Literal["integer", "number", "boolean", "text", "path"]


@dataclass(frozen=True)
class Key:
    """One flag, or one argument, of a command."""

    name: str  # "gpu-pct"
    flag: str  # "--gpu-pct"; "" for an argument
    kind: Kind
    help: str
    is_repeatable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    words_too: tuple[str, ...] = ()  # that it takes besides values of its kind

    def words(self, text: str) -> list[str]:
        """Return what stands for one value on a command line."""
        if not self.flag:
            return [f"./{text}" if text.startswith("-") else text]
        if self.kind == "boolean":
            return [self.flag] if text == "true" else []
        return [f"{self.flag}={text}"] if text.startswith("-") else [self.flag, text]


# The one key that is no flag: the command line compares two runs and keeps none.
BASE_FOLLOWS = Key(
    "base-follows",
    "",
    "boolean",
    "The base is a link: the first run makes it, and each run that is better moves it.",
)


@dataclass(frozen=True)
class Command:
    """A command of tunerd, as far as recipes speak of it.

    `check` parses a command line, without the program's name, as the command would, and raises
    InputError for what it would refuse before it looks at any file.
    """

    name: str  # "tune"
    keys: tuple[Key, ...]
    check: Callable[[Sequence[str]], None]

    def key(self, name: str) -> Key | None:
        return next((key for key in self.keys if key.name == name), None)

    @property
    def arguments(self) -> tuple[Key, ...]:
        return tuple(key for key in self.keys if not key.flag)


@dataclass(frozen=True)
class Commands:
    tune: Command
    preflight: Command
    gate: Command  # its arguments are the base and the new run

    @property
    def gate_keys(self) -> tuple[Key, ...]:
        """What may be said of a gate: the new run is the one that has just ended."""
        implied = self.gate.arguments[1:]
        return (*(key for key in self.gate.keys if key not in implied), BASE_FOLLOWS)


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return what to do about an unknown word: the likely one, or all that are allowed."""
    known = sorted(allowed)
    near = difflib.get_close_matches(word.lower().replace("_", "-").lstrip("-"), known, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed are {', '.join(known)}"
