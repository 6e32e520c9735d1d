"""Files of an older or a newer tunerd, and files that hold no store."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tests.lib import DATA
from tests.lib.record_samples import FACTS, disturbed, ids_of
from tunerd.errors import FolderError
from tunerd.records import Store
from tunerd.records.schema import STORE_NAME, VERSION
from tunerd.records.tally import Disturbed
from tunerd.vocabulary import Activity, Conditions, Measurement, Phase, PhaseTime, Span, TrialState


def test_a_store_of_a_newer_tunerd_is_refused(tmp_path: Path) -> None:
    Store.create_or_open(tmp_path, facts=FACTS).close()
    with contextlib.closing(sqlite3.connect(tmp_path / STORE_NAME)) as raw:
        raw.execute("UPDATE schema_version SET version = ?", (VERSION + 1,))
        raw.commit()
    for open_ in (Store.read, lambda folder: Store.create_or_open(folder, facts=FACTS)):
        with pytest.raises(FolderError, match=f"schema version {VERSION + 1}.*version {VERSION}"):
            open_(tmp_path)


OLD_STORES = sorted(DATA.glob("store-v*.sql"))


def old_store(file: Path, folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / STORE_NAME)) as raw:
        raw.executescript(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", OLD_STORES, ids=lambda f: f.stem)
def test_an_old_store_is_read_and_left_as_it_is(tmp_path: Path, file: Path) -> None:
    old_store(file, tmp_path)
    before = (tmp_path / STORE_NAME).read_bytes()
    with Store.read(tmp_path) as read:
        assert [r.state for r in read.records()] == [
            TrialState.MEASURED,
            TrialState.FAILED,
            TrialState.PROPOSED,
        ]
        assert read.spans() == OLD_SPANS
        assert read.phases() == []
        assert read.tally(since=0.0).disturbed == read.disturbed() == Disturbed(0, 1)
        measured = next(read.records()).result
        assert isinstance(measured, Measurement)
        assert measured.conditions == Conditions(1980, 41, 350.5, 1)
    assert (tmp_path / STORE_NAME).read_bytes() == before


@pytest.mark.parametrize("file", OLD_STORES, ids=lambda f: f.stem)
def test_an_old_store_is_brought_up_to_date_by_whoever_goes_on_with_it(
    tmp_path: Path, file: Path
) -> None:
    old_store(file, tmp_path)
    span = Span("tuner-0", Activity.BUILD, 301.0, 302.0, "tuner", 3, 4, "t0", 0.9, 1.5)
    phase = PhaseTime(Phase.SEARCH, 300.0, 310.0, 3, ((0, 9.5), (1, 2.5)))
    with Store.create_or_open(tmp_path, facts=FACTS, now=300.0) as again:
        assert again.session == 3
        assert again.spans() == OLD_SPANS
        (waiting,) = ids_of(again.records(state=TrialState.PROPOSED))
        again.start([waiting], "cpu-0-0")
        again.finish(waiting, disturbed(1e-3))
        again.add_spans([span])
        again.add_phase(phase)
    with contextlib.closing(sqlite3.connect(tmp_path / STORE_NAME)) as raw:
        assert raw.execute("SELECT version FROM schema_version").fetchall() == [(VERSION,)]
    with Store.read(tmp_path) as read:
        assert read.spans() == [*OLD_SPANS, span]
        assert read.phases() == [phase]
        assert [r.result == disturbed(1e-3) for r in read.records()] == [False, False, True]
        assert read.disturbed() == Disturbed(1, 2, "1 process of others: pid 4242")


OLD_SPANS = [
    Span("tuner-0", Activity.SEARCH, 100.5, 101.0, "tuner", 1),
    Span("cpu-0-0", Activity.MEASURE, 102.0, 103.0, "slice", 1),
    Span("tuner-0", Activity.BUILD, 201.0, 202.5, "tuner", 2),
]


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="not a run folder"):
        Store.read(tmp_path)
    (tmp_path / STORE_NAME).write_bytes(b"not a database" * 100)
    for open_ in (Store.read, lambda folder: Store.create_or_open(folder, facts=FACTS)):
        with pytest.raises(FolderError, match="cannot be opened as a store"):
            open_(tmp_path)
    (tmp_path / STORE_NAME).unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / STORE_NAME)) as raw:
        raw.execute("CREATE TABLE theirs (x)")
    with pytest.raises(FolderError, match="no store of tunerd"):
        Store.create_or_open(tmp_path, facts=FACTS)


def test_a_store_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="cannot be opened"):
        Store.create_or_open(tmp_path / "nowhere", facts=FACTS)
