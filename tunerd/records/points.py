"""What was measured for plans of mixes, as a team shares it: one table, in a team's store alone.

It stands beside the tables of runs, which neither read nor need it: a store that has it not has no
point yet. So it is no part of the schema's version, and whoever first writes a point makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import sqlalchemy as sa
from sqlalchemy import Column, Float, Table

from tunerd.records import runs, server, typed
from tunerd.records.opening import OpenStore
from tunerd.records.schema import Int, Words
from tunerd.system.store_address import StoreAddress

_TABLES = sa.MetaData()

points = Table(
    "measured_points",
    _TABLES,
    Column("subject", Words, primary_key=True),
    Column("device", Words, primary_key=True),
    Column("unit_count", Int, primary_key=True, autoincrement=False),
    Column("driver", Words, primary_key=True),
    Column("versions", Words, primary_key=True),
    Column("value", Words, nullable=False),  # JSON
    Column("host", Words, nullable=False),
    Column("measured_at", Float, nullable=False),
)
_KEYS = tuple(column.name for column in points.primary_key)


@dataclass(frozen=True)
class MachineKind:
    """What machines have in common on which the same takes as long."""

    device: str  # GPU or CPU model
    unit_count: int  # SMs of the whole device; cores that may be used
    driver: str
    versions: str  # of what runs and measures artifacts


@dataclass(frozen=True)
class SharedPoint:
    """One thing that was measured. subject: in JSON, all that it depends on but the machine."""

    subject: str
    value: str  # JSON
    on: MachineKind
    host: str  # the machine's name
    measured_at: float  # seconds since the epoch


class TeamPoints(OpenStore):
    """The points of a team's store, without any of its runs."""

    @classmethod
    def open_shared(cls, address: StoreAddress) -> Self:
        """Open a team's store for writing, creating what it lacks.

        Raises StoreError or FolderError where it cannot be reached or used, and InputError where
        the driver is missing.
        """
        store = cls(address.shown, server.open_writer(address), is_snapshot=False)
        try:
            with store._transaction() as connection:
                server.lock_schema(connection)
                _TABLES.create_all(connection)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read_shared(cls, address: StoreAddress) -> Self:
        """Open a team's store as it is at this moment; raises as `open_shared` does."""
        return cls(address.shown, server.open_reader(address), is_snapshot=True)

    def save(self, found: Iterable[SharedPoint]) -> None:
        """Keep points, all or none. Of two of one subject and kind of machine the newer stays."""
        # Of rows that are there the later one in the list replaces the earlier: oldest first.
        rows = [_row(point) for point in sorted(found, key=lambda point: point.measured_at)]
        if not rows:
            return
        insert = runs.put(self._connection, points)
        changed = {c.name: insert.excluded[c.name] for c in points.columns if c.name not in _KEYS}
        put = insert.on_conflict_do_update(
            index_elements=_KEYS,
            set_=changed,
            where=points.c.measured_at <= insert.excluded.measured_at,
        )
        with self._transaction() as connection:
            connection.execute(put, rows)

    def measured_on(self, on: MachineKind) -> dict[str, SharedPoint]:
        """Return what was measured on a kind of machine, by subject."""
        names = dataclasses.asdict(on)
        wanted = sa.select(points).where(*(points.c[name] == names[name] for name in names))
        with self._reading() as connection:
            if not sa.inspect(connection).has_table(points.name):
                return {}
            found = {}
            for row in connection.execute(wanted).mappings():
                typed.check_row(row, points)
                found[row["subject"]] = SharedPoint(
                    row["subject"], row["value"], on, row["host"], row["measured_at"]
                )
            return found


def _row(point: SharedPoint) -> dict[str, object]:
    row = dataclasses.asdict(point)
    return {**row.pop("on"), **row}
