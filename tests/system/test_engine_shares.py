"""Shares that change while the engine serves."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lib.colocation_plans import CORES, Script, artifact, inputs, plan_of
from tests.lib.engines import WAIT_SECS, engine_of, result, root, same, script  # noqa: F401  fixtures
from tests.lib.fake_gpu import FakeContexts, fake_cuda_place
from tunerd.artifacts.loading import load
from tunerd.colocation import Engine, RefusedError
from tunerd.errors import InputError
from tunerd.vocabulary import Arrays

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
