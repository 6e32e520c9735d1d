"""Stores of older versions: brought up to date by a writer, shown as current to a reader.

Both go by the same table: what a column holds that an older version had not. No value that is
there changes.
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tunerd.records.schema import METADATA, runs, version
from tunerd.vocabulary import FP32, METASCHEDULE

# SQL expressions over a row of the old table, as far as it can be told.
_ADDED = {
    ("sessions", "number"): "session_id",
    # 2
    ("spans", "role"): "CASE WHEN worker LIKE 'tuner-%' THEN 'tuner' ELSE 'slice' END",
    ("spans", "session_id"): (
        "(SELECT coalesce(max(session_id), 1) FROM {sessions} AS s WHERE s.opened_at <= old.start)"
    ),
    ("spans", "items"): "0",
    ("spans", "task_id"): "''",
    ("spans", "busy_secs"): "NULL",
    ("spans", "cpu_secs"): "NULL",
    # 3
    **{
        ("task_outcomes", name): "NULL"
        for name in (
            "device",
            "sm_count",
            "mechanism",
            "driver",
            "code_for",
            "tvm_version",
            "profile",
        )
    },
    ("task_outcomes", "winner_recipe"): "NULL",
    # 4
    ("trials", "strangers"): "NULL",
    ("trials", "disturbed_by"): "NULL",
    # 5
    ("tasks", "precision"): f"'{FP32}'",
    ("tasks", "tenants"): "1",
    ("trials", "source"): (
        f"CASE old.origin WHEN 'search' THEN '{METASCHEDULE}' ELSE old.origin END"
    ),
    ("task_outcomes", "precision"): f"'{FP32}'",
    ("task_outcomes", "tenants"): "1",
}
_RENAMED = {("trials", "recipe"): "trace_json", ("task_outcomes", "winner_recipe"): "winner_trace"}
_SINCE = {"phases": 2, "runs": 3, "spot_checks": 3}
_THE_RUN = "1"
_ASIDE = "old_"


def upgrade(connection: Connection, found: int) -> None:
    """Rebuild the tables of a store of version `found` inside the caller's transaction.

    SQLite cannot change the keys of a table that is there (https://sqlite.org/lang_altertable.html).
    """
    quote = connection.dialect.identifier_preparer.quote
    present = _present(connection, found)
    connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
    for name in present:
        connection.exec_driver_sql(f"ALTER TABLE {name} RENAME TO {_ASIDE}{name}")
    inspector = sa.inspect(connection)
    for name in present:
        for index in inspector.get_indexes(f"{_ASIDE}{name}"):
            if index["name"] is not None:
                connection.exec_driver_sql(f"DROP INDEX {quote(index['name'])}")
    METADATA.create_all(connection)
    if runs.name not in present:
        connection.execute(
            runs.insert(), {"run_id": 1, "identity": uuid.uuid4().hex, "created_at": 0.0}
        )
    for table in METADATA.sorted_tables:
        if table.name in present:
            names = ", ".join(f'"{c.name}"' for c in table.columns)
            chosen = _select(table, present[table.name], _ASIDE)
            connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) {chosen}")
    for table in reversed(METADATA.sorted_tables):
        if table.name in present:
            connection.exec_driver_sql(f"DROP TABLE {_ASIDE}{table.name}")


def show_as_current(connection: Connection, found: int) -> None:
    """Have one connection see a store of version `found` as a current one, and write nothing.

    Temporary tables and views are this connection's own, and a name means them first
    (https://sqlite.org/lang_naming.html).
    """
    present = _present(connection, found)
    connection.exec_driver_sql("PRAGMA query_only = OFF")
    for table in METADATA.sorted_tables:
        if table.name in present:
            chosen = _select(table, present[table.name], "main.")
            connection.exec_driver_sql(f"CREATE TEMP VIEW {table.name} AS {chosen}")
            connection.exec_driver_sql(f"SELECT * FROM {table.name} LIMIT 0")  # it is looked at now
        elif table is not version:
            names = ", ".join(f'"{column.name}"' for column in table.columns)
            connection.exec_driver_sql(f"CREATE TEMP TABLE {table.name} ({names})")
    if runs.name not in present:
        connection.execute(runs.insert(), {"run_id": 1, "identity": "", "created_at": 0.0})
    connection.exec_driver_sql("PRAGMA query_only = ON")


def _present(connection: Connection, found: int) -> dict[str, set[str]]:
    """Return the columns of the tables of a version; none for one that is missing."""
    inspector = sa.inspect(connection)
    names = set(inspector.get_table_names())
    return {
        name: {c["name"] for c in inspector.get_columns(name)} if name in names else set()
        for name in METADATA.tables
        if name != version.name and _SINCE.get(name, 1) <= found
    }


def _select(table: sa.Table, present: set[str], prefix: str) -> str:
    chosen = []
    for column in table.columns:
        value = f'old."{column.name}"'
        if column.name not in present:
            key = (table.name, column.name)
            before = _RENAMED.get(key)
            value = f'old."{before}"' if before in present else _ADDED.get(key, value)
            if column.name == "run_id":
                value = _THE_RUN
        chosen.append(f'{value.format(sessions=f"{prefix}sessions")} AS "{column.name}"')
    return f"SELECT {', '.join(chosen)} FROM {prefix}{table.name} AS old"
