"""The engine: requests in, answers out, and what faults do and do not do."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.colocation_plans import CORES, Script, ScriptedModel, artifact, inputs, plan_of
from tests.lib.fake_gpu import FakeContexts, fake_cuda_place
from tests.lib.waiting import until
from tunerd.artifacts.loading import LoadError, load
from tunerd.colocation import Engine, MemberError, RefusedError
from tunerd.colocation.places.in_process import InProcessPlace
from tunerd.colocation.places.processes import ProcessesPlace
from tunerd.colocation.plan import Plan
from tunerd.colocation.policies import POLICIES
from tunerd.colocation.work import Seat
from tunerd.errors import HostError, InputError
from tunerd.system import cores
from tunerd.vocabulary import Arrays

WAIT_SECS = 60
TWO: dict[str, dict[str, object]] = {"one": {}, "two": {}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    for gate in script.gates.values():  # nobody waits after the test
        gate.set()


def engine_of(script: Script, plan: Plan) -> Engine:
    return Engine(plan, place=InProcessPlace(script.open_model))


def result(future: Future[Arrays]) -> Arrays:
    return future.result(WAIT_SECS)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


# --- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in POLICIES if kind not in ("space", "ordered")])
def test_every_policy_gives_each_caller_the_answer_of_its_own_model(kind: str, root: Path) -> None:
    names = {f"m{i}": {"tenants": ["a", "b"]} for i in range(4)}
    expected = {
        (name, seed): load(artifact(root, number))(inputs(seed))
        for number, name in enumerate(names)
        for seed in range(3)
    }
    with Engine(plan_of(root, names, kind=kind)) as engine:
        asked = {
            (name, tenant, seed): engine.submit(name, inputs(seed), tenant=tenant)
            for _ in range(3)
            for name, tenant, seed in itertools.product(names, ("a", "b"), range(3))
        }
        answers = {key: result(future) for key, future in asked.items()}
    for (name, _, seed), answer in answers.items():
        assert [key for key, known in expected.items() if same(known, answer)] == [(name, seed)]


def test_an_answer_can_be_awaited_and_inputs_may_be_in_order(root: Path) -> None:
    async def ask(engine: Engine) -> list[Arrays]:
        given = list(inputs().values())
        return await asyncio.gather(engine.asubmit("one", given), engine.asubmit("two", given))

    with Engine(plan_of(root, TWO)) as engine:
        one, two = asyncio.run(ask(engine))
    assert same(one, load(artifact(root, 0))(inputs()))
    assert same(two, load(artifact(root, 1))(inputs()))


@pytest.mark.parametrize("kind", POLICIES)
def test_on_streams_each_caller_has_the_answer_of_its_own_model(
    kind: str, script: Script, root: Path
) -> None:
    names: dict[str, dict[str, object]] = {f"m{i}": {} for i in range(3)}
    expected = {
        (name, seed): load(artifact(root, number))(inputs(seed))
        for number, name in enumerate(names)
        for seed in range(3)
    }

    async def ask(engine: Engine) -> list[Arrays]:
        return await asyncio.gather(
            *(engine.asubmit(name, inputs(seed)) for _ in range(5) for name, seed in expected)
        )

    place = fake_cuda_place(script, make_contexts=FakeContexts)
    with Engine(plan_of(root, names, kind=kind), place=place) as engine:
        asked = [(k, engine.submit(k[0], inputs(k[1]))) for _ in range(5) for k in expected]
        awaited = asyncio.run(ask(engine))
        answers = [(key, result(future)) for key, future in asked]
    answers += zip([key for _ in range(5) for key in expected], awaited, strict=True)
    for key, answer in answers:
        assert [k for k, known in expected.items() if same(known, answer)] == [key]


def test_a_request_that_is_not_awaited_any_more_is_dropped(script: Script, root: Path) -> None:
    async def ask(engine: Engine) -> None:
        gate, entered = script.hold(artifact(root, 0))
        running = asyncio.create_task(engine.asubmit("one", inputs()))
        await asyncio.to_thread(entered.wait, WAIT_SECS)
        waiting = asyncio.create_task(engine.asubmit("two", inputs()))
        await asyncio.sleep(0)
        waiting.cancel()
        gate.set()
        assert await running
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with engine_of(script, plan_of(root, TWO)) as engine:
        before = script.calls.count("artifact-1")
        asyncio.run(ask(engine))
        assert engine.drain(WAIT_SECS)
        assert script.calls.count("artifact-1") == before
        assert engine.stats().members["two"].cancelled == 1


def test_who_gives_up_between_segments_leaves_a_member_that_serves_on(
    script: Script, root: Path
) -> None:
    async def ask(engine: Engine) -> Arrays:
        gate, entered = script.hold(artifact(root, 0))
        long = asyncio.create_task(engine.asubmit("one", inputs()))
        await asyncio.to_thread(entered.wait, WAIT_SECS)
        short = asyncio.create_task(engine.asubmit("two", inputs(), deadline_secs=WAIT_SECS))
        while not any(r.is_pausing for r in engine._scheduler.running):  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        long.cancel()
        gate.set()
        await short
        return await engine.asubmit("one", inputs(1))

    policy = {"kind": "regulated", "segment_us": 0.001}
    with engine_of(script, plan_of(root, TWO, policy=policy)) as engine:
        answer = asyncio.run(asyncio.wait_for(ask(engine), WAIT_SECS))
        assert same(answer, load(artifact(root, 0))(inputs(1)))
        assert not engine.stats().faults


def test_statistics_count_each_answer(script: Script, root: Path) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        for _ in range(3):
            result(engine.submit("one", inputs()))
        script.faults["artifact-1"] = ["division by zero"]
        assert isinstance(engine.submit("two", inputs()).exception(WAIT_SECS), MemberError)
        stats = engine.stats()
    assert (stats.members["one"].completed, stats.members["two"].failed) == (3, 1)
    assert stats.members["one"].mean_secs is not None
    assert stats.members["one"].planned_bytes > 0
    assert [proof.mechanism for proof in stats.proofs] == ["affinity"]


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tenant", "given", "said"),
    [
        ("three", None, inputs(), "there is no member 'three'; there are one, two"),
        ("one", "bob", inputs(), "one has no tenant 'bob'; it has default"),
        ("one", None, {"x": inputs()["x"]}, "takes the inputs x, offset and got x"),
        ("one", None, [inputs()["x"]], "takes 2 arrays and got 1"),
        ("one", None, inputs() | {"offset": np.zeros(3, "float32")}, "it takes float32"),
    ],
)
def test_what_a_member_cannot_take_is_said_to_the_caller_at_once(
    name: str, tenant: str | None, given: object, said: str, root: Path
) -> None:
    with (
        Engine(plan_of(root, TWO)) as engine,
        pytest.raises((InputError, TypeError, ValueError), match=said.replace("[", r"\[")),
    ):
        engine.submit(name, given, tenant=tenant)


def test_a_deadline_that_cannot_be_met_is_refused_with_the_reason(
    script: Script, root: Path
) -> None:
    plan = plan_of(root, TWO, kind="regulated")
    with engine_of(script, plan) as engine:
        gate, entered = script.hold(artifact(root, 0))
        running = engine.submit("one", inputs())
        assert entered.wait(WAIT_SECS)
        hopeless = engine.submit("two", inputs(), deadline_secs=1e-9)
        with pytest.raises(RefusedError, match="after its deadline"):
            hopeless.result(WAIT_SECS)
        gate.set()
        result(running)
        assert engine.stats().members["two"].refused == 1


def test_a_deadline_that_passes_while_a_request_waits_is_told_at_once(
    script: Script, root: Path
) -> None:
    with engine_of(script, plan_of(root, TWO, kind="regulated")) as engine:
        gate, entered = script.hold(artifact(root, 0))
        running = engine.submit("one", inputs())
        assert entered.wait(WAIT_SECS)
        waiting = engine.submit("two", inputs(), deadline_secs=0.5)
        with pytest.raises(RefusedError, match="it waited") as refused:
            waiting.result(WAIT_SECS)
        assert refused.value.was_admitted
        assert not running.done()
        gate.set()
        result(running)


def test_the_slo_is_the_deadline_of_a_request_that_names_none(root: Path) -> None:
    names = {"one": {"slo_ms": 1e-6}, "two": {}}
    with Engine(plan_of(root, names, kind="regulated")) as engine:
        assert isinstance(engine.submit("one", inputs()).exception(WAIT_SECS), RefusedError)
        result(engine.submit("one", inputs(), deadline_secs=60))


def test_a_changed_artifact_is_not_loaded(root: Path) -> None:
    plan = plan_of(root, {"one": {"sha256": "0" * 64}})
    with pytest.raises(LoadError, match=r"one: the sha256 of .* the plan says 000000000000"):
        Engine(plan).start()


def test_a_member_that_does_not_fit_is_refused_before_any_is_loaded(
    script: Script, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(script, plan_of(root, TWO))
    needed = InProcessPlace().needed_bytes(engine.plan.members[0], 1, cut=None)
    monkeypatch.setattr(cores, "memory_bytes", lambda: int(1.6 * needed))
    closed: list[str] = []
    monkeypatch.setattr(engine._place, "close", lambda: closed.append("the device is given back"))
    with pytest.raises(HostError, match=r"two does not fit: it needs [\d.]+ MiB, .* may be used"):
        engine.start()
    assert script.loads == []
    assert closed


def test_an_artifact_for_another_device_is_refused(root: Path) -> None:
    plan = plan_of(root, TWO).model_copy(update={"device": "cuda"})
    with pytest.raises(LoadError, match=r"one: .* is for CPUs, and the plan's device is cuda"):
        Engine(plan, place=InProcessPlace()).start()


def test_a_place_that_is_not_there_yet_is_said(root: Path) -> None:
    plan = plan_of(root, TWO, place="processes").model_copy(update={"device": "cuda"})
    with pytest.raises(HostError, match="there is no place processes on cuda yet"):
        Engine(plan)


# --- faults ------------------------------------------------------------------------------------


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
        script.refuse_loading = {"artifact-0"}
        script.faults["artifact-0"] = ["illegal address"]
        assert isinstance(engine.submit("one", inputs()).exception(WAIT_SECS), MemberError)
        with pytest.raises(RefusedError, match=r"one is down: .*is not to be loaded"):
            result(engine.submit("one", inputs()))
        result(engine.submit("two", inputs()))


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


def test_a_process_that_is_killed_costs_one_retry_and_no_answer(root: Path) -> None:
    place = ProcessesPlace()
    with Engine(plan_of(root, TWO, kind="streams", place="processes"), place=place) as engine:
        before = result(engine.submit("one", inputs()))
        os.kill(place._seats[Seat("one", "stream-0")].pid, signal.SIGKILL)
        futures = [engine.submit(name, inputs()) for name in ("one", "two", "one")]
        assert same(result(futures[0]), before)
        assert all(result(future) for future in futures)
        (fault,) = engine.stats().faults
        resident = engine.memory_bytes()
    assert (fault.member, fault.retried) == ("", 1)
    assert fault.recovered_secs is not None
    assert resident.keys() == {"one", "two"}


def test_a_long_member_in_segments_lets_an_urgent_one_in_and_both_have_their_answers(
    script: Script, root: Path
) -> None:
    plan = plan_of(root, TWO, policy={"kind": "regulated", "segment_us": 0.001})
    with engine_of(script, plan) as engine:
        gate, entered = script.hold(artifact(root, 0))
        long = engine.submit("one", inputs(1))
        assert entered.wait(WAIT_SECS)
        ended: list[str] = []
        short = engine.submit("two", inputs(2), deadline_secs=WAIT_SECS)
        long.add_done_callback(lambda _: ended.append("long"))
        short.add_done_callback(lambda _: ended.append("short"))
        until(lambda: any(r.is_pausing for r in engine._scheduler.running))  # type: ignore[union-attr]
        gate.set()
        answers = result(long), result(short)
    assert ended == ["short", "long"]
    assert same(answers[0], load(artifact(root, 0))(inputs(1)))
    assert same(answers[1], load(artifact(root, 1))(inputs(2)))


REGULATION = {"stops": {"one": [1, 3], "two": [2]}, "apart": ["one:0 two:1", "one:2 two:0"]}


@pytest.mark.parametrize("place", ["in-process", "processes"])
def test_a_regulation_is_carried_out_and_all_have_the_answers_of_their_own(
    place: str, root: Path
) -> None:
    plan = plan_of(root, TWO, place=place, policy={"kind": "regulated"} | REGULATION)
    expected = {
        (name, seed): load(artifact(root, number))(inputs(seed))
        for number, name in enumerate(TWO)
        for seed in range(3)
    }
    with Engine(plan) as engine:
        asked = [(key, engine.submit(key[0], inputs(key[1]))) for _ in range(5) for key in expected]
        assert all(same(result(future), expected[key]) for key, future in asked)
        assert [lane.home for lane in engine.stats().lanes] == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("stops", "said"),
    [({"one": [99], "two": []}, "find its regulation again"), ({"one": [1]}, "name each")],
)
def test_a_regulation_of_other_artifacts_is_refused(
    stops: dict[str, list[int]], said: str, root: Path
) -> None:
    plan = plan_of(root, TWO, policy={"kind": "regulated", "stops": stops})
    with pytest.raises((InputError, LoadError), match=said):
        Engine(plan).start()


# --- other shares ------------------------------------------------------------------------------


SHARED: dict[str, dict[str, object]] = {
    "one": {"share": 50, "shares": [20]},
    "two": {"share": 50, "shares": [70]},
}


@pytest.mark.parametrize("kind", ["space", "ordered"])
def test_shares_change_while_it_serves_and_no_request_is_lost(
    kind: str, script: Script, root: Path
) -> None:
    expected = {
        (name, seed): load(artifact(root, number))(inputs(seed))
        for number, name in enumerate(SHARED)
        for seed in range(3)
    }
    place = fake_cuda_place(script, make_contexts=FakeContexts)
    answers: list[tuple[tuple[str, int], Arrays]] = []
    is_over = threading.Event()

    def client(key: tuple[str, int]) -> None:
        while not is_over.is_set():
            answers.append((key, result(engine.submit(key[0], inputs(key[1])))))

    with Engine(plan_of(root, SHARED, kind=kind), place=place) as engine:
        assert [lane.pct for lane in engine.stats().lanes] == [50, 50]
        clients = [threading.Thread(target=client, args=(key,)) for key in expected]
        for each in clients:
            each.start()
        for turn in range(20):
            changed = {"one": 20} if turn % 2 else {"one": 50, "two": 50}
            assert engine.reshare(changed, timeout_secs=WAIT_SECS) >= 0
        assert [lane.pct for lane in engine.stats().lanes] == [20, 70]
        is_over.set()
        for each in clients:
            each.join()
        units = {proof.lane: proof.units for proof in engine.stats().proofs}
    assert units == {"one": 66, "two": 66, "one/1": 26, "two/1": 92}
    assert len(answers) >= len(expected)
    for key, answer in answers:
        assert [k for k, known in expected.items() if same(known, answer)] == [key]


def test_shares_on_cores_change_to_those_of_the_plan_and_no_others(root: Path) -> None:
    if len(CORES) < 2:
        pytest.skip("two members are to have a core each")
    names: dict[str, dict[str, object]] = {
        "one": {"share": 50, "shares": [50]},
        "two": {"share": 50, "shares": [50]},
    }
    with Engine(plan_of(root, names, kind="ordered")) as engine:
        with pytest.raises(InputError, match="it names one 50%, two 50%; one 50%, two 50%"):
            engine.reshare({"one": 30})
        with pytest.raises(InputError, match="no member 'three'"):
            engine.reshare({"three": 30})
        engine.reshare({"one": 50}, timeout_secs=WAIT_SECS)
        result(engine.submit("one", inputs()))
    with pytest.raises(RefusedError, match="does not run"):
        engine.reshare({"one": 50})


def test_who_waits_for_other_shares_is_told_that_the_engine_was_closed(
    script: Script, root: Path
) -> None:
    place = fake_cuda_place(script, make_contexts=FakeContexts)
    engine = Engine(plan_of(root, SHARED, kind="space"), place=place).start()
    gate, entered = script.hold(artifact(root, 0))
    running = engine.submit("one", inputs())
    assert entered.wait(WAIT_SECS)
    with pytest.raises(TimeoutError):
        engine.reshare({"one": 20}, timeout_secs=0.001)
    waiter = ThreadPoolExecutor(1).submit(engine.reshare, {"one": 20})
    threading.Timer(0.5, gate.set).start()
    engine.close()
    assert isinstance(running.exception(WAIT_SECS), RefusedError)
    assert isinstance(waiter.exception(WAIT_SECS), RefusedError)


def test_a_policy_without_shares_has_none_to_change(script: Script, root: Path) -> None:
    with pytest.raises(InputError, match="the policy time has no shares that `shares` could"):
        engine_of(script, plan_of(root, SHARED)).start()


# --- the end -----------------------------------------------------------------------------------


def test_a_drain_answers_what_was_taken_and_takes_no_more(script: Script, root: Path) -> None:
    engine = engine_of(script, plan_of(root, TWO)).start()
    gate, entered = script.hold(artifact(root, 0))
    futures = [engine.submit("one", inputs()) for _ in range(3)]
    assert entered.wait(WAIT_SECS)
    assert not engine.drain(0)
    with pytest.raises(RefusedError, match="takes no requests"):
        engine.submit("one", inputs())
    gate.set()
    assert engine.drain(WAIT_SECS)
    assert all(future.done() for future in futures)
    engine.close()
    engine.close()


def test_what_waits_is_refused_where_the_engine_is_closed_at_once(
    script: Script, root: Path
) -> None:
    engine = engine_of(script, plan_of(root, TWO)).start()
    gate, entered = script.hold(artifact(root, 0))
    futures = [engine.submit("one", inputs()) for _ in range(2)]
    assert entered.wait(WAIT_SECS)
    threading.Timer(0.1, gate.set).start()
    engine.close()
    assert isinstance(futures[1].exception(WAIT_SECS), RefusedError)


def test_a_callback_can_neither_close_the_engine_nor_end_it(
    script: Script, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    with engine_of(script, plan_of(root, TWO)) as engine:

        def closing(_: Future[Arrays]) -> None:
            for call in (engine.close, engine.drain):
                try:
                    call()
                except RuntimeError as error:
                    said.append(str(error))
            raise SystemExit

        gate, entered = script.hold(artifact(root, 0))
        future = engine.submit("one", inputs())
        behind = engine.submit("two", inputs())
        assert entered.wait(WAIT_SECS)
        future.add_done_callback(closing)
        gate.set()
        result(behind)
        result(engine.submit("one", inputs()))
    assert len(said) == 2
    assert all("do that in another thread" in each for each in said)
    assert "a callback of a future has failed" in caplog.text


def test_an_engine_is_closed_by_many_at_once_and_started_once(script: Script, root: Path) -> None:
    engine = engine_of(script, plan_of(root, TWO)).start()
    with pytest.raises(RuntimeError, match="started once"):
        engine.start()
    futures = [engine.submit("one", inputs()) for _ in range(50)]
    with ThreadPoolExecutor(4) as pool:
        for closed in [pool.submit(engine.close) for _ in range(4)]:
            closed.result(WAIT_SECS)
    assert all(future.done() for future in futures)


def test_a_cancelled_request_does_not_run(script: Script, root: Path) -> None:
    with engine_of(script, plan_of(root, TWO)) as engine:
        gate, entered = script.hold(artifact(root, 0))
        running = engine.submit("one", inputs())
        assert entered.wait(WAIT_SECS)
        waiting = engine.submit("two", inputs())
        before = script.calls.count("artifact-1")
        assert waiting.cancel()
        assert not running.cancel()
        gate.set()
        result(running)
        result(engine.submit("one", inputs()))
        assert script.calls.count("artifact-1") == before
        assert engine.stats().members["two"].cancelled == 1
    with pytest.raises(CancelledError):
        waiting.result(0)
    wait([waiting], WAIT_SECS)


def test_requests_of_many_threads_are_all_answered(root: Path) -> None:
    answers: list[Arrays] = []

    def client() -> None:
        answers.extend(result(engine.submit("one", inputs())) for _ in range(20))

    with Engine(plan_of(root, TWO, kind="streams")) as engine:
        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 160
