"""A team's store: a database of many runs, and how it is opened.

Whoever comes first creates the tables. A server's older tables are upgraded by no one: their
version is refused, with the tunerd that fits.
"""

from __future__ import annotations

from importlib.util import find_spec

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from tunerd.errors import InputError, StoreError
from tunerd.records import sqlite
from tunerd.records.problems import problem_of_a_server
from tunerd.records.schema import METADATA, VERSION, found_version, missing_part, version
from tunerd.system.host import install_command
from tunerd.system.store_address import StoreAddress

CONNECT_SECS = 10
_SCHEMA_LOCK = 0x74756E6572640001  # of tunerd alone among a server's advisory locks


def open_writer(address: StoreAddress) -> Connection:
    """Open a team's store, creating the tables where it is new.

    Raises StoreError where it cannot be reached or used, InputError where the driver is missing.
    """
    if address.file is not None:
        return sqlite.open_writer(address.file)
    connection = _connect(address, {})
    return _checked(connection, address, creates=True)


def open_reader(address: StoreAddress) -> Connection:
    """Open a team's store as it is at this moment; raises as open_writer does."""
    if address.file is not None:
        return sqlite.open_reader(address.file)
    options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    connection = _connect(address, options)
    return _checked(connection, address, creates=False)


def _connect(address: StoreAddress, options: dict[str, object]) -> Connection:
    try:
        return _engine(address).connect().execution_options(**options)
    except DBAPIError as error:
        # Its text holds the server and the user; libpq puts no password into it.
        raise problem_of_a_server(address.shown, error) from error
    except UnicodeError as error:
        raise StoreError(f"the store {address.shown} cannot be reached: {error}") from None


def _engine(address: StoreAddress) -> Engine:
    if find_spec("psycopg") is None:
        raise InputError(
            f"--store {address.shown} needs the package psycopg, which is not installed; run "
            f"{install_command('postgres')}"
        )
    return sa.create_engine(
        address.url,
        poolclass=sa.NullPool,
        hide_parameters=True,
        connect_args={
            "connect_timeout": CONNECT_SECS,
            "application_name": "tunerd",
            # A server that is gone without a word is noticed within half a minute.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        },
    )


def _checked(connection: Connection, address: StoreAddress, *, creates: bool) -> Connection:
    """Return the connection if the tables are this version's; a reader's stays in a transaction."""
    try:
        connection.begin()
        if creates:
            lock_schema(connection)
        _require_tables(connection, address, creates=creates)
        if creates:
            connection.commit()
    except DBAPIError as error:
        connection.close()
        raise problem_of_a_server(address.shown, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def lock_schema(connection: Connection) -> None:
    """Hold a server's tables until the transaction ends: two at once would both create them.

    A file's transaction has it to itself.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))


def _require_tables(connection: Connection, address: StoreAddress, *, creates: bool) -> None:
    names = set(sa.inspect(connection).get_table_names())
    ours = METADATA.tables.keys()
    if version.name not in names:
        if names & ours:
            raise StoreError(
                f"the store {address.shown} holds another program's tables, such as "
                f"{min(names & ours)}; give tunerd a database or a schema of its own"
            )
        if not creates:
            raise StoreError(f"the store {address.shown} is empty: no run has written to it yet")
        METADATA.create_all(connection)
        connection.execute(version.insert(), {"version": VERSION})
        return
    found = found_version(connection)
    if found != VERSION:
        raise StoreError(
            f"the store {address.shown} has schema version {found}, and this tunerd shares those "
            f"of version {VERSION}; use the tunerd that made it, or another database"
        )
    if missing := missing_part(connection):
        raise StoreError(f"the store {address.shown} has no {missing}; it is damaged")
