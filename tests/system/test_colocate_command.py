"""`tunerd colocate`, as people and programs call it."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lib.colocation_plans import CORES, colocate, with_two_members
from tunerd import api
from tunerd.colocation import Plan
from tunerd.colocation.plan import PolicyChoice
from tunerd.colocation.regulation.measure import Busy, EngineMeasurer
from tunerd.errors import ExitCode, InputError, Interrupted
from tunerd.system.text import numbers_text

Captured = pytest.CaptureFixture[str]

PLAN = """
policy: {kind: streams}
members:
  - {name: one, artifact: artifact-0, slo_ms: 200, rate: 60, tenants: [a, b]}
  - {name: two, artifact: artifact-1, rate: 60}
load: {kind: poisson, duration: 1s}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_two_members(tmp_path_factory.mktemp("members"))


@pytest.fixture
def plan(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path / "plan.yaml"


def test_a_check_says_who_runs_where_and_writes_what_it_proved(
    plan: Path, capsys: Captured
) -> None:
    checked = plan.with_name("checked.yaml")
    assert colocate("check", plan, "--to", checked) == 0
    out = capsys.readouterr().out
    assert "stream-0" in out
    assert "2 members under streams in in-process" in out
    written = Plan.read(checked)
    assert all(member.sha256 for member in written.members)
    assert [proof.units for proof in written.proofs] == [len(CORES)] * 2
    which = {proof.which for proof in written.proofs}
    assert which == {numbers_text(CORES)}
    assert which.pop() in out
    assert colocate("check", checked, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["stats"]["members"]) == {"one", "two"}


def test_an_artifact_that_is_not_the_plans_is_refused(plan: Path, capsys: Captured) -> None:
    checked = plan.with_name("checked.yaml")
    api.colocate_check(plan, to=checked)
    shutil.rmtree(plan.with_name("artifact-1"))
    shutil.copytree(plan.with_name("artifact-0"), plan.with_name("artifact-1"))
    assert colocate("check", checked) == ExitCode.BAD_INPUT
    assert "two: the sha256 of" in capsys.readouterr().err


def test_a_bench_runs_the_load_under_each_policy_and_writes_a_page(
    plan: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no head is folded
    out = plan.with_name("out")
    given = ("--policy", "time", "--policy", "streams", "--out", out)
    assert colocate("bench", plan, *given) == 0
    printed = capsys.readouterr()
    assert "within SLO" in printed.out
    assert "time: loading one into whole" in printed.err
    document = json.loads((out / "result.json").read_text())
    assert [r["policy"] for r in document["results"]] == ["time", "streams"]
    for result, ran in zip(document["results"], document["runs"], strict=True):
        assert [(t["member"], t["tenant"]) for t in result["tenants"]] == [
            ("one", "a"),
            ("one", "b"),
            ("two", "default"),
        ]
        (observed,) = ran["together"]
        assert len(observed["samples"]) >= sum(t["asked"] for t in result["tenants"]) > 0
    page = (out / "report.html").read_text()
    assert "by the plan's objectives" in printed.out
    assert set(document["best"]) <= {"time", "streams"}
    assert "What each got" in page
    assert "within SLO" in page


def test_a_bench_is_one_document_for_programs(plan: Path, capsys: Captured) -> None:
    given = ("--load", "closed", "--duration", "500ms", "--json")
    assert colocate("bench", plan, *given) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    (result,) = document["results"]
    assert result["per_sec"] > 0
    assert document["plan"]["load"]["kind"] == "closed"
    assert result["planned_bytes"]["one"] > 0


def test_a_load_may_be_a_part_of_the_capacity_which_is_measured_first(
    plan: Path, capsys: Captured
) -> None:
    members = ", ".join(f"{{name: m{i}, artifact: artifact-{i}}}" for i in (0, 1))
    said = "{kind: bursts, of_capacity: 5%, duration: 500ms, alone: [m1], rounds: 2}"
    plan.write_text(f"policy: {{kind: streams}}\nmembers: [{members}]\nload: {said}\n")
    assert colocate("bench", plan, "--out", plan.with_name("out")) == 0
    printed = capsys.readouterr()
    assert "capacity: closed load for 0.5 s under streams" in printed.err
    assert "streams: m1 alone for 0.5 s, round 2 of 2" in printed.err
    assert "m1 beside the others over alone" in printed.out
    document = json.loads(plan.with_name("out").joinpath("result.json").read_text())
    for member in document["plan"]["members"]:
        assert member["rate"] == pytest.approx(0.05 * document["capacity"][member["name"]])
    (result,) = document["results"]
    assert [each["member"] for each in result["against_alone"]] == ["m1"]
    (ran,) = document["runs"]
    assert [len(each) for each in (ran["together"], ran["alone"]["m1"])] == [2, 2]


def benched(plan: Path, capsys: Captured) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """Return what a bench of one policy prints, its page, its result, and its requests."""
    folder = plan.with_name("out")
    assert colocate("bench", plan, "--out", folder) == 0
    document = json.loads(folder.joinpath("result.json").read_text())
    (result,), (ran,) = document["results"], document["runs"]
    return capsys.readouterr().out, folder.joinpath("report.html").read_text(), result, ran


@pytest.mark.skipif(len(CORES) < 2, reason="two members are to have a core each")
@pytest.mark.parametrize("policy", ["space", "ordered"])
def test_a_bench_changes_shares_while_members_serve_and_no_request_is_lost(
    plan: Path, policy: str, capsys: Captured
) -> None:
    given = "{{name: m{0}, artifact: artifact-{0}, share: 50, shares: [50]}}"
    members = ", ".join(given.format(i) for i in (0, 1))
    load = "{kind: closed, clients: 2, duration: 1s, reshare_every: 50ms, rounds: 2}"
    plan.write_text(f"policy: {{kind: {policy}}}\nmembers: [{members}]\nload: {load}\n")
    out, page, result, ran = benched(plan, capsys)
    changes = result["changes"]
    assert 2 <= len(changes["secs"]) <= 2 * 17  # in windows of 0.8 s
    assert 0 < changes["median_secs"] <= changes["longest_secs"] == max(changes["secs"])
    assert changes["asked"] == sum(len(observed["samples"]) for observed in ran["together"])
    assert changes["lost"] == 0
    said = f"; 0 of {changes['asked']:,} requests lost"
    for text in (out, page):
        assert f"{len(changes['secs'])} changes of shares while they served: " in text
        assert said in text
    assert "Shares change every 50" in page


def test_a_bench_kills_a_member_and_says_when_all_served_again(
    plan: Path, capsys: Captured
) -> None:
    members = ", ".join(f"{{name: m{i}, artifact: artifact-{i}, rate: 60}}" for i in (0, 1))
    load = "{kind: poisson, duration: 1s, rounds: 2, kill: {member: m1, after: 300ms}}"
    said = f"policy: {{kind: streams}}\nmembers: [{members}]\nload: {load}\n"
    plan.write_text(f"place: processes\n{said}")
    out, page, result, ran = benched(plan, capsys)
    outage = result["outage"]
    assert (outage["member"], outage["cause"]) == ("m1", "killed")
    assert (outage["missed"], outage["lost"], outage["lost_own"]) == (0, 0, 0)
    assert sum(result["faults"].values()) == len(outage["rounds"]) == 2
    for taken, observed in zip(outage["rounds"], ran["together"], strict=True):
        assert 0.3 <= taken["at_secs"] == observed["outage_at_secs"] < 1
        assert 0 < taken["out_secs"] <= taken["served_again_secs"]
    for text in (out, page):
        assert "m1 was killed in 2 rounds: it served again after " in text
        assert "; 0 requests of others lost, 0 of its own" in text
        assert "m0 before, during and after: " in text
    assert "The process of m1 is killed after 300" in page


def test_a_policy_without_shares_cannot_change_them(plan: Path, capsys: Captured) -> None:
    members = "[{name: one, artifact: artifact-0, share: 100, shares: [50]}]"
    plan.write_text(f"members: {members}\nload: {{reshare_every: 50ms, duration: 1s}}\n")
    assert colocate("bench", plan, "--policy", "time") == ExitCode.BAD_INPUT
    assert "the policy time has no shares that `shares` could change" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "fair"], "there is no policy 'fair'; there are time, streams"),
        (["--duration", "soon"], "is not a duration"),
        (["--duration", "0s"], "is not within a day"),
        (["--load", "trace"], "names a file in `trace`"),
        (["--load", "storm"], "storm"),
    ],
)
def test_what_cannot_be_benched_is_said_before_anything_is_loaded(
    flags: list[str], said: str, plan: Path, capsys: Captured
) -> None:
    assert colocate("bench", plan, *flags) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    assert said in err
    assert "loading" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_stopped_says_so_at_once_and_that_nothing_was_kept(
    plan: Path, number: signal.Signals
) -> None:
    steps: list[str] = []

    def step(said: str) -> None:
        steps.append(said)
        if said == "streams: poisson load for 60 s":
            signal.raise_signal(number)

    before, out = signal.getsignal(number), plan.with_name("out")
    with pytest.raises(Interrupted, match="nothing was kept, and the same command begins anew"):
        api.colocate_bench(plan, duration_secs=60, out=out, on_step=step)
    assert steps[-1] == "stopping: nothing is kept"
    assert not out.exists()
    assert signal.getsignal(number) is before


