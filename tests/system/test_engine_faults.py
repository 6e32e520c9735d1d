"""Faults of the engine's members: what they cost, and whom."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lib.colocation_plans import Script, ScriptedModel, artifact, inputs, plan_of
from tests.lib.engines import TWO, WAIT_SECS, engine_of, result, root, same, script  # noqa: F401  fixtures
from tests.lib.waiting import until
from tunerd.artifacts.loading import load
from tunerd.colocation import Engine, MemberError, RefusedError
from tunerd.colocation.places.processes import ProcessesPlace
from tunerd.colocation.work import Seat
from tunerd.errors import HostError, InputError
from tunerd.vocabulary import Arrays


def test_a_fault_fails_its_request_by_name_and_the_member_serves_again(
    script: Script, root: Path
) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        script.faults["artifact-0"] = ["illegal address"]
        with pytest.raises(MemberError, match="one failed: RuntimeError: illegal address"):
            result(engine.submit("one", inputs()))
        result(engine.submit("one", inputs()))
        result(engine.submit("two", inputs()))
        (fault,) = engine.stats().faults
    assert fault.member == "one"
    assert fault.recovered_secs is not None
    assert script.loads == ["artifact-0", "artifact-1", "artifact-0"]


def test_requests_that_wait_for_a_faulty_member_are_answered_after_it_is_loaded_again(
    script: Script, root: Path
) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        gate, entered = script.hold(artifact(root, 0))
        script.faults["artifact-0"] = ["illegal address"]
        bad = engine.submit("one", inputs())
        assert entered.wait(WAIT_SECS)
        others = [engine.submit(name, inputs()) for name in ("one", "two", "one")]
        gate.set()
        assert isinstance(bad.exception(WAIT_SECS), MemberError)
        assert all(result(other) for other in others)


def test_a_member_that_cannot_be_loaded_again_is_down_and_others_serve(
    script: Script, root: Path
) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        assert engine.stats().down == {}
        script.refuse_loading = {"artifact-0"}
        script.faults["artifact-0"] = ["illegal address"]
        assert isinstance(engine.submit("one", inputs()).exception(WAIT_SECS), MemberError)
        with pytest.raises(RefusedError, match=r"one is down: .*is not to be loaded"):
            result(engine.submit("one", inputs()))
        result(engine.submit("two", inputs()))
        assert engine.stats().down.keys() == {"one"}
        assert "is not to be loaded" in engine.stats().down["one"]


def test_a_member_that_exceeds_its_time_is_evicted_and_others_serve(
    script: Script, root: Path
) -> None:
    names = {"one": {"limit_ms": 1}, "two": {}}
    with engine_of(script, plan_of(root, names)) as engine:
        gate, _ = script.hold(artifact(root, 0))
        endless = engine.submit("one", inputs())
        other = engine.submit("two", inputs())
        with pytest.raises(MemberError, match=r"one exceeded its time of 0\.001 s and was evicted"):
            endless.result(WAIT_SECS)
        result(other)
        gate.set()
        stats = engine.stats()
    assert stats.faults[0].member == "one"


def test_a_start_that_fails_is_a_fault_of_its_seat_and_not_the_end_of_the_engine(
    script: Script, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        start = engine._place.start

        def failing(seat: Seat, *given: object) -> None:
            if seat.member == "one":
                monkeypatch.undo()
                raise OSError("no such device")
            start(seat, *given)  # type: ignore[arg-type]

        monkeypatch.setattr(engine._place, "start", failing)
        result(engine.submit("two", inputs()))
        with pytest.raises(MemberError, match="one failed: OSError: no such device"):
            engine.submit("one", inputs()).result(WAIT_SECS)
        result(engine.submit("one", inputs()))
        assert [fault.member for fault in engine.stats().faults] == ["one"]


def test_a_model_that_ends_its_thread_is_a_fault_and_the_member_serves_again(
    script: Script, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        call = ScriptedModel.__call__

        def ends(*_: object) -> Arrays:
            monkeypatch.setattr(ScriptedModel, "__call__", call)
            raise SystemExit(3)

        monkeypatch.setattr(ScriptedModel, "__call__", ends)
        with pytest.raises(MemberError, match="SystemExit: 3"):
            engine.submit("one", inputs()).result(WAIT_SECS)
        result(engine.submit("one", inputs()))


def test_what_ends_a_loader_counts_as_a_member_that_cannot_be_loaded(
    script: Script, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:

        def ends(*_: object) -> None:
            raise SystemExit(3)

        script.faults["artifact-0"] = ["illegal address"]
        monkeypatch.setattr(engine._place, "reload", ends)
        with pytest.raises(MemberError, match="illegal address"):
            engine.submit("one", inputs()).result(WAIT_SECS)
        with pytest.raises(RefusedError, match="one is down"):
            engine.submit("one", inputs()).result(WAIT_SECS)
        result(engine.submit("two", inputs()))


def test_a_bug_that_a_sender_meets_ends_the_engine_and_leaves_nobody_waiting(
    script: Script, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(script, plan_of(root, TWO)).start()
    assert engine._scheduler is not None

    def fails(*_: object) -> list[object]:
        raise KeyError("a bug")

    monkeypatch.setattr(engine._scheduler, "turn", fails)
    time.sleep(0.1)  # the engine's thread sleeps
    with pytest.raises(RefusedError, match="a bug"):
        result(engine.submit("one", inputs()))
    with pytest.raises(RefusedError, match="takes no requests any more"):
        engine.submit("two", inputs())
    engine.close()


def test_members_of_one_process_are_not_to_be_killed(script: Script, root: Path) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        with pytest.raises(HostError, match="the place in-process has no process of one"):
            engine.kill("one")
        with pytest.raises(InputError, match="no member 'three'"):
            engine.kill("three")
        result(engine.submit("one", inputs()))


def test_loading_that_fails_leaves_no_thread_behind(script: Script, root: Path) -> None:
    script.refuse_loading.add("artifact-1")
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="not to be loaded"):
        engine_of(script, plan_of(root, TWO)).start()
    until(lambda: threading.active_count() <= before)


def test_a_process_that_dies_between_segments_costs_one_retry(root: Path) -> None:
    policy = {"kind": "regulated", "segment_us": 0.001}
    place = ProcessesPlace()
    with Engine(plan_of(root, TWO, policy=policy), place=place) as engine:
        engine.submit("one", inputs()).result(WAIT_SECS)
        seat = Seat("one", "whole-0")
        scheduler = engine._scheduler
        assert scheduler is not None
        resume = place.start

        def dying(of: Seat, segment: int, *given: Any) -> None:
            if of == seat and segment:
                place.start = resume  # type: ignore[method-assign]
                os.kill(place._seats[seat].pid, signal.SIGKILL)
            resume(of, segment, *given)

        place.start = dying  # type: ignore[method-assign]
        answers = []
        for seed in range(20):  # until one was paused
            long = engine.submit("one", inputs(seed))
            engine.submit("two", inputs(), deadline_secs=WAIT_SECS).result(WAIT_SECS)
            answers.append((seed, result(long)))
            if place.start == resume:
                break
        expected = load(artifact(root, 0))
        assert all(same(answer, expected(inputs(seed))) for seed, answer in answers)


def test_a_process_that_is_killed_costs_retries_and_no_answer(root: Path) -> None:
    place = ProcessesPlace()
    with Engine(plan_of(root, TWO, kind="streams", place="processes"), place=place) as engine:
        before = result(engine.submit("one", inputs()))
        os.kill(place._seats[Seat("one", "stream-0")].pid, signal.SIGKILL)
        futures = [engine.submit(name, inputs()) for name in ("one", "two", "one")]
        assert same(result(futures[0]), before)
        assert all(result(future) for future in futures)
        (fault,) = engine.stats().faults
        resident = engine.memory_bytes()
    assert fault.member == ""
    assert 1 <= fault.retried <= 2  # those of "one" that its process had
    assert fault.recovered_secs is not None
    assert resident.keys() == {"one", "two"}
