"""The files that people write for `tunerd colocate`: plans, mixes, files of jobs.

Each is a pydantic model, in YAML, read and checked here. What is wrong in one is said with its
place, and with the keys that are allowed there.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tunerd.errors import InputError
from tunerd.settings.problems import nearest, said_of
from tunerd.system.text import reason_of

MAX_BYTES = 1 << 20


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Kind:
    """A kind of files. module, model: of its pydantic model. takes: which commands take it."""

    name: str
    module: str
    model: str
    takes: str

    def load(self) -> type[BaseModel]:
        model: type[BaseModel] = getattr(import_module(self.module), self.model)
        return model


PLAN = Kind(
    "plan", "tunerd.colocation.plan", "Plan", "`tunerd colocate check`, `bench` and `regulate` take"
)
MIX = Kind("mix", "tunerd.colocation.planning.mix", "Mix", "`tunerd colocate plan` takes")
JOBS = Kind(
    "file of jobs",
    "tunerd.colocation.placement.job_file",
    "JobFile",
    "`tunerd colocate place` takes",
)

_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], document: Mapping[str, Any], path: Path, kind: Kind) -> _Model:
    """Return the document of a file as its model; InputError says what is wrong in it.

    A file of another kind is called what it is.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        for other in (PLAN, MIX, JOBS):
            if other is not kind and _is_of(other, document):
                found = error.errors()
                hint = f"give a {kind.name} here"
                if found[0]["type"] == "missing" and not any(map(_is_unknown, found)):
                    hint = f"of a {kind.name} {sentence(error, model)}"  # which may be forgotten
                raise InputError(f"{path} is a {other.name}, which {other.takes}; {hint}") from None
        raise InputError(f"{path}: {sentence(error, model)}") from None


def _is_of(kind: Kind, document: Mapping[str, Any]) -> bool:
    try:
        kind.load().model_validate(document)
    except ValidationError:
        return False
    return True


def read_yaml(path: Path, kind: Kind) -> dict[str, Any]:
    """Return the document of a file that a person wrote; InputError where it is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is over {MAX_BYTES >> 10} KiB, and no {kind.name}")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise InputError(
            f"{path} cannot be read: {reason}; give a {kind.name}, a YAML file"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{path}{where}: this is no YAML: {said}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        needed = next(
            name for name, field in kind.load().model_fields.items() if field.is_required()
        )
        raise InputError(f"{path} is no {kind.name}: it has no key `{needed}`")
    return document


def absolute(path: Path, folder: Path) -> Path:
    return Path(os.path.normpath(folder / path.expanduser()))


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """Return what is wrong in a document of a model, and where, as a sentence."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
    where = where.lstrip(".")
    if _is_unknown(first):
        said = _unknown(str(first["loc"][-1]), _keys_at(first["loc"][:-1], model))
    else:
        said = said_of(first)
    return f"{where}: {said}" if where else said


def _is_unknown(problem: ErrorDetails) -> bool:
    return problem["type"] == "extra_forbidden"


def _unknown(word: str, allowed: Sequence[str]) -> str:
    listed = ", ".join(allowed)
    if near := nearest(word, allowed):
        return f"is no key here; did you mean {near}? Allowed are {listed}"
    return f"is no key here; allowed are {listed}"


def _keys_at(loc: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """Return the keys that are allowed at a place of a document."""
    at: list[Any] = [model]
    for step in loc:
        if isinstance(step, int):
            continue  # the entries of a list are found with the list
        inner = [each.model_fields for each in at if step != each.__name__]
        named = [each for each in at if step == each.__name__]  # of a union the one that was tried
        at = named or [
            found
            for fields in inner
            for name, field in fields.items()
            if step in (name, field.alias)
            for found in _models_in(field.annotation)
        ]
    return [field.alias or name for each in at for name, field in each.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models_in(inner)]
