"""Rows and JSON of a store that may come from anywhere, as values of the types they should have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError

from tunerd.records.schema import Words

_T = TypeVar("_T")
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
_SQL_TYPES: dict[type, tuple[type, ...]] = {
    sa.BigInteger: (int,),
    sa.Float: (int, float),
    Words: (str,),
}


def from_json(kind: type[_T], text: str) -> _T:
    """Return what JSON says as a `kind`; raises ValueError where it is none."""
    try:
        value: _T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise _first(error) from None
    return value


def of_kind(kind: type[_T], value: Any) -> _T:
    """Return `value`, of dicts and lists, as a `kind`; raises ValueError where it is none."""
    try:
        typed: _T = _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise _first(error) from None
    return typed


def check_row(row: Mapping[Any, Any], table: sa.Table) -> None:
    """Raise ValueError unless a row has what its columns say: SQLite stores anything anywhere."""
    for name, kinds, is_nullable in _columns(table):
        value = row[name]
        if not isinstance(value, kinds) and not (value is None and is_nullable):
            raise ValueError(f"{table.name}.{name} is {str(value)[:40]!r}, no {kinds[-1].__name__}")


@functools.cache
def _columns(table: sa.Table) -> tuple[tuple[str, tuple[type, ...], bool], ...]:
    return tuple((c.name, _SQL_TYPES[type(c.type)], bool(c.nullable)) for c in table.columns)


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)  # which takes milliseconds
    return _ADAPTERS[kind]


def _first(error: ValidationError) -> ValueError:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return ValueError(f"{where}: {first['msg']}" if where else first["msg"])
