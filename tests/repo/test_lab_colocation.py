"""What the lab's scripts of models on one GPU do that takes no GPU: figures, tables, steps."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from lab.colocation import latency, recovery, request_parts
from lab.colocation.contenders import engine_plan
from lab.colocation.figures import best, p99_ms, ratio, within
from lab.colocation.gemms_table import key_of
from lab.colocation.gemms_table import tables as gemm_tables
from lab.colocation.latency import RECIPES
from lab.colocation.latency_table import admitted_in_time, spread_of, tables
from lab.colocation.saturation_table import latencies_of, samples_of, table
from lab.colocation.steps import Steps, since_start
from lab.colocation.tail_plot import dots_of, front, tails_svg
from lab.colocation.ways import Ways, all_ways, chosen
from tests.lib.colocation_plans import CORES, artifact, plan_of

# --- figures -----------------------------------------------------------------------------------


def test_a_ratio_is_taken_turn_by_turn_so_that_drift_cancels() -> None:
    below = [100.0, 90.0, 80.0, 70.0, 60.0, 50.0]
    found = ratio([1.5 * rate for rate in below], below)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_of_a_ratio_holds_it_and_widens_with_noise() -> None:
    found = ratio([1.4, 1.5, 1.6, 1.5, 1.45, 1.55], [1.0] * 6)
    assert 1.4 <= found.low < found.value < found.high <= 1.6


def test_work_is_counted_between_two_moments_while_everybody_is_busy() -> None:
    ends = [(0.0, 0), (0.5, 5), (1.0, 10), (1.5, 100)]
    assert within(ends, 0.25, 1.0) == pytest.approx(10.0)
    with pytest.raises(ValueError, match="not busy"):
        within(ends, 0.5, 1.6)


def test_a_tail_of_few_samples_is_not_told() -> None:
    assert p99_ms([1000.0] * 499) is None
    assert p99_ms([1000.0] * 500) == 1.0


# --- tables ------------------------------------------------------------------------------------


def document(rates: dict[str, list[float]]) -> dict[str, Any]:
    turns = [
        {
            "samples": {
                label: {"saturated": {"per_sec": rate}}
                | ({} if turn % 2 else {"closed": {"per_sec": rate, "latencies_us": [2000] * 300}})
                for label, values in rates.items()
                for rate in values[turn : turn + 1]
            }
        }
        for turn in range(4)
    ]
    return {
        "tenants": 8, "model": "resnet50", "precision": "fp16", "device": "a GPU", "turns": turns,
        "problems": {"PyTorch, vmap of 8": "RuntimeError: no"},
    }  # fmt: skip


RATES = {
    "PyTorch, one after another": [100.0] * 4,
    "PyTorch, 8 streams": [400.0] * 4,
    "PyTorch, batch 32 of one model": [1000.0] * 4,
    "tuned at 12%, one after another": [150.0] * 4,
    "tuned at 12%, 8 streams": [700.0] * 4,
    "engine, space, tuned at 12%": [500.0, 500.0],  # it ended after two turns
}


def test_the_table_compares_with_the_best_way_to_run_different_models() -> None:
    made = document(RATES)
    shown = table(made)
    assert "is 'PyTorch, 8 streams'" in shown
    assert "| tuned at 12%, 8 streams | 700 | 7.00 (7.00 to 7.00) | 1.75 (1.75 to 1.75) |" in shown
    assert "1.5 times: yes" in shown
    kernels = "'tuned at 12%, 8 streams' over 'PyTorch, 8 streams'"
    assert f"- tuned kernels bring 1.75 (1.75 to 1.75): {kernels}\n" in shown
    assert "a launch of 8 brings" not in shown
    assert "PyTorch, vmap of 8: RuntimeError: no" in shown


def test_folded_batch_norms_are_a_way_to_run_different_models() -> None:
    rates = {
        "PyTorch, 8 streams": [500.0] * 4,
        "PyTorch, batch norms folded, 8 streams": [600.0] * 4,
        "PyTorch, batch 8 of one model": [900.0] * 4,
        "tuned at 12%, 8 streams": [1200.0] * 4,
    }
    shown = table(document(rates))
    assert "the best of PyTorch with different models is 'PyTorch, batch norms folded" in shown
    assert "'tuned at 12%, 8 streams' over 'PyTorch, batch norms folded, 8 streams': 2.00" in shown
    assert len(dots_of(document(rates))) == 3


def test_launches_of_several_are_compared_with_the_best_way_to_run_them_apart() -> None:
    turns = {"PyTorch, 8 processes without MPS": [120.0] * 4, "PyTorch, vmap of 8": [3000.0] * 4}
    launched = {"8 together, tuned at 100%, one after another": [1400.0] * 4}
    shown = table(document(RATES | turns | launched))
    winner = "'8 together, tuned at 100%, one after another'"
    assert f"{winner} over 'tuned at 12%, 8 streams': 2.00 (2.00 to 2.00); 1.2 times: yes" in shown
    assert "over 'PyTorch, 8 processes without MPS': 11.67 (11.67 to 11.67); 6 times: yes" in shown


def test_kernels_a_launch_and_the_engine_make_what_the_engine_does_over_pytorch() -> None:
    launch, engine = "8 together, tuned at 100%, one after another", "engine, streams, tuned at 12%"
    folded = {"PyTorch, batch norms folded, 8 streams": [450.0] * 4}
    shown = table(document(RATES | folded | {launch: [1400.0] * 4, engine: [840.0] * 4}))
    assert "- tuned kernels bring 1.75 (1.75 to 1.75): 'tuned at 12%, 8 streams' over" in shown
    assert f"- a launch of 8 brings 2.00 (2.00 to 2.00): '{launch}' over 'tuned at" in shown
    assert f"- the engine keeps 0.60 (0.60 to 0.60): '{engine}' over '{launch}'" in shown
    assert "bring" not in table(document({k: v for k, v in RATES.items() if "tuned" not in k}))


def test_a_way_that_ended_on_the_way_is_not_compared() -> None:
    made = document(RATES)
    assert "engine, space, tuned at 12%" not in samples_of(made, "saturated")
    assert len(samples_of(made, "closed")["PyTorch, 8 streams"]) == 2
    assert len(latencies_of(made, "PyTorch, 8 streams")) == 600


def test_nothing_is_a_table_too() -> None:
    assert table(document({})).startswith("nothing was sampled")
    assert math.isclose(ratio([1.0], [2.0]).value, 0.5)
    assert best({"a": [1.0], "b": [2.0]}, ["a", "b"]) == "b"


def test_what_was_admitted_and_answered_in_time_has_an_interval() -> None:
    member = {"latencies_us": [900] * 990 + [1100] * 5, "ends": {"done": 995, "dropped": 5}}
    found = {
        "plan": {"members": [{"name": "m", "slo_ms": 1.0}]},
        "together": [{"members": {"m": member | {"ends": member["ends"] | {"refused": 100}}}}],
    }
    part = admitted_in_time(found)
    assert part.value == 0.99
    assert part.low < 0.99 < part.high
    assert admitted_in_time(found | {"together": []}).value == 0.0


def test_a_spread_is_of_medians_in_one_round() -> None:
    members = {name: {"latencies_us": [us] * 3} for name, us in (("a", 100), ("b", 125))}
    assert spread_of({"members": members}) == pytest.approx(0.25)


def test_the_parts_of_a_folder_are_tables_with_answers(tmp_path: Path) -> None:
    def rounds(us: int) -> list[dict[str, Any]]:
        members = {"tenant": {"latencies_us": [us] * 600, "ends": {"done": 600}}}
        return [{"window_secs": 1.0, "members": members}]

    said = {"value": 1.05, "low": 1.04, "high": 1.06}
    space = {
        "result": {
            "against_alone": [{"member": "tenant", "p99": said}],
            "joules_per_inference": 0.04287,
        },
        "together": rounds(2100),
        "alone": {"tenant": rounds(2000)},
    }
    part = {"part": "beside", "secs": 3.0, "policies": {"space": space}}
    beside = part | {"problems": {"ordered": "HostError: no"}}
    (tmp_path / "beside.json").write_text(json.dumps(beside))
    shown = tables(tmp_path)
    assert "| space | 2.1 ms | 2 ms | 1.05 (1.04 to 1.06) | yes | 0.0429 |" in shown
    assert "- ordered: HostError: no" in shown


def test_the_papers_claims_are_answered_by_the_mean_over_all_numbers_of_products() -> None:
    def found(*, time: float, space: float, bmm: float) -> dict[str, Any]:
        rates = {"time": [time] * 6, "space": [space] * 6, "bmm": [bmm] * 6}
        return {"per_sec": rates | {"super-kernel": [bmm] * 6}, "problems": {}}

    shape = (256, 128, 1152)
    document: dict[str, Any] = {
        "device": "a GPU",
        "torch": "2.11",
        "found": {
            key_of("fp32", shape, 10): found(time=1.0, space=2.0, bmm=4.0),
            key_of("fp32", shape, 20): found(time=1.0, space=2.0, bmm=16.0),
            key_of("fp32", shape, 480): found(time=1.0, space=2.0, bmm=1.0),  # not in the mean
        },
    }
    shown = gemm_tables(document)
    assert "bmm over the next best, R = 10: 2.00 (2.00 to 2.00); the paper's 1.68: yes" in shown
    assert "bmm over the next best, mean of R up to 120: 4.00 (4.00 to 4.00)" in shown
    assert "over one after another, mean: 8.00 (8.00 to 8.00); the paper's 7.71: yes" in shown
    assert "| - | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) | 1.00 (1.00 to 1.00) | - |" in shown
    rates: dict[str, list[float]] = document["found"][key_of("fp32", shape, 10)]["per_sec"]
    rates["addresses"] = [2.0] * 6
    assert "| 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00) |" in gemm_tables(document)


def test_a_plot_has_a_dot_for_each_way_and_names_those_that_none_beats() -> None:
    made = document({label: rates for label, rates in RATES.items() if "engine" not in label})
    dots = dots_of(made)
    assert {dot.label for dot in dots} == {
        label for label in RATES if "engine" not in label and "batch" not in label
    }
    # All have one tail, so that of each family the one with the highest throughput is left.
    assert [dot.name for dot in front(dots)] == ["8 streams, tuned at 12%", "8 streams"]
    drawn = ElementTree.fromstring(tails_svg("eight models", {"8 x resnet50": dots}))
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert "8 streams, tuned at 12%" in texts
    with pytest.raises(ValueError, match="nothing to draw"):
        tails_svg("none", {"8 x resnet50": []})


def test_launches_of_several_are_in_the_plot_by_their_whole_name() -> None:
    labels = ("8 together, tuned at 100%, one after another", "engine, space-time, 8 together")
    dots = dots_of(document({label: [1000.0] * 4 for label in labels}))
    assert [dot.name for dot in dots] == [labels[0], "space-time, 8 together"]


def test_before_the_first_turn_the_table_has_one_sample_of_each_way() -> None:
    made = document({label: rates for label, rates in RATES.items() if "PyTorch" not in label})
    first = made.pop("turns")[0]["samples"]
    shown = table(made | {"turns": [], "first": first})
    assert "one sample of each way" in shown
    assert "| tuned at 12%, 8 streams | 700 | - | - | 700 | - |" in shown


# --- ways and steps ----------------------------------------------------------------------------


def test_ways_are_chosen_by_a_part_of_their_rows_names() -> None:
    def ways(*only: str) -> list[Ways]:
        made = all_ways("resnet50", (12,), ("8@100", "2@25"), ("space", "time"), compile=False)
        return chosen(made, only)

    (first, *_, last) = ways()
    assert first.labels[0] == "tuned at 12%, one after another"
    assert last.name == "8 processes without MPS"
    labels = [label for each in ways() for label in each.labels]
    assert len(labels) == len(set(labels))
    (space_time, alone) = ways("8 TOGETHER")
    assert space_time.labels == ("engine, space-time, 8 together, tuned at 100%",)
    assert (alone.points, alone.shares) == (("8@100",), ())
    (mps,) = ways("tuned at 12%, 8 processes in MPS, 25%")
    assert (mps.count, mps.mps, mps.shares) == (8, 25, (12,))
    plan = engine_plan(ways("2 together")[0], "cuda")
    assert plan["policy"] == {"kind": "space-time", "slices": 4, "together": 2}


def test_a_step_that_fails_is_noted_with_its_time_and_the_next_goes_on() -> None:
    found: dict[str, Any] = {}
    written: list[int] = []
    steps = Steps(found, lambda: written.append(len(found["took_secs"])))
    with steps.step("one", "the row"):
        raise ValueError("no")
    with steps.step("two"):
        pass
    assert found["problems"] == {"the row": "ValueError: no"}
    assert list(found["took_secs"]) == ["one", "two"]
    assert written == [1, 2]


def test_a_policy_that_cannot_be_measured_leaves_the_others_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def found(_: str, *given: Any, **__: Any) -> dict[str, Any]:
        policy = given[1].removeprefix("replicas:")
        asked.append(policy)
        if policy == "space" and asked.count(policy) == 1:
            raise RuntimeError("it did not end")
        return {"policies": {policy: {"result": {"per_sec": 1.0}, "together": []}}}

    monkeypatch.setattr(latency, "found_by", found)
    monkeypatch.setattr(latency.tenants, "made", lambda *_, **__: ([], {}))
    monkeypatch.setattr(latency.latency_table, "tables", lambda _: "")
    command = ["latency", "--parts", "replicas", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--only", "space", "--only", "time"])
    latency.main()
    document = json.loads((tmp_path / "replicas.json").read_text())
    assert (list(document["policies"]), document["done"]) == (["time"], ["time"])
    assert document["problems"] == {"space": "RuntimeError: it did not end"}
    monkeypatch.setattr(sys, "argv", command)
    latency.main()
    document = json.loads((tmp_path / "replicas.json").read_text())
    assert asked == ["time", "space", "streams", "space"]
    assert set(document["policies"]) == {"time", "space", "streams"}
    assert document["problems"] == {}


@pytest.mark.skipif(len(CORES) < 2, reason="two members are to have a core each")
def test_changes_of_shares_are_those_that_a_bench_of_the_recipe_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = yaml.safe_load((RECIPES / "reshare.yaml").read_text())
    for seed, member in enumerate(recipe["members"]):
        member |= {"artifact": str(artifact(tmp_path, seed)), "share": 50, "shares": [50]}
    recipe["load"] |= {"duration": "600ms"}
    (tmp_path / "reshare.yaml").write_text(yaml.safe_dump(recipe | {"device": "cpu"}))
    monkeypatch.setattr(latency, "RECIPES", tmp_path)
    found = latency.reshares()
    assert len(found["change_secs"]) >= 2
    assert set(found["ends"]) == {"done"}
    (tmp_path / "reshare.json").write_text(json.dumps({"part": "reshare", "secs": 1.0} | found))
    assert f"{found['ends']['done']:,} requests answered, 0 lost" in tables(tmp_path)


def test_faults_are_those_that_a_bench_of_the_recipe_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe with two of its tenants, in processes on cores."""
    recovery.made(tmp_path, "cpu")
    recipe = yaml.safe_load((RECIPES / "fault-mps.yaml").read_text())
    tenants, culprit = recipe["members"][:2], recipe["members"][-1]
    for seed, member in enumerate(tenants):
        member |= {"artifact": str(artifact(tmp_path, seed)), "rate": 20}
    culprit |= {"artifact": "artifact", "rate": 20}
    recipe |= {"device": "cpu", "place": "processes", "members": [*tenants, culprit]}
    fault = recipe["load"]["fault"] | {"inputs": "far.npz", "after": "1s"}
    recipe["load"] |= {"kind": "poisson", "duration": "5s", "rounds": 1, "fault": fault}
    path = tmp_path / "fault-mps.yaml"
    path.write_text(yaml.safe_dump(recipe))
    found = recovery.faults(path)
    (fault,) = found["rounds"]
    assert fault["culprit_serves"]
    assert fault["secs"] >= fault["culprit_secs"] > 0
    assert fault["failed"] == 0
    assert all(fault["answered"].values())
    (tmp_path / "faults.json").write_text(json.dumps({"part": "faults", "secs": 1.0} | found))
    assert f"| 1 | {fault['secs']:.2f} s | " in (shown := tables(tmp_path))
    assert "a new process with all in it takes" in shown


