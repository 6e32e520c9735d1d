"""Stores, packed runs and artifacts of others, damaged or made to harm, are refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib import DATA
from tests.lib.bad_input import Bad, Make, Place, check, of_dims, tune
from tunerd.artifacts.manifest import LIBRARY, MANIFEST, WEIGHTS, sealed
from tunerd.errors import ExitCode
from tunerd.records.schema import STORE_NAME, VERSION
from tunerd.records.sqlite import TVM_RECORDS
from tunerd.records.tvm_database import WORKLOADS
from tunerd.runs.archive import pack

# --- stores ------------------------------------------------------------------------------------

SHOW = ("show",)
EXPORT = ("export", "--format", "json", "--to", "/dev/null")


def store(
    change: Callable[[Path], object],
    *records: object,
    command: Callable[[Place, Path], list[object]] | None = None,
) -> Make:
    """Change a run's store, and read it with a command of `tunerd records` or another one."""

    def make(place: Place) -> list[object]:
        folder = place.run()
        change(folder / STORE_NAME)
        name, *rest = records or SHOW
        return command(place, folder) if command else ["records", name, folder, *rest]

    return make


def sql(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as raw, raw:
            for statement in statements:
                raw.execute(statement)

    return change


def transfer(median: str, *, samples: str | None = None) -> Make:
    """Start from a run whose only trial has other times."""
    change = f"UPDATE trials SET median_secs = {median}, run_secs = '[{samples or median}]'"
    return store(sql(change), command=warm_start)


def warm_start(place: Place, folder: Path) -> list[object]:
    return [*tune(place.saved(of_dims(1, 4))), "--warm-start", folder]


def old_and_torn(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.executescript((DATA / "store-v1.sql").read_text())
        raw.execute("DROP TABLE spans")


def two_runs(place: Place) -> list[object]:
    """The second run has a trial of a task that it does not have."""
    first, second = place.run("first"), place.run("second")
    sql("PRAGMA foreign_keys = OFF", "UPDATE trials SET task_id = 'none', candidate_id = 'other'")(
        second / STORE_NAME
    )
    return ["records", "merge", first, second, "--to", place.folder / "both"]


_NO_RECORD = "holds what is no record of a run .*copy the run folder again, or name another one"
_NO_TEXT = "CAST(x'43524541544520FF80' AS TEXT)"  # CREATE and two bytes
_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"

STORES: dict[str, tuple[Make, str]] = {
    "no store": (lambda p: ["records", "show", p.folder], "is not a run folder: it has no store"),
    "not there": (
        lambda p: ["records", "show", p.folder / "none"],
        "is not a run folder: it does not exist; give",
    ),
    "a long path": (lambda p: ["records", "show", "a" * 5000], "File name too long"),
    "a text": (store(lambda path: path.write_text("text " * 999)), "file is not a database; check"),
    "empty": (store(lambda path: path.write_bytes(b"")), "no store of tunerd: it has no table"),
    "cut short": (store(lambda path: os.truncate(path, 8192)), "malformed; (check|copy)"),
    "somebody else's": (
        store(lambda path: (path.unlink(), sql("CREATE TABLE cats (name TEXT)")(path))),
        "no store of tunerd: it has no table schema_version; choose another folder",
    ),
    "of a newer version": (
        store(sql("UPDATE schema_version SET version = 99")),
        f"schema version 99, and this tunerd reads those up to version {VERSION}; use the tunerd",
    ),
    "of a version in words": (
        store(sql("UPDATE schema_version SET version = 'new'")),
        "schema version new, and this tunerd reads those up to version",
    ),
    "without trials": (store(sql("DROP TABLE trials")), "no table trials; it is damaged: copy the"),
    "without a column": (
        store(sql("ALTER TABLE trials DROP COLUMN power_w")),
        "no column power_w in its table trials; it is damaged",
    ),
    "of an older version without spans": (
        store(old_and_torn),
        "cannot be opened as a store: .*spans",
    ),
    "with an endless view": (
        store(sql("DROP TABLE phases", f"CREATE VIEW phases AS {_ENDLESS}")),
        "holds the view 'phases', which tunerd makes none of; choose another folder",
    ),
    "with a trigger": (
        store(sql("CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END")),
        "holds the trigger 't', which tunerd makes none of",
    ),
    "with a table that is no text": (
        store(sql("PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET sql = {_NO_TEXT}")),
        "cannot be opened as a store: .*codec can't decode.*check that",
    ),
    "without a session": (
        store(sql("DELETE FROM sessions")),
        "killed before it began.*run its command again",
    ),
    "facts that are no JSON": (store(sql("UPDATE sessions SET facts = '{'")), _NO_RECORD),
    "facts of another kind": (store(sql("UPDATE sessions SET facts = '{\"a\": 1}'")), _NO_RECORD),
    "a share in words": (
        store(sql("UPDATE sessions SET facts = json_set(facts, '$.pct', 'half')")),
        r"pct: Input should be a valid integer.*copy the run folder again",
    ),
    "samples that are no JSON": (store(sql("UPDATE trials SET run_secs = 'fast'")), _NO_RECORD),
    "samples that are words": (
        store(sql("UPDATE trials SET run_secs = '[\"fast\"]'")),
        "0: Input should be a valid number.*copy the run folder again",
    ),
    "no samples": (
        store(sql("UPDATE trials SET run_secs = '[]'"), *EXPORT),
        "finite samples, at l",
    ),
    "a failure dressed as a time": (
        store(sql("UPDATE trials SET run_secs = '[1e10]'")),
        r"found \(10000000000\.0,\): what has no number is a Failure",
    ),
    "a time before the start": (
        store(sql("UPDATE trials SET run_secs = '[-0.001]'")),
        r"found \(-0\.001,\)",
    ),
    "a median that is not of its samples": (
        store(sql("UPDATE trials SET median_secs = 1e-9"), *EXPORT),
        r"the median of \(.*\) is 0\.001, not '1e-09'",
    ),
    "a time in words": (
        store(sql("UPDATE trials SET proposed_at = 'today'"), *EXPORT),
        r"trials\.proposed_at is 'today', no float",
    ),
    "a state that is none": (
        store(sql("UPDATE trials SET state = 'resting'"), *EXPORT),
        "'resting' is not a valid TrialState",
    ),
    "a measured trial without samples": (
        store(sql("UPDATE trials SET run_secs = NULL"), *EXPORT),
        "a trial that is measured has no run_secs",
    ),
    "a trial of no task": (
        store(sql("PRAGMA foreign_keys = OFF", "DELETE FROM tasks"), *EXPORT),
        "trial 1 is of a task that it has not",
    ),
    "a task that TVM cannot read": (
        store(sql("UPDATE tasks SET mod_json = '[]'"), "export", "--format", "tvm", "--to", "db"),
        "task 'conv'.* cannot be exported",
    ),
    "tasks of other shapes": (store(sql("UPDATE tasks SET args = '[[1]]'")), _NO_RECORD),
    "merged with trials of no task": (two_runs, "cannot be merged.*FOREIGN KEY"),
}


# Of what a store ranks by; another run's is read for its transfers.
TIMES: dict[str, tuple[Make, str]] = {
    "a failure's time": (transfer("1e10"), r"found \(10000000000\.0,\): what has no number is a"),
    "a time before the start": (transfer("-5.0"), r"found \(-5\.0,\)"),
    "an endless time": (transfer("9e999", samples="Infinity"), r"found \(inf,\)"),
    "a time in words": (transfer("'fast'", samples="0.001"), r"is 0\.001, not 'fast'"),
    "no time": (transfer("NULL", samples="0.001"), r"is 0\.001, not 'None'"),
    "another time than its samples": (transfer("1e-9", samples="0.001"), r"is 0\.001, not '1e-09'"),
    "no samples": (
        store(sql("UPDATE trials SET run_secs = NULL"), command=warm_start),
        "a trial that is measured has no run_secs",
    ),
    "a failed trial that took a time": (
        store(sql("UPDATE trials SET state = 'failed'"), command=warm_start),
        r"a trial that failed took '0\.001' seconds",
    ),
    "a trace that is a number": (
        store(sql("UPDATE trials SET recipe = x'00'"), command=warm_start),
        "trial 1 is made of .*, no str",
    ),
}


@pytest.mark.parametrize("what", TIMES)
def test_a_run_whose_times_are_none_teaches_nothing(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = TIMES[what]
    check(Bad(what, make, ExitCode.BAD_FOLDER, f"{said}.*; it is damaged"), place, capsys)


def tvm_database(command: Callable[[Place, Path], list[object]]) -> Make:
    """Give a database of TVM's, whose only trial has failed, to a command."""

    def make(place: Place) -> list[object]:
        folder = place.folder / "database"
        folder.mkdir()
        (folder / WORKLOADS).write_text('["1", "e30="]\n')
        (folder / TVM_RECORDS).write_text("[0, [[[], []], [1e10], null, null]]\n")
        return command(place, folder)

    return make


TVM_DATABASES = {
    "to start from": tvm_database(warm_start),
    "to show": tvm_database(lambda _, folder: ["records", "show", folder]),
    "to merge": tvm_database(
        lambda _, folder: ["records", "merge", folder, "--to", folder.with_name("merged")]
    ),
}


@pytest.mark.parametrize("what", TVM_DATABASES)
def test_a_database_of_tvm_is_named_as_such(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    said = r"is a database of TVM's, which tells no share, and no run folder.*give the folder"
    check(Bad(what, TVM_DATABASES[what], ExitCode.BAD_FOLDER, said), place, capsys)


@pytest.mark.parametrize("what", STORES)
def test_a_store_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = STORES[what]
    check(Bad(what, make, ExitCode.BAD_FOLDER, said), place, capsys)


# --- packed runs -------------------------------------------------------------------------------


def packed(change: Callable[[bytes], bytes]) -> Make:
    def make(place: Place) -> list[object]:
        file = pack(place.run(), place.folder / "file")
        file.write_bytes(change(file.read_bytes()))
        return ["records", "unpack", file, place.folder / "there"]

    return make


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


PACKED = [
    Bad(
        "no archive",
        packed(lambda _: b"text" * 99),
        ExitCode.BAD_FOLDER,
        "it is no .tar.gz; give a file",
    ),
    Bad("cut short", packed(lambda c: c[: len(c) // 2]), ExitCode.BAD_FOLDER, "cannot be unpacked"),
    Bad("a changed byte", packed(flipped), ExitCode.BAD_FOLDER, "cannot be (unpacked|opened)"),
    Bad("empty", packed(lambda _: gzip.compress(b"")), ExitCode.BAD_FOLDER, "cannot be unpacked"),
    Bad(
        "a long path",
        lambda p: ["records", "unpack", "a" * 5000, p.folder / "there"],
        ExitCode.BAD_FOLDER,
        "File name too long.*(choose|give)",
    ),
]


@pytest.mark.parametrize("bad", PACKED, ids=lambda bad: bad.what)
def test_a_packed_run_that_cannot_be_used(
    bad: Bad, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    check(bad, place, capsys)


# --- artifacts ---------------------------------------------------------------------------------


def artifact(change: Callable[[Path], object], *flags: object) -> Make:
    def make(place: Place) -> list[object]:
        folder = place.artifact()
        change(folder)
        return ["bench", folder, *flags]

    return make


def byte_of(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(flipped((folder / name).read_bytes()))

    return change


def told(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(sealed(manifest | changes)))

    return change


def also_named(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][name] = "0" * 64
        (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))

    return change


def pipe_for(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


_CHANGED = r"was changed: its sha256 is \w+\.\.\., the manifest says .*nothing of it was loaded"

ARTIFACTS: dict[str, tuple[Make, str]] = {
    "nowhere": (
        lambda p: ["bench", "nowhere"],
        "there is no folder nowhere; give the artifact",
    ),
    "a file": (lambda p: ["bench", p.saved(b"{}", "file")], "file is no folder; give"),
    "no text": (lambda p: ["bench", "\udcff"], "there is no folder .*; give the artifact"),
    "a long path": (lambda p: ["bench", "a" * 5000], "File name too long"),
    "a byte of the library": (artifact(byte_of(LIBRARY)), f"{LIBRARY} {_CHANGED}"),
    "a byte of the weights": (artifact(byte_of(WEIGHTS)), f"{WEIGHTS} {_CHANGED}"),
    "a byte of the manifest": (artifact(byte_of(MANIFEST)), "manifest.json cannot be read|changed"),
    "no library": (artifact(lambda f: (f / LIBRARY).unlink()), "cannot be read .*copy the whole"),
    "no weights": (artifact(lambda f: (f / WEIGHTS).unlink()), "cannot be read .*copy the whole"),
    "a pipe for weights": (artifact(pipe_for(WEIGHTS)), "no plain file.*copy the whole folder"),
    "half a manifest": (
        artifact(lambda f: os.truncate(f / MANIFEST, 100)),
        "manifest.json cannot be read .*; it is damaged, so tune again or copy the folder again",
    ),
    "an empty manifest": (artifact(lambda f: (f / MANIFEST).write_text("")), "it is damaged"),
    "a manifest of lists": (
        artifact(lambda f: (f / MANIFEST).write_text("[" * 100_000)),
        "manifest.json cannot be read .*it is damaged",
    ),
    "another format": (
        artifact(told(format_version=99)),
        "has format 99; this tunerd reads 1 to 7, so",
    ),
    "no share": (artifact(told(share={})), "what it says of share cannot be.*it is damaged"),
    "a share of 0": (
        artifact(told(share={"pct": 0, "sm_counts": [1], "device": None})),
        "what it says of share cannot be",
    ),
    "a share of no device": (
        artifact(told(share={"pct": 50, "sm_counts": [1]})),
        "what it says of share cannot be",
    ),
    "inputs of no shape": (artifact(told(inputs=[{"name": "x"}])), "what it says of inputs cannot"),
    "another target": (artifact(told(target={"kind": "abacus"})), "what it says of target cannot"),
    "a file outside": (
        artifact(also_named("../../etc/passwd")),
        "names the file '../../etc/passwd'",
    ),
    "a file elsewhere": (
        artifact(also_named("/etc/passwd")),
        "names the file '/etc/passwd', which",
    ),
    "no sha256 of the library": (
        artifact(told(files={WEIGHTS: "0" * 64})),
        f"the manifest of .* has no sha256 of {LIBRARY}; it was changed",
    ),
    "a share of a GPU": (
        artifact(lambda f: None, "--gpu-pct", 40),
        "is compiled for llvm; give its share by --cpu-pct",
    ),
}


@pytest.mark.parametrize("what", ARTIFACTS)
def test_an_artifact_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = ARTIFACTS[what]
    check(Bad(what, make, ExitCode.BAD_INPUT, said), place, capsys)
