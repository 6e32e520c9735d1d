"""The engine: requests in, answers out, and how it ends."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.lib.colocation_plans import Script, artifact, inputs, plan_of
from tests.lib.engines import TWO, WAIT_SECS, engine_of, result, root, same, script  # noqa: F401  fixtures
from tests.lib.fake_gpu import FakeContexts, fake_cuda_place
from tunerd.artifacts.loading import load
from tunerd.colocation import Engine, MemberError, RefusedError
from tunerd.colocation.policies import POLICIES
from tunerd.vocabulary import Arrays

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
