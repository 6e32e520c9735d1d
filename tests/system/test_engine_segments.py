"""Members in segments: urgent requests between them, and regulations of where they stop."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.colocation_plans import Script, artifact, inputs, plan_of
from tests.lib.engines import TWO, WAIT_SECS, engine_of, result, root, same, script  # noqa: F401  fixtures
from tests.lib.waiting import until
from tunerd.artifacts.loading import LoadError, load
from tunerd.colocation import Engine
from tunerd.errors import InputError


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
