"""Strategies for what valid files become when somebody changes them: bytes, JSON, messages, SQL."""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import onnx
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

INTEGERS = st.one_of(
    st.sampled_from(
        [0, 1, -1, 2, 3, 7, 16, 64, 127, 255, 999, 65536, 2**31 - 1, 2**31, -(2**31), 2**40]
    ),
    st.integers(-(2**63), 2**63 - 1),
)
FLOATS = st.one_of(st.sampled_from([0.0, -1.0, 1e10, 1e308, 1e-308]), st.floats())
TEXTS = st.one_of(
    st.sampled_from(["", "x", "w", "y", "../x", "/etc/passwd", "<b>&", "\x1b[31m", "a" * 5000]),
    st.text(max_size=20),
)


# --- bytes -------------------------------------------------------------------------------------


@st.composite
def changed_bytes(draw: Draw, seeds: Sequence[bytes]) -> bytes:
    """Return one of `seeds` with a few stretches flipped, overwritten, removed, doubled or cut."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 100]))
        kind = draw(st.sampled_from(["flip", "write", "remove", "double", "cut", "insert"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            data[at : at + size] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "remove":
            del data[at : at + size]
        elif kind == "double":
            data[at:at] = data[at : at + size]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "cut":
            del data[at:]
    return bytes(data)


# --- JSON --------------------------------------------------------------------------------------

SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(TEXTS, SCALARS, max_size=2)
)


@st.composite
def changed_json(draw: Draw, document: Any) -> Any:
    """Return a copy of a JSON document in which some values are others, or are missing."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        at = document
        while True:
            if not isinstance(at, dict | list) or not at:
                return draw(VALUES)
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 3)):
                at = at[key]
                continue
            break
        if draw(st.booleans()):
            at[key] = draw(VALUES)
        else:
            del at[key]
    return document


# --- protocol buffers --------------------------------------------------------------------------


@st.composite
def changed_models(draw: Draw, seeds: Sequence[bytes]) -> bytes:
    """Return an ONNX model whose wire format is whole and whose fields are not what they were."""
    proto = onnx.ModelProto()
    proto.ParseFromString(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 5))):
        _change_message(draw, proto)
    return bytes(proto.SerializeToString())


def _change_message(draw: Draw, message: Any) -> None:
    """Walk down from `message` and change one field of what lies there."""
    fields = [f for f, _ in message.ListFields()]
    if not fields or not draw(st.integers(0, 15)):
        fields = list(message.DESCRIPTOR.fields)  # also those that it has not
    field = draw(st.sampled_from(fields))
    value = getattr(message, field.name)
    is_message = field.type == field.TYPE_MESSAGE
    if isinstance(value, bytes | str | int | float | bool) or not hasattr(value, "append"):
        if is_message and draw(st.integers(0, 7)):
            _change_message(draw, value)
        elif is_message or not draw(st.integers(0, 7)):
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _scalar(draw, field))
        return
    kind = draw(st.sampled_from(["inside", "inside", "inside", "remove", "double", "swap", "add"]))
    if kind == "add" or not len(value):
        value.add() if is_message else value.append(_scalar(draw, field))
        return
    at = draw(st.integers(0, len(value) - 1))
    if kind == "inside" and is_message:
        _change_message(draw, value[at])
    elif kind == "inside":
        value[at] = _scalar(draw, field)
    elif kind == "remove":
        del value[at]
    elif is_message:
        twin = type(value[at])()
        twin.CopyFrom(value[at])
        if kind == "swap":
            del value[at]
        value.append(twin)
    else:
        value.append(value[at])


def _scalar(draw: Draw, field: Any) -> Any:
    if field.type == field.TYPE_ENUM:
        return draw(st.sampled_from([v.number for v in field.enum_type.values]))
    if field.type == field.TYPE_STRING:
        return draw(TEXTS).encode("utf-8", "replace").decode()
    if field.type == field.TYPE_BYTES:
        return draw(st.one_of(st.binary(max_size=64), st.just(b"\xff" * 8)))
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return draw(FLOATS) if field.type == field.TYPE_DOUBLE else draw(st.floats(width=32))
    low, high = {
        field.TYPE_INT32: (-(2**31), 2**31 - 1),
        field.TYPE_UINT64: (0, 2**64 - 1),
    }.get(field.type, (-(2**63), 2**63 - 1))
    return min(max(draw(INTEGERS), low), high)


# --- SQLite ------------------------------------------------------------------------------------


@st.composite
def changed_stores(draw: Draw, seeds: Sequence[bytes], tables: Sequence[str] = ()) -> bytes:
    """Return an SQLite file with other values, rows, columns or tables: all, or some by name."""
    with sqlite3.connect(":memory:") as store:
        content = bytearray(draw(st.sampled_from(seeds)))
        content[18:20] = b"\x01\x01"  # not write-ahead: in memory there is no second file
        store.deserialize(bytes(content))
        for _ in range(draw(st.integers(1, 3))):
            _change_store(draw, store, tables)
        store.commit()
        changed: bytes = store.serialize()
    store.close()
    return changed


def _change_store(draw: Draw, store: sqlite3.Connection, tables: Sequence[str]) -> None:
    names = [n for (n,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    wanted = [n for n in names if n in tables or (not tables and not n.startswith("sqlite_"))]
    table = draw(st.sampled_from(wanted or ["none"]))
    columns = [row[1] for row in store.execute(f'PRAGMA table_info("{table}")')]
    kind = draw(st.sampled_from([*["update"] * 6, "delete", "drop", "column", "view", "trigger"]))
    statement, values = "SELECT 1", []
    if kind == "update" and columns:
        column = draw(st.sampled_from(columns))
        old = store.execute(f'SELECT "{column}" FROM "{table}" LIMIT 1').fetchone()
        statement, values = f'UPDATE "{table}" SET "{column}" = ?', [_cell(draw, old)]
    elif kind == "delete":
        statement = f'DELETE FROM "{table}"'
    elif kind == "drop":
        statement = f'DROP TABLE "{table}"'
    elif kind == "column" and columns:
        statement = f'ALTER TABLE "{table}" DROP COLUMN "{draw(st.sampled_from(columns))}"'
    elif kind == "view":  # of a name that a table dropped before may have had
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
        name = draw(st.sampled_from(["cats", "phases", "trials"]))
        statement = f'CREATE VIEW "{name}" AS {endless} SELECT i FROM n'
    elif kind == "trigger":
        statement = f'CREATE TRIGGER t AFTER INSERT ON "{table}" BEGIN DELETE FROM "{table}"; END'
    try:
        store.execute(statement, values)
    except (sqlite3.Error, UnicodeEncodeError):  # of an index, a key or a text that cannot be
        return


def _cell(draw: Draw, old: tuple[Any] | None) -> Any:
    text = old[0] if old and isinstance(old[0], str) else ""
    if text[:1] in ("{", "[") and draw(st.booleans()):
        try:
            return json.dumps(draw(changed_json(json.loads(text))))
        except ValueError:  # changed before
            return text[: len(text) // 2]
    return draw(st.one_of(st.none(), INTEGERS, FLOATS, TEXTS, st.binary(max_size=8)))
