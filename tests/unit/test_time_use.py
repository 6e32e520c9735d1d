"""Where the time went: noted while a session works, summed up from the store."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.lib.coordinator_world import build, candidates, task
from tunerd.cluster.actor_bodies import Timed, WorkerReply
from tunerd.coordinator.events import BuildThem, Measure, Propose
from tunerd.records import RunFacts, Store
from tunerd.report.time_section import SHOWN_WORKERS, time_json, time_table
from tunerd.runs.timekeeping import Timekeeper, core_busy_secs
from tunerd.telemetry.time_use import TimeUse, time_use
from tunerd.vocabulary import Activity, Phase, PhaseTime, Proposal, Span, TargetSpec

CONV = task("conv")
FACTS = RunFacts("net", "d" * 64, TargetSpec("llvm", "{}"), "CPU X", "cpu", 50, "0.27.0")


def tuner(activity: Activity, start: float, end: float, **more: object) -> Span:
    return Span("tuner-0", activity, start, end, "tuner", **more)  # type: ignore[arg-type]


def measuring(start: float, end: float, **more: object) -> Span:
    return Span("cpu-0-0", Activity.MEASURE, start, end, "slice", **more)  # type: ignore[arg-type]


SEARCH = PhaseTime(Phase.SEARCH, 100.0, 110.0, 1, ((0, 9.0), (3, 10.2)))
SPANS = [
    tuner(Activity.WAIT, 95.0, 101.0),  # warming up since before the search
    tuner(Activity.SEARCH, 101.0, 103.0, items=16, busy_secs=1.5, cpu_secs=2.5),
    tuner(Activity.BUILD, 103.0, 107.0, items=4, busy_secs=4.0, cpu_secs=7.0),
    measuring(107.0, 109.0, items=4, busy_secs=1.8),
]


def used(spans: list[Span], phases: list[PhaseTime]) -> TimeUse:
    found = time_use(spans, phases)
    assert found is not None
    return found


def test_a_workers_time_is_work_waiting_and_idleness_and_nothing_else() -> None:
    tuner_0, cpu_0 = used(SPANS, [SEARCH]).workers
    assert dict(tuner_0.secs) == pytest.approx(
        {
            Activity.SEARCH: 1.5,
            Activity.BUILD: 4.0,
            Activity.MEASURE: 0.0,
            Activity.WAIT: 1.5,  # a second of warming up, and half of one on the way
            Activity.IDLE: 3.0,
        }
    )
    assert sum(cpu_0.secs.values()) == tuner_0.of_secs == 10.0
    assert (tuner_0.busy, cpu_0.busy) == pytest.approx((0.55, 0.18))
    assert (tuner_0.items[Activity.SEARCH], tuner_0.items[Activity.BUILD]) == (16, 4)
    assert (tuner_0.cpu_secs, cpu_0.cpu_secs) == (9.5, None)


def test_cores_are_busy_by_what_the_kernel_counted_in_the_search() -> None:
    others = PhaseTime(Phase.FINALS, 110.0, 120.0, 1, ((0, 0.0), (3, 0.0)))
    assert used(SPANS, [SEARCH, others]).cores == {0: 0.9, 3: 1.0}


def test_a_timeline_covers_the_whole_search_in_order() -> None:
    timeline = used(SPANS, [SEARCH]).workers[0].timeline
    assert [s.activity for s in timeline] == [
        Activity.WAIT,
        Activity.SEARCH,
        Activity.BUILD,
        Activity.IDLE,
    ]
    assert [s.end for s in timeline] == pytest.approx([0.1, 0.3, 0.7, 1.0], abs=1 / 200)
    assert (timeline[0].start, timeline[-1].end) == (0.0, 1.0)


def test_the_first_trial_is_counted_from_the_start_of_the_last_session() -> None:
    start = PhaseTime(Phase.START, 90.0, 100.0)
    assert used(SPANS, [start, SEARCH]).first_trial_secs == 19.0
    again = [
        PhaseTime(Phase.START, 200.0, 205.0, 2),
        PhaseTime(Phase.SEARCH, 205.0, 215.0, 2),
    ]
    spans = [*SPANS, measuring(206.0, 207.0, session=2, items=1)]
    found = used(spans, [start, SEARCH, *again])
    assert found.first_trial_secs == 7.0
    assert found.phases[Phase.START] == 15.0
    finals = measuring(216.0, 217.0, session=2)  # no trial, and no part of a search's time
    assert used([*SPANS, finals], [start, SEARCH, *again]).first_trial_secs is None


def test_the_pause_between_two_sessions_is_nobodys_time() -> None:
    later = PhaseTime(Phase.SEARCH, 1000.0, 1030.0, 2)
    found = used([*SPANS, measuring(1000.0, 1030.0, session=2)], [SEARCH, later])
    assert (found.sessions, found.search_secs) == (2, 40.0)
    by_name = {w.worker: w for w in found.workers}
    assert by_name["cpu-0-0"].of_secs == 40.0
    assert by_name["cpu-0-0"].timeline[-1].activity is Activity.MEASURE
    # A worker that took no part in a session was not idle in it.
    assert by_name["tuner-0"].of_secs == 10.0


def test_a_session_that_was_killed_counts_by_what_its_workers_did() -> None:
    found = used(SPANS, [])
    assert found.search_secs == 14.0
    assert found.cores == {}


def test_nothing_noted_is_nothing_known() -> None:
    assert time_use([], []) is None


def test_a_timekeeper_notes_workers_work_and_phases_in_the_store(tmp_path: Path) -> None:
    found = candidates(CONV, range(3))
    proposal = WorkerReply(
        "tuner-0", "propose", Proposal(found, False, "", 0.1), "", 1.0, 2.0, 0.9, 1.7
    )
    builds = WorkerReply.of(("tuner-0", "build", 2.0), Timed([], 0.5, 0.4), "")
    lost = WorkerReply("cpu-0-0", "measure", None, "killed", 3.0, 4.0)
    with Store.create_or_open(tmp_path, facts=FACTS) as store:
        keeper = Timekeeper(store, began_at=0.5)
        keeper.enter(Phase.SEARCH)
        keeper.expect(["cpu-0-1"], "slice")
        keeper.note(proposal, "tuner", Propose("tuner-0", CONV, 16, (), ()))
        keeper.note(builds, "tuner", BuildThem("tuner-0", found))
        known = (None,) * len(found)
        keeper.note(lost, "slice", Measure("cpu-0-0", tuple(map(build, found)), 0, known))
        keeper.end()
        keeper.end()
    with Store.read(tmp_path) as store:
        spans, phases = store.spans(), store.phases()
    assert [p.phase for p in phases] == [Phase.START, Phase.SEARCH]
    assert phases[0].start == 0.5
    assert {core for core, _ in phases[1].core_busy_secs} == set(core_busy_secs())
    idle, searching, building, measured = spans
    assert (idle.worker, idle.activity) == ("cpu-0-1", Activity.IDLE)
    assert searching == Span(
        "tuner-0", Activity.SEARCH, 1.0, 2.0, "tuner", 1, 3, CONV.task_id, 0.9, 1.7
    )
    assert (building.items, building.busy_secs, building.cpu_secs) == (3, 0.5, 0.4)
    assert (measured.items, measured.busy_secs) == (3, None)


def test_a_session_that_goes_on_appends_under_its_own_number(tmp_path: Path) -> None:
    for _ in range(2):
        with Store.create_or_open(tmp_path, facts=FACTS) as store:
            keeper = Timekeeper(store, began_at=1.0)
            keeper.expect(["cpu-0-0"], "slice")
            keeper.end()
    with Store.read(tmp_path) as store:
        assert [s.session for s in store.spans()] == [1, 2]
        assert [p.session for p in store.phases()] == [1, 2]


def test_many_spans_are_written_before_the_session_ends(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path, facts=FACTS) as store:
        keeper = Timekeeper(store, began_at=1.0)
        for number in range(250):
            ended = WorkerReply("cpu-0-0", "measure", [], "", 1.0, 1.0 + 1e-3 * number)
            keeper.note(ended, "slice", None)
        assert len(store.spans()) == 200


def test_spans_are_written_a_few_seconds_after_they_ended(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path, facts=FACTS) as store:
        keeper = Timekeeper(store, began_at=1.0)
        for ended_at in (10.0, 11.0):
            keeper.note(WorkerReply("cpu-0-0", "measure", [], "", 9.0, ended_at), "slice", None)
        assert store.spans() == []
        keeper.note(WorkerReply("cpu-0-0", "measure", [], "", 9.0, 12.0), "slice", None)
        assert len(store.spans()) == 3


def test_cores_are_those_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 0 0 0\n"
        "cpu0 100 10 20 5000 700 3 2 50 0 0\n"
        "cpu1 1 1 1 1 1 1 1 1 1 1\n"
        "cpu2 200 0 0 5000 700 0 0 0 0 0\n"
        "intr 1 2 3\n"
    )
    assert core_busy_secs(tmp_path / "stat") == pytest.approx({0: 1.35, 2: 2.0})
    assert core_busy_secs(tmp_path / "missing") == {}


def printed(use: TimeUse, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(time_table(use))
    return " ".join(captured.get().split())


def test_the_terminal_is_told_phases_roles_and_cores() -> None:
    start = PhaseTime(Phase.START, 90.0, 100.0)
    text = printed(used(SPANS, [start, SEARCH]))
    assert "time: start-up 10 s (first trial after 19 s), search 10 s" in text
    assert "tuner-0 55.0% 1.5 s 4 s 0 s 1.5 s 3 s 4" in text
    assert "cpu-0-0 18.0%" in text
    assert "2 cores 95.0% busy in the search, from 90.0% to 100.0%" in text


def test_the_line_of_times_says_what_share_the_finals_had() -> None:
    finals = [PhaseTime(Phase.FINALS, 110.0, 111.0), PhaseTime(Phase.MODEL, 111.0, 114.0)]
    use = used(SPANS, [SEARCH, *finals])
    assert use.finals_share == pytest.approx(4 / 14)
    assert "finalists 1 s, whole model 3 s; finals 28.6% of it of the search" in printed(use)
    assert time_json(use)["finals_share"] == use.finals_share
    longer = used(SPANS, [SEARCH, PhaseTime(Phase.MODEL, 110.0, 120.0)])
    assert "whole model 10 s; finals 50.0% of it, more than their third" in printed(longer)


def test_a_run_that_did_not_come_to_its_finals_says_nothing_of_them() -> None:
    use = used(SPANS, [SEARCH])
    assert use.finals_share is None
    assert "finals" not in printed(use)
    assert time_json(use)["finals_share"] is None


def test_of_many_workers_the_terminal_shows_the_mean_the_busiest_and_the_idlest() -> None:
    count = SHOWN_WORKERS + 1
    spans = [
        dataclasses.replace(measuring(100.0, 101.0 + 0.5 * n), worker=f"cpu-0-{n}")
        for n in range(count)
    ]
    text = printed(used(spans, [SEARCH]))
    assert f"{count} slices, mean 30.0%" in text
    assert f"cpu-0-{count - 1} 50.0%" in text
    assert "cpu-0-0 10.0%" in text
    assert "cpu-0-3" not in text


def test_the_document_has_every_worker_and_core() -> None:
    document = json.loads(json.dumps(time_json(used(SPANS, [SEARCH])), allow_nan=False))
    assert document["busy"] == pytest.approx({"tuner": 0.55, "slice": 0.18})
    assert document["core_busy"] == {"0": 0.9, "3": 1.0}
    assert document["phase_secs"] == {"search": 10.0}
    tuner_0, _ = document["workers"]
    assert tuner_0["candidates"] == {"search": 16, "build": 4, "measure": 0}
    assert sum(tuner_0["secs"].values()) == tuner_0["of_secs"]
