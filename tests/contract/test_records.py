from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lib import DATA, ROOT
from tests.lib.store_places import KINDS, StorePlace, proposed
from tunerd.errors import FolderError
from tunerd.records import RunFacts, Store, sqlite
from tunerd.records.schema import STORE_NAME, VERSION
from tunerd.records.tally import Disturbed
from tunerd.records.trials import MAX_SESSIONS
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Activity,
    Build,
    Candidate,
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Phase,
    PhaseTime,
    Record,
    SliceSpec,
    Span,
    Stage,
    TargetSpec,
    Task,
    TensorSpec,
    TrialState,
)
from tunerd.vocabulary.outcome import Comparison, Finalist, TaskOutcome
from tunerd.vocabulary.verdict import Verdict

LLVM = TargetSpec("llvm", '{"kind":"llvm","mcpu":"znver3"}')
FACTS = RunFacts("net", "d" * 64, LLVM, "CPU X", "cpu", 50, "0.27.0")
TASK = Task("t0", "conv", 3, 1e9, (TensorSpec("a", (1, 2), "float32"),), (0,), LLVM, "{}")
OTHER_TASK = dataclasses.replace(TASK, task_id="t1", name="dense", weight_args=())
WRONG = Failure(Stage.RUN, Kind.WRONG_ANSWER, "off by one")
COLLATERAL = Failure(Stage.RUN, Kind.COLLATERAL, "its GPU died")


def candidate(number: int, task_id: str = "t0", source: str = METASCHEDULE) -> Candidate:
    return Candidate(task_id, f"{number:016x}", source, recipe=f"[[{number}],[]]")


def measurement(*run_secs: float) -> Measurement:
    return Measurement(run_secs, 10, "search-v1", "cpu-0-0", 1, Conditions(1980, 41, 350.5, 1))


def disturbed(secs: float, by: str = "1 process of others: pid 4242") -> Measurement:
    seen = Conditions(1980, 41, 350.5, 1, strangers=1, disturbed_by=by)
    return dataclasses.replace(measurement(secs), conditions=seen)


def ids_of(records: Iterable[Record]) -> list[str]:
    """Return the ids of the trials' candidates."""
    return [r.candidate.candidate_id for r in records]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    """Return the place of a run; in a team's store another run has the same tasks and trials."""
    if request.param == "run folder":
        return StorePlace(folder=str(tmp_path))
    if request.param == "team's file":
        address = f"sqlite:///{tmp_path / 'team.sqlite'}"
    else:
        address = request.getfixturevalue("postgres").new_database()
    place = StorePlace(address=address, identity="ours")
    with place.fresh().open(FACTS, now=0.5) as neighbour:
        fill(neighbour)
    return place


def fill(store: Store) -> None:
    """Give a run some of everything that the tests put into theirs."""
    store.register_tasks([OTHER_TASK, TASK])
    ids = proposed(store, [candidate(i, f"t{i % 2}") for i in range(1, 9)], now=1.0)
    store.start(ids[:5], "cpu-0-0", now=2.0)
    store.finish_all({ids[0]: measurement(1e-9), ids[1]: measurement(1e-9), ids[2]: COLLATERAL})
    store.save_slices([SliceSpec("mps-0-0", "mps", 10)])
    store.save_proof(CapProof("mps-0-0", "another", 1, 2, "mps", True))
    store.add_spans([Span("tuner-9", Activity.IDLE, 0.0, 1.0)])
    store.add_phase(PhaseTime(Phase.SEARCH, 0.0, 1.0))
    store.save_task_outcome(outcome_of(candidate(1), note="of another run"))


def outcome_of(winner: Candidate, note: str = "") -> TaskOutcome:
    return TaskOutcome(
        task_id="t0",
        name="conv",
        weight=3,
        trials=2,
        failed=1,
        default_secs=2.0,
        best_secs=1.0,
        winner=winner,
        comparison=Comparison(Verdict.FASTER, 2.0, 1.0, 2.0, 1.9, 2.1),
        note=note,
        finalists=(
            Finalist(winner.candidate_id, METASCHEDULE, 1.1, measurement(1.0, 1.1)),
            Finalist("f" * 16, DEFAULT_SOURCE, None, WRONG),
        ),
    )


@pytest.fixture
def store(place: StorePlace):
    with place.open(FACTS, now=1.0) as opened:
        opened.register_tasks([TASK, OTHER_TASK])
        yield opened


def test_a_trial_goes_from_its_proposal_to_its_measurement(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)], now=10.0)
    assert store.record(trial).state is TrialState.PROPOSED
    store.built([Build(candidate(1), b"", "ab" * 32, 0.5, TASK.args, (0,), "llvm")])
    store.start([trial], "cpu-0-0", now=11.0)
    running = store.record(trial)
    assert (running.state, running.attempts, running.started_at) == (TrialState.RUNNING, 1, 11.0)
    store.finish(trial, measurement(3e-3, 1e-3, 2e-3), now=12.0)
    ended = store.record(trial)
    assert ended.result == measurement(3e-3, 1e-3, 2e-3)
    assert (ended.run_secs, ended.ended_at) == (2e-3, 12.0)
    assert (ended.build_secs, ended.library_sha256) == (0.5, "ab" * 32)
    assert ended.candidate == candidate(1)