def test_a_regulation_is_looked_for_and_the_best_policy_written_with_what_was_measured(
    plan: Path, capsys: Captured
) -> None:
    given = ("regulate", plan, "--budget", "1s", "--probe", "50ms")
    assert colocate(*given) in (ExitCode.BETTER, ExitCode.NO_GAIN)
    printed = capsys.readouterr()
    assert "trying where each member may stop" in printed.err
    assert "regulated: proof, round 3 of 3" in printed.err
    assert "best: " in printed.out
    written = Plan.read(plan.with_name("plan.regulated.yaml"))
    assert [m.policy for m in written.measured] == ["time", "streams", "regulated"]
    assert written.policy.kind in ("time", "streams", "regulated")
    assert written.members == Plan.read(plan).members
    assert colocate("check", plan.with_name("plan.regulated.yaml")) == 0


def test_what_was_measured_is_not_measured_again(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PolicyChoice] = []

    def measured(_: EngineMeasurer, policy: PolicyChoice) -> Busy:
        asked.append(policy)
        return Busy({"one": len(asked), "two": 1.0}, {"one": 0.1, "two": 0.2})

    monkeypatch.setattr(EngineMeasurer, "_measured", measured)
    given, journal = Plan.read(plan), plan.with_name("journal")
    policy = PolicyChoice(kind="time")

    def measurer(secs: float = 1.0) -> EngineMeasurer:
        return EngineMeasurer(given, probe_secs=secs, journal=journal)

    first, again = measurer(), measurer()
    before = [first.under(policy), first.under(policy)]
    assert not again.is_known(policy)
    after = measurer()
    assert after.is_known(policy)
    assert [after.under(policy), after.under(policy)] == before
    assert len(asked) == 2
    after.under(policy, anew=True)
    measurer(secs=2.0).under(policy)  # which is another measurement
    assert len(asked) == 4
    journal.write_text("nothing\n")
    with pytest.raises(InputError, match="is no measurement"):
        measurer()


def test_a_regulation_takes_two_members(plan: Path, capsys: Captured) -> None:
    plan.write_text("members: [{name: one, artifact: artifact-0}]")
    assert colocate("regulate", plan) == ExitCode.BAD_INPUT
    assert "add another" in capsys.readouterr().err


def test_a_plan_that_is_none_is_said(tmp_path: Path, capsys: Captured) -> None:
    assert colocate("check", tmp_path / "none.yaml", "--json") == ExitCode.BAD_INPUT
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "bad-input"
