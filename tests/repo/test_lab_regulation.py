"""How the lab's script of regulations makes mixes and plans, and goes on with what is there."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from lab.colocation import regulation
from lab.colocation.regulation import device_name, factors, kept_mixes, mixes_of, static_members
from tests.lib import ROOT
from tunerd.colocation import Plan
from tunerd.colocation.plan import Measured, Member
from tunerd.colocation.regulation.find import RegulatedPlan


def test_mixes_have_each_model_about_as_often() -> None:
    mixes = mixes_of("abcde", 5)
    assert len(set(mixes)) == 5
    times = [sum(name in mix for mix in mixes) for name in "abcde"]
    assert max(times) - min(times) <= 1
    assert mixes_of("abc", 5) == [("a", "b", "c")]


def test_static_plans_have_three_lanes_or_two_and_no_more_than_the_device() -> None:
    members = tuple(Member(name=name, artifact=Path(name)) for name in "abc")
    plans = [Plan(members=of) for of in static_members(members)]
    assert len(plans) == 16
    assert {len({m.lane or m.name for m in plan.members}) for plan in plans} == {2, 3}


def test_a_regulation_is_held_against_each_other_policy() -> None:
    measured = [
        Measured(policy=kind, secs=1, work=work, per_sec={"a": 1}, p99_ms={"a": p99, "b": 10})
        for kind, work, p99 in (("time", 1.0, 20), ("streams", 1.2, 5), ("regulated", 1.5, 10))
    ]
    plan = Plan(members=(Member(name="a", artifact=Path("a")),), measured=tuple(measured))
    over = factors(RegulatedPlan(plan, 1, {}))
    assert over["time"] == pytest.approx({"work": 1.5, "p99": 1.0})
    assert over["streams"] == pytest.approx({"work": 1.25, "p99": 2.0})


def test_a_mix_is_of_its_documents_device_where_it_does_not_say_so() -> None:
    before = json.loads((ROOT / "results/h200-regulation/regulation.json").read_text())
    (mix,) = before["mixes"]
    assert device_name(before) == "NVIDIA H200"
    assert device_name(before | {"device": "cpu"}) == "Intel(R) Xeon(R) Processor"
    assert kept_mixes(before, "NVIDIA H200") == {
        mix: before["mixes"][mix] | {"measured_on": "NVIDIA H200"}
    }


def test_mixes_of_another_device_are_kept_under_its_name_and_known_there_again() -> None:
    before = {
        "host": {"gpus": [{"name": "GPU X"}]},
        "device": "cuda",
        "mixes": {"a+b+c": {"pays": True}, "a+b+c on GPU Y": {"measured_on": "GPU Y"}},
    }
    on_x = {"pays": True, "measured_on": "GPU X"}
    on_y = {"measured_on": "GPU Y"}
    assert kept_mixes(before, "GPU X") == {"a+b+c": on_x, "a+b+c on GPU Y": on_y}
    there = kept_mixes(before, "GPU Y")
    assert there == {"a+b+c on GPU X": on_x, "a+b+c": on_y}
    assert kept_mixes(before | {"mixes": there}, "GPU X") == kept_mixes(before, "GPU X")


def test_only_what_this_device_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def found_by(*arguments: Any, **_: Any) -> dict[str, Any]:
        asked.append(dict(itertools.pairwise(arguments)))
        return {"regulated_over": {}, "tried": 1}

    monkeypatch.setattr(regulation, "found_by", found_by)
    begun_at = time.time()
    given = [*(f"{name}={tmp_path}" for name in "abcd"), "--device", "cpu", "--mixes", "2"]
    path = tmp_path / "regulation.json"
    regulation.main([*given, "--out", str(tmp_path), "--only", "a+b+c"])
    document = json.loads(path.read_text())
    here = device_name(document)
    (found,) = document["mixes"].values()
    assert found["measured_on"] == here
    assert begun_at <= found["measured_at"] <= time.time()
    document["mixes"]["a+b+d"] = {"measured_on": "another"}
    path.write_text(json.dumps(document))

    regulation.main([*given, "--out", str(tmp_path)])
    mixes = json.loads(path.read_text())["mixes"]
    assert [each["--inside"] for each in asked] == ["a+b+c", "a+b+d"]
    assert here.replace("/", "-") in asked[1]["--journal"].name
    assert mixes["a+b+c"] == found
    assert mixes["a+b+d on another"] == {"measured_on": "another"}
    assert mixes["a+b+d"]["measured_on"] == here
