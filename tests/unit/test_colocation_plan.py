"""Plans: what a person writes, what is read, and what is said of mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lib import ROOT
from tunerd.colocation.placement.job_file import JobFile
from tunerd.colocation.plan import Fault, Kill, Plan, shares_of
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.policies import policy_of
from tunerd.errors import InputError

PLAN = """
place: in-process
policy: {kind: ordered, patience_ms: 20}
members:
  - {name: detector, artifact: models/detector, share: 60, tenants: [shop, press], slo_ms: 30}
  - {name: ranker, artifact: ../ranker, share: 40, weight: 2, limit_ms: 500, rate: 20}
load: {kind: bursts, duration: 30s}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    plan = Plan.read(written(tmp_path, PLAN))
    assert [m.artifact for m in plan.members] == [
        tmp_path / "models" / "detector",
        tmp_path.parent / "ranker",
    ]
    assert plan.policy.parameters == {"patience_ms": 20}
    assert plan.load.duration == 30.0


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    plan = Plan.read(written(tmp_path, PLAN))
    again = tmp_path / "again.yaml"
    plan.write(again)
    assert Plan.read(again) == plan
    assert "artifact: models/detector" in again.read_text()


def test_members_without_shares_have_equal_ones() -> None:
    members = [{"name": name, "artifact": name} for name in "abc"]
    plan = Plan.model_validate({"members": members})
    assert shares_of(plan.members) == {"a": 33, "b": 33, "c": 33}


def test_the_first_of_all_other_shares_go_together_and_the_second() -> None:
    members = [
        {"name": "a", "artifact": "a", "share": 60, "shares": [30, 10]},
        {"name": "b", "artifact": "b", "share": 40, "shares": [50, 90]},
    ]
    plan = Plan.model_validate({"members": members, "order": ["b", "a"]})
    found = [{m.name: m.share for m in layout} for layout in plan.layouts]
    assert found == [{"b": 40, "a": 60}, {"b": 50, "a": 30}, {"b": 90, "a": 10}]