def test_a_known_candidate_gets_no_second_trial(store: Store) -> None:
    ids = proposed(store, [candidate(1), candidate(2), candidate(1)])
    first = store.trial_ids(ids)
    assert len(set(first.values())) == 2
    again = proposed(store, [candidate(3), candidate(2)])
    assert store.trial_ids(again)[again[1]] == first[ids[1]]
    assert sum(store.counts().values()) == 3


def test_a_candidate_of_an_unknown_task_is_refused(store: Store) -> None:
    with pytest.raises(Exception, match=r"(?i)foreign key"):
        store.propose([candidate(1, task_id="nope")])
    assert sum(store.counts().values()) == 0


def test_a_trial_ends_once_and_the_error_tells_its_history(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.start([trial], "cpu-0-0")
    store.finish(trial, WRONG)
    with pytest.raises(ValueError, match="failed in run: wrong-answer") as error:
        store.finish(trial, measurement(1.0))
    assert "started in cpu-0-0, attempt 1" in str(error.value)
    assert store.record(trial).result == WRONG
    with pytest.raises(ValueError, match="cannot start"):
        store.start([trial], "cpu-0-0")


def test_what_was_not_started_is_not_measured_but_may_fail_in_the_build(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    with pytest.raises(ValueError, match="is proposed and cannot be measured"):
        store.finish(trial, measurement(1.0))
    store.finish(trial, Failure(Stage.BUILD, Kind.COMPILE, "no"))
    assert store.counts()[TrialState.FAILED] == 1


def test_a_collateral_trial_goes_back_without_blame(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.start([trial], "mps-0-0")
    store.finish(trial, COLLATERAL)
    back = store.record(trial)
    assert (back.state, back.result, back.slice_id) == (TrialState.PROPOSED, None, None)
    store.start([trial], "mps-0-1")
    store.finish(trial, measurement(1.0))
    assert store.record(trial).attempts == 2
    assert "collateral in run, attempt 1 in mps-0-0" in store.history(trial)


def test_results_are_stored_all_or_none(store: Store) -> None:
    ids = proposed(store, [candidate(1), candidate(2)])
    store.start(ids[:1], "cpu-0-0")
    with pytest.raises(ValueError, match=f"trial {store.trial_ids(ids)[ids[1]]} is proposed"):
        store.finish_all({i: measurement(1.0) for i in ids})
    assert store.counts()[TrialState.RUNNING] == 1


@pytest.mark.parametrize("samples", [(), (float("nan"),), (1.0, float("inf"))])
def test_what_is_no_time_is_no_measurement(store: Store, samples: tuple[float, ...]) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.start([trial], "cpu-0-0")
    with pytest.raises(ValueError, match="is a Failure"):
        store.finish(trial, measurement(*samples))
    assert store.record(trial).state is TrialState.RUNNING


def test_a_build_of_another_candidate_is_refused(store: Store) -> None:
    proposed(store, [candidate(1)])
    build = Build(candidate(9), b"", "ab" * 32, 0.5, TASK.args, (0,), "llvm")
    with pytest.raises(ValueError, match="has no trial of"):
        store.built([build])


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


def test_the_best_trial_is_the_one_of_least_median(store: Store) -> None:
    assert store.best("t0") is None
    origins = [DEFAULT_SOURCE, METASCHEDULE, METASCHEDULE]
    ids = proposed(store, [candidate(i, source=o) for i, o in enumerate(origins)])
    store.start(ids, "cpu-0-0")
    store.finish(ids[0], measurement(2.0))
    store.finish(ids[1], measurement(0.1, 1.5, 9.0))
    store.finish(ids[2], WRONG)
    assert store.best("t0").candidate.candidate_id == ids[1]
    assert store.best("t0", is_default=True).candidate.candidate_id == ids[0]
    assert store.best("t1") is None


def test_records_are_filtered_by_task_and_state_over_many_pages(store: Store) -> None:
    ids = proposed(store, [candidate(i, f"t{i % 2}") for i in range(1200)])
    store.start(ids[:700], "cpu-0-0")
    assert ids_of(store.records()) == ids
    assert len(list(store.records("t1"))) == 600
    assert len(list(store.records("t1", TrialState.RUNNING))) == 350
    assert store.counts("t1")[TrialState.PROPOSED] == 250


def test_tasks_proofs_spans_and_facts_come_back_as_they_were(store: Store) -> None:
    store.register_tasks([OTHER_TASK, TASK])
    assert store.tasks() == [TASK, OTHER_TASK]
    assert store.tasks()[0].mod_json == TASK.mod_json
    proof = CapProof("mps-0-0", "NVIDIA H200", 52, 132, "mps", True, "580", "9.0", 123)
    store.save_slices([SliceSpec("mps-0-0", "mps", 40)] * 2)
    store.save_proof(proof)
    assert store.proofs() == [proof]
    spans = [Span("tuner-0", Activity.SEARCH, 1.0, 2.5), Span("cpu-0-0", Activity.IDLE, 0.0, 1.0)]
    store.add_spans(iter(spans))
    assert store.spans() == spans
    assert store.facts() == FACTS


def test_a_tasks_outcome_comes_back_with_its_winners_trace(store: Store) -> None:
    store.propose([candidate(1), candidate(2)])
    outcome = outcome_of(candidate(2))
    store.save_task_outcome(dataclasses.replace(outcome, note="first"))
    store.save_task_outcome(outcome)
    assert store.task_outcomes() == [outcome]
    assert store.task_outcomes()[0].winner.recipe == candidate(2).recipe
    assert store.outcome() is None


def test_a_reader_sees_one_moment_while_the_writer_goes_on(store: Store, place: StorePlace) -> None:
    store.propose([candidate(1)])
    with place.read() as before:
        assert sum(before.counts().values()) == 1
        store.propose([candidate(2)])
        assert sum(before.counts().values()) == 1
        with place.read() as after:
            assert sum(after.counts().values()) == 2
        with pytest.raises(Exception, match=r"read-?only"):
            before.propose([candidate(3)])


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
from tests.contract.test_records import FACTS, TASK, candidate, measurement
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


def test_disturbed_trials_are_counted_with_what_disturbed_most_of_them(store: Store) -> None:
    assert store.disturbed() == Disturbed()
    results = [measurement(1e-3), disturbed(1e-3), disturbed(1e-3, "hot"), disturbed(1e-3, "hot")]
    ids = proposed(store, [candidate(n) for n in range(5)])
    store.start(ids, "cpu-0-0")
    failed = Failure(Stage.RUN, Kind.TIMEOUT, "10 s")
    store.finish_all(dict(zip(ids, [*results, failed], strict=True)))
    assert store.disturbed() == Disturbed(3, 4, "hot")


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


_secs = st.floats(min_value=1e-9, max_value=1e3)
_small = st.integers(min_value=0, max_value=2**31)
_conditions = st.builds(
    Conditions,
    sm_clock_mhz=st.none() | _small,
    temperature_c=st.none() | _small,
    power_w=st.none() | _secs,
    neighbours=st.none() | _small,
    strangers=st.none() | _small,
    disturbed_by=st.text(max_size=20),
)
_measurements = st.builds(
    Measurement,
    run_secs=st.lists(_secs, min_size=1, max_size=6).map(tuple),
    calls_per_sample=_small,
    profile=st.text(max_size=5),
    slice_id=st.text(max_size=5),
    sm_count=_small,
    conditions=_conditions,
)
_failures = st.builds(
    Failure,
    stage=st.sampled_from(Stage),
    kind=st.sampled_from([k for k in Kind if k.ends_trial]),
    message=st.text(max_size=50),
)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    result=_measurements | _failures,
    trace=st.text(max_size=20),
    at=st.floats(min_value=0, max_value=1e10),
)
def test_every_result_comes_back_as_it_was(
    place: StorePlace, result: Measurement | Failure, trace: str, at: float
) -> None:
    with place.fresh().open(FACTS) as store:
        store.register_tasks([TASK])
        (trial,) = proposed(store, [dataclasses.replace(candidate(1), recipe=trace)], now=at)
        store.start([trial], "cpu-0-0", now=at)
        store.finish(trial, result, now=at)
        record = store.record(trial)
    assert record.result == result
    assert record.candidate.recipe == trace
    assert record.proposed_at == record.started_at == record.ended_at == at


def test_a_message_that_is_no_text_is_stored_all_the_same(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.finish(trial, Failure(Stage.BUILD, Kind.COMPILE, "bad \udcff byte\0"))
    assert store.record(trial).result == Failure(Stage.BUILD, Kind.COMPILE, "bad ? byte\0")


def test_facts_survive_json() -> None:
    facts = dataclasses.replace(FACTS, settings={"trials": 3}, host={"gpus": []})
    assert RunFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_a_character_that_postgresql_lacks_and_its_escape_come_back_as_they_were(
    store: Store,
) -> None:
    said = "\ue000 \0 \ue000\0 \ue0000 \ue000\ue000"
    (trial,) = proposed(store, [candidate(1)])
    store.finish(trial, Failure(Stage.BUILD, Kind.COMPILE, said))
    assert store.record(trial).result == Failure(Stage.BUILD, Kind.COMPILE, said)


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
