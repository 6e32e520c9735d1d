"""What the engine refuses: requests, deadlines, and members that do not fit."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.lib.colocation_plans import Script, artifact, inputs, plan_of
from tests.lib.engines import TWO, WAIT_SECS, engine_of, result, root, script  # noqa: F401  fixtures
from tunerd.artifacts.loading import LoadError
from tunerd.colocation import Engine, RefusedError
from tunerd.colocation.places.in_process import InProcessPlace
from tunerd.errors import HostError, InputError
from tunerd.system import cores


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
