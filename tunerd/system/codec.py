"""Values as the JSON and the blobs of a message between processes of one run, and back.

`records.typed` reads what may come from anywhere; it needs pydantic, whose import takes a fifth of
a second of each process's start.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import Arrays

_T = TypeVar("_T")


def value_from(kind: type[_T], said: Any, **given: Any) -> _T:
    """Read what to_json wrote of a `kind`, with the fields that it left out as `given`.

    Dataclasses, tuples and enumerations are made; all else stays as JSON has it.
    """
    value: _T = _value(kind, said, given)
    return value


def _value(kind: Any, said: Any, given: dict[str, Any]) -> Any:
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        names = {f.name for f in dataclasses.fields(make)} & said.keys()
        return make(**{n: _value(_field_kind(make, n), said[n], {}) for n in names}, **given)
    if typing.get_origin(kind) is tuple:
        first, *others = typing.get_args(kind)
        kinds = itertools.repeat(first) if others == [...] else (first, *others)
        return tuple(_value(each, entry, {}) for each, entry in zip(kinds, said, strict=False))
    return kind(said) if isinstance(kind, enum.EnumType) else said


@functools.cache
def _field_kind(kind: type, name: str) -> Any:
    """Return the type of one field: those of others may be known to type checkers alone."""
    (written,) = (f.type for f in dataclasses.fields(kind) if f.name == name)
    alone = types.SimpleNamespace(__annotations__={name: written})
    return typing.get_type_hints(alone, vars(sys.modules[kind.__module__]))[name]


def arrays_to(arrays: Arrays) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Return what names, shapes and types arrays have, and their memory."""
    specs = [
        {"name": name, "shape": list(a.shape), "dtype": str(a.dtype)} for name, a in arrays.items()
    ]
    return specs, [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays.values()]


def arrays_from(specs: Sequence[dict[str, Any]], blobs: Sequence[bytearray]) -> Arrays:
    """Return arrays of these, in the memory of the blobs."""
    return {
        s["name"]: np.frombuffer(b, dtype_of(s["dtype"])).reshape(s["shape"])
        for s, b in zip(specs, blobs, strict=True)
    }