def test_after_the_last_moment_no_step_is_begun() -> None:
    with pytest.raises(TimeoutError, match="no time was left"):
        Steps({}, lambda: None, until=0.0).left_secs(1.0)
    assert Steps({}, lambda: None).left_secs(1.0, keep=5.0) == 1.0
    soon = Steps({}, lambda: None, until=since_start() + 100.0)
    assert 0.0 < soon.left_secs(90.0, keep=20.0) <= 80.0
    with pytest.raises(TimeoutError, match="101 s are needed"):
        soon.left_secs(1.0, keep=101.0)


def test_the_parts_of_each_request_come_to_its_latency(tmp_path: Path) -> None:
    two = {"one": {"rate": 50.0}, "two": {"clients": 1}}
    load = {"kind": "poisson", "alone": ["one"]}
    plan = plan_of(tmp_path, two, kind="streams", load=load, place="in-process")
    found = request_parts.measured(plan, secs=0.4, turns=1)
    assert {load: set(of) for load, of in found.items()} == {
        f"{load}, {way}": members
        for load, members in (("all", {"one", "two"}), ("one alone", {"one"}))
        for way in request_parts.WAYS
    }
    for of in found.values():
        for each in (parts for requests in of.values() for parts in requests):
            assert math.isclose(each["all"], sum(each.values()) - each["all"], abs_tol=1.0)
    shown = request_parts.shown({"streams": found})
    assert shown.count("\n") == 1 + 6
