"""How a field of settings is said: by a flag of a command, and by a key of a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tunerd.errors import InputError
from tunerd.settings.problems import said_of

_Settings = TypeVar("_Settings", bound=BaseModel)


@dataclass(frozen=True)
class Option:
    """Stands in a field's annotation. A field without one cannot be said.

    Attributes:
        flag: `--` and the field's name if not given.
        takes: the type of one value as people write it, where that is not the field's own.
        parser: reads one value's text while the command line is parsed; raises ValueError.
        default: what help shows, where `takes` is given.
        variable: of the environment, where the flag is not given.
        panel: the section of the command's help in which it stands; the first if not given.
        research: what the end of help says of a value that results do not need, which `metavar`
            leaves out.
        is_path: whether a text begins with a path.
        is_filled: whether the model fills in a value that is not given.
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    panel: str | None = None
    research: str | None = None
    variable: str | None = None
    takes: Any = None
    default: str | None = None
    parser: Callable[[str], Any] | None = None
    is_argument: bool = False
    is_repeatable: bool = False
    is_path: bool = False
    is_filled: bool = False


@dataclass(frozen=True)
class Key:
    """One setting as command lines and recipes name it."""

    field: str
    option: Option
    takes: Any  # the type of one value, without None
    constraints: tuple[Any, ...]  # of one value, annotated-types
    is_required: bool
    default: Any

    @property
    def flag(self) -> str:
        """Return its flag, "" for an argument."""
        if self.option.is_argument:
            return ""
        return self.option.flag or f"--{self.field.replace('_', '-')}"

    @property
    def name(self) -> str:
        """Return what it is called in recipes."""
        return self.flag.removeprefix("--") or self.field

    @property
    def shown(self) -> str:
        """Return what messages call it on a command line."""
        return self.flag or self.field.upper()

    @property
    def is_path(self) -> bool:
        """Say whether a value is a path; what a command takes without a flag is one, too."""
        return self.takes is Path or self.option.is_argument or self.option.is_path

    def words(self, text: str) -> list[str]:
        """Return what stands for one value on a command line."""
        if not self.flag:
            return [f"./{text}" if text.startswith("-") else text]
        if self.takes is bool:
            return [self.flag] if text == "true" else []
        return [f"{self.flag}={text}"] if text.startswith("-") else [self.flag, text]


@cache
def keys_of(model: type[BaseModel]) -> tuple[Key, ...]:
    """Return the settings of a model that can be said, in the order of its fields."""
    found = ((name, info, _option(info)) for name, info in model.model_fields.items())
    return tuple(_key(name, info, option) for name, info, option in found if option is not None)


def _option(info: FieldInfo) -> Option | None:
    return next((each for each in info.metadata if isinstance(each, Option)), None)


def _key(name: str, info: FieldInfo, option: Option) -> Key:
    return Key(
        field=name,
        option=option,
        takes=option.takes or _one(info.annotation),
        constraints=tuple(m for m in info.metadata if hasattr(m, "ge") or hasattr(m, "le")),
        is_required=info.is_required() and not option.is_filled,
        default=_default(info, option),
    )


def _default(info: FieldInfo, option: Option) -> Any:
    """Return what a command line that does not say it shows, and takes."""
    if option.takes or option.is_repeatable or info.is_required():
        return option.default
    return info.default


def _one(annotation: Any) -> Any:
    """Return the type of one value, without None and without the tuple of all."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    return get_args(annotation)[0] if get_origin(annotation) is tuple else annotation


def checked(
    model: type[_Settings], values: Mapping[str, Any], *, from_text: bool = False
) -> _Settings:
    """Return settings with these values by field; InputError says what is wrong, and of which flag.

    `from_text` reads texts as numbers and paths, as JSON and recipes have them.
    """
    try:
        return model.model_validate(values, strict=not from_text)
    except ValidationError as error:
        key, sentence = problem_of(error, model)
        raise InputError(f"{key.shown} {sentence}" if key else sentence) from None


def problem_of(error: ValidationError, model: type[BaseModel]) -> tuple[Key | None, str]:
    """Return the setting that the first problem is of, None where it is of several, and what."""
    first = error.errors(include_url=False)[0]
    names = {key.field: key for key in keys_of(model)}
    key = names.get(str(first["loc"][0])) if first["loc"] else None
    return key, said_of(first)


def with_environment(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values and, of settings that they do not say, those in the environment."""
    found = {
        key.field: os.environ[key.option.variable]
        for key in keys_of(model)
        if key.option.variable and os.environ.get(key.option.variable)
    }
    return found | dict(values)
