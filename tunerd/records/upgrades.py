"""Stores of older versions: brought up to date by a writer, shown as current to a reader.

An upgrade adds what is missing and changes nothing that is there. Tables that are new in a version
are created by the writer, from the schema.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

# What version 2 knows of a span and version 1 did not, as far as it can be told.
_SPAN_COLUMNS = {
    "role": "CASE WHEN worker LIKE 'tuner-%' THEN 'tuner' ELSE 'slice' END",
    "session_id": (
        "(SELECT coalesce(max(session_id), 1) FROM sessions WHERE opened_at <= spans.start)"
    ),
    "items": "0",
    "task_id": "''",
    "busy_secs": "NULL",
    "cpu_secs": "NULL",
}
_SPAN_TYPES = {
    "role": "TEXT NOT NULL DEFAULT ''",
    "session_id": "INTEGER NOT NULL DEFAULT 1",
    "items": "INTEGER NOT NULL DEFAULT 0",
    "task_id": "TEXT NOT NULL DEFAULT ''",
    "busy_secs": "FLOAT",
    "cpu_secs": "FLOAT",
}


def upgrade(connection: Connection, found: int) -> None:
    """Add what a store of version `found` lacks to the tables that it has."""
    if found < 2:
        for name, kind in _SPAN_TYPES.items():
            connection.exec_driver_sql(f"ALTER TABLE spans ADD COLUMN {name} {kind}")
        known = ("role", "session_id")
        sets = ", ".join(f"{name} = {_SPAN_COLUMNS[name]}" for name in known)
        connection.exec_driver_sql(f"UPDATE spans SET {sets}")


def show_as_current(connection: Connection, found: int, metadata: sa.MetaData) -> None:
    """Have one connection see a store of version `found` as a current one, and write nothing.

    Temporary tables and views are this connection's own, and a name means them first
    (https://sqlite.org/lang_naming.html).
    """
    connection.exec_driver_sql("PRAGMA query_only = OFF")
    present = set(sa.inspect(connection).get_table_names())
    if found < 2:
        added = ", ".join(f"{value} AS {name}" for name, value in _SPAN_COLUMNS.items())
        connection.exec_driver_sql(
            f"CREATE TEMP VIEW spans AS SELECT spans.*, {added} FROM main.spans AS spans"
        )
    for table in metadata.sorted_tables:
        if table.name not in present:
            columns = ", ".join(column.name for column in table.columns if column.name != "end")
            columns += ', "end"' if "end" in table.columns else ""
            connection.exec_driver_sql(f"CREATE TEMP TABLE {table.name} ({columns})")
    connection.exec_driver_sql("PRAGMA query_only = ON")
