"""What sessions of a run leave to each other: killed ones, full disks, and runs that go on."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lib import ROOT
from tests.lib.record_samples import FACTS, TASK, candidate, ids_of, measurement, place, store  # noqa: F401  fixtures
from tests.lib.store_places import StorePlace, proposed
from tunerd.errors import FolderError
from tunerd.records import Store, sqlite
from tunerd.records.schema import STORE_NAME
from tunerd.records.trials import MAX_SESSIONS
from tunerd.vocabulary import Failure, Kind, Stage, TrialState


def test_a_session_after_a_kill_gets_back_what_did_not_end(place: StorePlace) -> None:
    with place.open(FACTS) as store:
        store.register_tasks([TASK])
        ids = proposed(store, [candidate(i) for i in range(4)])
        store.start(ids[:3], "cpu-0-0")
        store.finish(ids[0], measurement(1.0))
    with place.open(FACTS) as store:
        unfinished = store.requeue_unfinished()
        assert ids_of(unfinished) == ids[1:]
        assert {r.state for r in unfinished} == {TrialState.PROPOSED}
        assert [r.attempts for r in unfinished] == [1, 1, 0]
        assert "interrupted in run" in store.history(ids[1])
        assert len(store.sessions()) == 2


def test_a_trial_whose_sessions_end_while_it_runs_by_itself_is_taken_for_the_cause(
    store: Store,
) -> None:
    deadly, other = proposed(store, [candidate(1), candidate(2)])
    for _ in range(MAX_SESSIONS - 1):
        store.start([deadly], "cpu-0-0")
        store.requeue_unfinished()
    store.start([deadly, other], "cpu-0-0")  # it may have been the other one
    assert ids_of(store.requeue_unfinished()) == [deadly, other]
    store.start([other], "cpu-0-0")
    store.finish(other, measurement(1.0))
    store.start([deadly], "cpu-0-0")
    store.interrupt()  # a session that ends in order was not ended by it
    assert ids_of(store.requeue_unfinished()) == [deadly]
    store.start([deadly], "cpu-0-0")
    assert store.requeue_unfinished() == []
    result = store.record(deadly).result
    assert isinstance(result, Failure)
    assert (result.stage, result.kind) == (Stage.RUN, Kind.CRASH)
    assert "3 sessions ended while it was running, and nothing else" in result.message


def test_a_trial_that_ran_when_its_session_was_killed_is_lost_in_the_next(
    place: StorePlace,
) -> None:
    with place.open(FACTS) as store:
        store.register_tasks([TASK])
        ids = proposed(store, [candidate(0), candidate(1)])
        store.start(ids[:1], "cpu-0-0")
    with place.open(FACTS) as store:
        assert ids_of(store.requeue_unfinished()) == ids
        assert store.lost() == set(ids[:1])


def test_open_trials_that_were_lost_with_a_slice_are_known(store: Store) -> None:
    lost = Failure(Stage.RUN, Kind.COLLATERAL, "a fault in a neighbour")
    ids = proposed(store, [candidate(i) for i in range(5)])
    store.start(ids[:4], "cpu-0-0")
    store.finish_all({ids[0]: lost, ids[1]: lost, ids[2]: measurement(1.0)})
    store.start([ids[1]], "cpu-0-0")
    store.finish(ids[1], measurement(1.0))
    store.finish(ids[4], Failure(Stage.BUILD, Kind.COLLATERAL, "its tuner was lost"))
    store.requeue_unfinished()  # ids[3] was running when its session ended
    assert store.lost() == {candidate(0).candidate_id, candidate(3).candidate_id}


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path, facts=FACTS) as store:
        store.register_tasks([TASK])
        store.propose([candidate(1)])
        store._connection.exec_driver_sql("PRAGMA max_page_count = 40")
        store._connection.commit()
        with pytest.raises(FolderError, match=r"disk is full; make room"):
            store.propose([candidate(i) for i in range(5000)])
        assert sum(store.counts().values()) == 1


_WRITER = """
import sys
import json
from tests.lib.store_places import StorePlace, proposed
from tests.lib.record_samples import FACTS, TASK, candidate, measurement
store = StorePlace(**json.loads(sys.argv[1])).open(FACTS)
store.register_tasks([TASK])
for number in range(int(sys.argv[2]), 10**9):
    (trial,) = proposed(store, [candidate(number)])
    store.start([trial], "cpu-0-0")
    store.finish(trial, measurement(1e-3 * (1 + number)))
    print(trial, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(place: StorePlace) -> None:
    acknowledged = 0
    for start in (0, 100_000, 200_000):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(place), str(start)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        for _ in range(60):
            assert writer.stdout.readline().strip()
        with place.read() as alive:  # a reader beside the running writer
            assert alive.counts()[TrialState.MEASURED] >= acknowledged + 60
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += 60 + len(writer.stdout.read().split())
        writer.stdout.close()
        writer.wait()
        if place.folder:
            with contextlib.closing(sqlite3.connect(Path(place.folder) / STORE_NAME)) as raw:
                assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with place.open(FACTS) as store:
            store.requeue_unfinished()
            counts = store.counts()
            # The last trial may have been stored before its number was printed.
            assert acknowledged <= counts[TrialState.MEASURED] <= acknowledged + 1
            assert counts[TrialState.RUNNING] == 0
            acknowledged = counts[TrialState.MEASURED]
            records = list(store.records(state=TrialState.MEASURED))
            assert len({r.candidate.candidate_id for r in records}) == acknowledged


def test_a_run_that_comes_again_finds_what_it_had(place: StorePlace) -> None:
    with place.open(FACTS) as store:
        store.register_tasks([TASK])
        identity = store.identity
        before = store.trial_ids(proposed(store, [candidate(1)]))
    with place.open(FACTS) as again:
        assert (again.identity, again.session) == (identity, 2)
        assert again.trial_ids(proposed(again, [candidate(1)])) == before
    with place.read() as read:
        assert read.identity == identity
        assert [t.task_id for t in read.tasks()] == ["t0"]
        assert read.spans() == read.phases() == read.proofs() == read.task_outcomes() == []


def test_another_model_may_not_go_on_with_a_run(place: StorePlace) -> None:
    place.open(FACTS).close()
    with pytest.raises(FolderError, match="holds a run of model 'net'"):
        place.open(dataclasses.replace(FACTS, model_digest="e" * 64))


def test_those_who_create_a_store_at_the_same_moment_wait_for_each_other(tmp_path: Path) -> None:
    for number in range(40):  # one round in twenty failed where nobody tried again
        path = tmp_path / str(number) / STORE_NAME
        path.parent.mkdir()
        ready = threading.Barrier(8)

        def create(path: Path = path, ready: threading.Barrier = ready) -> None:
            ready.wait()
            sqlite.open_writer(path).close()

        with ThreadPoolExecutor(8) as pool:
            for created in [pool.submit(create) for _ in range(8)]:
                created.result()
