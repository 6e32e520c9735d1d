"""The tables of a store, in SQLite and PostgreSQL alike.

A run folder's store holds one run, a team's store holds many. What belongs to a run has its
`run_id`; a trial's id is its own in the whole store.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Float, ForeignKey, ForeignKeyConstraint, Index, Table
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.types import TypeDecorator

from tunerd.vocabulary import DEFAULT_SOURCE

STORE_NAME = "store.sqlite"
# 2: who worked on what, and how long the phases of a session took
# 3: runs, what the outcome of a task was obtained on, and spot checks
# 4: who disturbed a trial
# 5: sources and their recipes, and what a task computes in and for how many
VERSION = 5

METADATA = sa.MetaData()


class Words(TypeDecorator[str]):
    """Text with any character: PostgreSQL's has no NUL, which a compiler's message may hold."""

    impl = sa.Text
    cache_ok = True
    _ESCAPE = "\ue000"  # of the private use area; doubled where it is meant

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace(self._ESCAPE, self._ESCAPE * 2).replace("\0", f"{self._ESCAPE}0")

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if dialect.name != "postgresql" or not isinstance(value, str) or self._ESCAPE not in value:
            return value
        whole = value.split(self._ESCAPE * 2)
        return self._ESCAPE.join(part.replace(f"{self._ESCAPE}0", "\0") for part in whole)


# SQLite numbers rows by itself where the type is INTEGER and nothing else.
Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _of_a_run() -> Column[int]:
    return Column("run_id", Int, ForeignKey("runs.run_id"), nullable=False)


def _key_of_a_run() -> Column[int]:
    return Column("run_id", Int, ForeignKey("runs.run_id"), primary_key=True)


def _of_a_task() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["run_id", "task_id"], ["tasks.run_id", "tasks.task_id"])


version = Table("schema_version", METADATA, Column("version", Int, nullable=False))

# The identity is random and goes with the run folder: by it a run finds itself in a team's store.
runs = Table(
    "runs",
    METADATA,
    Column("run_id", Int, primary_key=True),
    Column("identity", Words, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
)

# One row per session: the first says what the run is, the later ones who went on with it.
# `number` counts the sessions of one run.
sessions = Table(
    "sessions",
    METADATA,
    Column("session_id", Int, primary_key=True),
    _of_a_run(),
    Column("number", Int, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("pid", Int, nullable=False),
    Column("facts", Words, nullable=False),
    Index("sessions_by_run", "run_id", "number", unique=True),
)

tasks = Table(
    "tasks",
    METADATA,
    Column("position", Int, primary_key=True),
    _of_a_run(),
    Column("task_id", Words, nullable=False),
    Column("name", Words, nullable=False),
    Column("weight", Int, nullable=False),
    Column("flops", Float, nullable=False),
    Column("args", Words, nullable=False),
    Column("weight_args", Words, nullable=False),
    Column("target_kind", Words, nullable=False),
    Column("target_json", Words, nullable=False),
    Column("mod_json", Words, nullable=False),
    Column("precision", Words, nullable=False),
    Column("tenants", Int, nullable=False),
    sa.UniqueConstraint("run_id", "task_id"),
)

slices = Table(
    "slices",
    METADATA,
    _key_of_a_run(),
    Column("slice_id", Words, primary_key=True),
    Column("spec", Words, nullable=False),
)

proofs = Table(
    "proofs",
    METADATA,
    Column("proof_id", Int, primary_key=True),
    _of_a_run(),
    Column("slice_id", Words, nullable=False),
    Column("proved_at", Float, nullable=False),
    Column("proof", Words, nullable=False),
    Index("proofs_by_slice", "run_id", "slice_id"),
)

trials = Table(
    "trials",
    METADATA,
    Column("trial_id", Int, primary_key=True),
    _of_a_run(),
    Column("task_id", Words, nullable=False),
    Column("candidate_id", Words, nullable=False),
    Column("source", Words, nullable=False),
    Column("recipe", Words, nullable=False),
    Column("state", Words, nullable=False),
    Column("proposed_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("attempts", Int, nullable=False, server_default="0"),
    Column("slice_id", Words),
    Column("build_secs", Float),
    Column("compiler", Words),
    Column("library_sha256", Words),
    Column("stage", Words),
    Column("kind", Words),
    Column("message", Words),
    Column("run_secs", Words),  # JSON list of raw samples, seconds of one call each
    Column("median_secs", Float),  # of run_secs, to find a task's best by an index
    Column("calls_per_sample", Int),
    Column("profile", Words),
    Column("sm_count", Int),
    Column("sm_clock_mhz", Int),
    Column("temperature_c", Int),
    Column("power_w", Float),
    Column("neighbours", Int),
    Column("strangers", Int),
    Column("disturbed_by", Words),  # None: nobody looked
    _of_a_task(),
    sa.UniqueConstraint("run_id", "candidate_id"),
    Index("trials_by_task", "run_id", "task_id", "state", "median_secs"),
    Index("trials_by_state", "run_id", "state"),
    Index("trials_by_disturbance", "run_id", "disturbed_by"),  # counted without a look at a recipe
    sqlite_autoincrement=True,
)

of_default = trials.c.source == DEFAULT_SOURCE
of_search = trials.c.source != DEFAULT_SOURCE

# Ends of attempts that were no end of the trial: collateral, interrupted.
setbacks = Table(
    "setbacks",
    METADATA,
    Column("setback_id", Int, primary_key=True),
    Column("trial_id", Int, ForeignKey("trials.trial_id"), nullable=False, index=True),
    Column("attempt", Int, nullable=False),
    Column("slice_id", Words),
    Column("at", Float, nullable=False),
    Column("stage", Words, nullable=False),
    Column("kind", Words, nullable=False),
    Column("message", Words, nullable=False),
)

# What a task ended with, and what that was obtained on; versions before 3 did not note the latter.
task_outcomes = Table(
    "task_outcomes",
    METADATA,
    _key_of_a_run(),
    Column("task_id", Words, primary_key=True),
    Column("saved_at", Float, nullable=False),
    Column("outcome", Words, nullable=False),
    Column("winner_recipe", Words),  # None: it is in the winner's trial
    Column("device", Words),
    Column("sm_count", Int),
    Column("mechanism", Words),
    Column("driver", Words),
    Column("code_for", Words),
    Column("tvm_version", Words),
    Column("profile", Words),
    Column("precision", Words),
    Column("tenants", Int),
    _of_a_task(),
    Index("task_outcomes_by_task", "task_id", "device", "sm_count"),
)

outcomes = Table(
    "outcomes",
    METADATA,
    Column("outcome_id", Int, primary_key=True),
    _of_a_run(),
    Column("saved_at", Float, nullable=False),
    Column("outcome", Words, nullable=False),
)

# `session_id` is the number of the session within its run, here and below.
spans = Table(
    "spans",
    METADATA,
    Column("span_id", Int, primary_key=True),
    _of_a_run(),
    Column("worker", Words, nullable=False),
    Column("activity", Words, nullable=False),
    Column("start", Float, nullable=False),
    Column("end", Float, nullable=False),
    Column("role", Words, nullable=False, server_default=""),
    Column("session_id", Int, nullable=False, server_default="1"),
    Column("items", Int, nullable=False, server_default="0"),
    Column("task_id", Words, nullable=False, server_default=""),
    Column("busy_secs", Float),
    Column("cpu_secs", Float),
)

phases = Table(
    "phases",
    METADATA,
    Column("row_id", Int, primary_key=True),
    _of_a_run(),
    Column("session_id", Int, nullable=False),
    Column("phase", Words, nullable=False),
    Column("start", Float, nullable=False),
    Column("end", Float, nullable=False),
    Column("core_busy_secs", Words, nullable=False),  # JSON list of pairs: core, seconds
)

# Runs of the baseline in a slice, which are no trials.
spot_checks = Table(
    "spot_checks",
    METADATA,
    Column("check_id", Int, primary_key=True),
    _of_a_run(),
    Column("session_id", Int, nullable=False),
    Column("at", Float, nullable=False),
    Column("task_id", Words, nullable=False),
    Column("busy_secs", Float, nullable=False),
    Column("measurement", Words, nullable=False),  # JSON
)


def found_version(connection: Connection) -> object:
    """Return what a store with a table of versions holds in it, whatever that is."""
    return connection.execute(sa.select(sa.func.max(version.c.version))).scalar()


def missing_part(connection: Connection) -> str:
    """Name a table or column of this version that a store has not, "" where it has all."""
    inspector = sa.inspect(connection)
    names = set(inspector.get_table_names())
    for table in METADATA.sorted_tables:
        if table.name not in names:
            return f"table {table.name}"
        known = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in known:
                return f"column {column.name} in its table {table.name}"
    return ""