def test_members_are_loaded_in_the_order_that_the_plan_says() -> None:
    members = [{"name": name, "artifact": name} for name in "abc"]
    plan = Plan.model_validate({"members": members, "order": ["c", "a", "b"]})
    assert [m.name for m in plan.ordered] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "it has no key `members`"),
        ("members: [", "is no YAML"),
        ("members: []", "members: "),
        ("{}", "members: is missing"),
        ("members: [{name: a}]", r"members\[0\].artifact: is missing"),
        ("members: [{name: a, artifact: x, shares: [3]}]", "no `share` to begin with"),
        (
            "members: [{name: a, artifact: x, share: 50, shares: [3]}, "
            "{name: b, artifact: x, share: 50}]",
            "every member needs as many `shares`",
        ),
        (
            "members: [{name: a, artifact: x, share: 50, shares: [30]}, "
            "{name: b, artifact: x, share: 50, shares: [80]}]",
            "the shares come to 110%",
        ),
        ("members: [{name: a, artifact: x}]\nplaces: mps", r"places: .* did you mean place\?"),
        ("members: [{name: a, artifact: x}]\nfoo: 1", "foo: is no key here; allowed are version, "),
        ("members: [{name: a, artifact: x, weight: 0}]", "weight: 0 is not above 0"),
        ("members: [{name: a, artifact: x, weight: w}]", "weight: 'w' is not a number"),
        ("a: b\nmembers: - x", r"plan.yaml:2:10: this is no YAML: (?!.*unicode string)"),
        ("members: [{name: a b, artifact: x}]", r"members\[0\].name: "),
        (
            "members: [{name: a, artifact: x, slo: 3}]",
            r"members\[0\].slo: is no key here; did you mean slo_ms\? Allowed are name, ",
        ),
        ("members: [{name: a, artifact: x}]\nplace: cloud", "place: 'cloud' is not one of"),
        ("members: [{name: a, artifact: x}]\nversion: 2", "version: "),
        ("members: [{name: a, artifact: x, share: 5, cores: [0]}]", "has both a share and cores"),
        ("members: [{name: a, artifact: x, tenants: [t, t]}]", "a names a tenant twice"),
        (
            "members: [{name: a, artifact: x}, {name: a, artifact: y}]",
            "two members are called a",
        ),
        (
            "members: [{name: a, artifact: x, share: 60}, {name: b, artifact: y, share: 60}]",
            "the shares come to 120%",
        ),
        (
            "members: [{name: a, artifact: x, share: 60}, {name: b, artifact: y}]",
            "either every member has a share, or none has",
        ),
        (
            "members: [{name: a, artifact: x, cores: [0]}, {name: b, artifact: y, cores: [0]}]",
            "two members have a core in common",
        ),
        ("members: [{name: a, artifact: x}]\norder: [b]", "must name each member once"),
        ("members: [{name: a, artifact: x}]\nload: {kind: trace}", "names a file in `trace`"),
        ("members: [{name: a, artifact: x}]\nload: {duration: soon}", "is not a duration"),
        ("members: [{name: a, artifact: x, rate: 1}]\nload: 80%", "a has a rate, and the load is"),
        ("members: [{name: a, artifact: x}]\nload: {of_capacity: 80%}", "kind poisson or bursts"),
        (
            "members: [{name: a, artifact: x}]\nload: {kind: bursts, of_capacity: much}",
            "of_capacity",
        ),
        (
            "members: [{name: a, artifact: x}]\nload: {alone: [b]}",
            "load.alone: there is no member or lane 'b'",
        ),
        ("members: [{name: a, artifact: x, rate: 1, clients: 1}]", "both a rate and clients"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        Plan.read(written(tmp_path, text))


MIX_TEXT = "members: [{name: a, model: x.onnx, rate: 1}]\nsearch: {shares: [50]}"
JOBS_TEXT = "jobs: [{name: a, tune: x.onnx, with: {cpu-pct: 50}}]"


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (Plan.read, MIX_TEXT, "is a mix, which `tunerd colocate plan` takes; give a plan here"),
        (Mix.read, PLAN, "is a plan, which `tunerd colocate check`, `bench` and `regulate` take"),
        (Mix.read, JOBS_TEXT, "is a file of jobs, which `tunerd colocate place` takes"),
        (
            Mix.read,
            "members: [{name: a, artifact: x}]",
            r"; of a mix members\[0\].rate: is missing",
        ),
        (JobFile.read, PLAN, "is a plan, .*; give a file of jobs here"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(
    read: Callable[[Path], object], text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        read(written(tmp_path, text))


def test_a_load_may_be_a_part_of_the_capacity(tmp_path: Path) -> None:
    short = Plan.read(written(tmp_path, "members: [{name: a, artifact: x}]\nload: 80%"))
    assert (short.load.kind, short.load.of_capacity) == ("poisson", 80.0)
    closed = short.with_load({"kind": "closed"})
    assert closed.load.of_capacity is None
    assert short.with_load({"kind": "bursts"}).load.of_capacity == 80.0


RESHARED = """
members:
  - {name: a, artifact: x, share: 50, shares: [70]}
  - {name: b, artifact: y, share: 50, SHARES}
load: {reshare_every: 100ms, duration: 1s, MORE}
"""


def test_shares_may_change_while_a_load_runs(tmp_path: Path) -> None:
    text = RESHARED.replace("SHARES", "shares: [30]")
    plan = Plan.read(written(tmp_path, text.replace("MORE", "kind: closed")))
    assert plan.load.reshare_every == 0.1
    with pytest.raises(InputError, match="`reshare_every` is not within the duration"):
        plan.with_load({"duration": 0.1})
    with pytest.raises(InputError, match="`reshare_every` or `alone`; leave one of them out"):
        Plan.read(written(tmp_path, text.replace("MORE", "alone: [a]")))
    without = text.replace("shares: [70]", "weight: 1").replace("shares: [30]", "weight: 1")
    with pytest.raises(InputError, match="give every member `shares` to change to"):
        Plan.read(written(tmp_path, without.replace("MORE", "kind: closed")))


def test_a_member_may_be_killed_while_a_load_runs(tmp_path: Path) -> None:
    text = """
    place: processes
    members: [{name: a, artifact: x}]
    load: {kill: {member: a, after: 500ms}, duration: 1s}
    """
    plan = Plan.read(written(tmp_path, text))
    assert plan.load.kill == Kill(member="a", after=0.5)
    assert plan.with_load({"duration": 2.0}).load.kill == plan.load.kill
    with pytest.raises(InputError, match="`kill` is not within the duration"):
        plan.with_load({"duration": 0.5})
    with pytest.raises(InputError, match="`kill` or `alone`; leave one of them out"):
        Plan.read(written(tmp_path, text.replace("duration: 1s", "alone: [a]")))
    with pytest.raises(InputError, match="there is no member 'b'"):
        Plan.read(written(tmp_path, text.replace("member: a", "member: b")))
    for place in ("in-process", "mps"):
        with pytest.raises(InputError, match=f"the place {place} has no process of a member that"):
            Plan.read(written(tmp_path, text.replace("place: processes", f"place: {place}")))


def test_a_member_may_be_sent_what_faults_where_it_ends_no_other(tmp_path: Path) -> None:
    text = """
    place: mps
    device: cuda
    members: [{name: a, artifact: x}]
    load: {fault: {member: a, after: 500ms, inputs: far.npz}, duration: 1s}
    """
    plan = Plan.read(written(tmp_path, text))
    assert plan.load.fault == Fault(member="a", after=0.5, inputs=tmp_path / "far.npz")
    assert plan.load.outage == plan.load.fault
    assert plan.with_load({"duration": 2.0}).load.fault == plan.load.fault
    again = tmp_path / "again.yaml"
    plan.write(again)
    assert "inputs: far.npz" in again.read_text()
    assert Plan.read(again) == plan
    with pytest.raises(InputError, match="`fault` is not within the duration"):
        plan.with_load({"duration": 0.5})
    with pytest.raises(InputError, match="`fault` or `alone`; leave one of them out"):
        Plan.read(written(tmp_path, text.replace("duration: 1s", "alone: [a]")))
    with pytest.raises(InputError, match=r"load.fault: there is no member 'b'"):
        Plan.read(written(tmp_path, text.replace("member: a", "member: b")))
    both = text.replace("duration: 1s", "kill: {member: a, after: 1s}")
    with pytest.raises(InputError, match="a load has `kill` or `fault`; leave one of them out"):
        Plan.read(written(tmp_path, both))
    for device, apart in (("cuda", "mps"), ("cpu", "processes")):
        said = f"fault would end them all; choose `place: {apart}`"
        together = text.replace("mps", "in-process").replace("cuda", device)
        with pytest.raises(InputError, match=f"share one process in the place in-process.*{said}"):
            Plan.read(written(tmp_path, together))


def test_a_plan_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        Plan.read(tmp_path / "none.yaml")


PLANS = sorted((ROOT / "recipes" / "colocation").glob("*.yaml"))


@pytest.mark.parametrize("path", [path for path in PLANS if path.stem != "jobs"])
def test_plans_that_the_repository_shows_are_good(path: Path) -> None:
    plan = Plan.read(path)
    policy_of(plan.policy.kind, plan.policy.parameters)
    assert all("runs" in member.artifact.parts for member in plan.members)


def test_members_of_one_lane_have_its_share_once_and_turns_in_it() -> None:
    members = [
        {"name": "a", "artifact": "a", "share": 50, "lane": "left"},
        {"name": "b", "artifact": "b", "share": 50, "lane": "left"},
        {"name": "c", "artifact": "c", "share": 50},
    ]
    plan = Plan.model_validate({"members": members})
    lanes = policy_of("space", {}).lay_out(plan.members)
    assert [(x.name, x.pct, x.home) for x in lanes] == [("left", 50, ("a", "b")), ("c", 50, ("c",))]
    lanes = policy_of("ordered", {}).lay_out(plan.members)
    assert [(x.home, x.guests) for x in lanes] == [(("a", "b"), ("c",)), (("c",), ("a", "b"))]
    members[1]["share"] = 25
    with pytest.raises(ValueError, match="a and b are of one lane; give them the same share"):
        Plan.model_validate({"members": members})
