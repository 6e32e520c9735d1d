"""Models of one architecture in an engine: several of their requests in a launch, real kernels."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.lib.colocation_plans import CORES, artifact, colocate, inputs
from tests.lib.fake_gpu import FakeContexts, FakeCudaGroup, FakeGpu
from tests.lib.super_models import CONVNET, artifact_of, super_artifact, tenant
from tests.lib.waiting import until
from tunerd import api
from tunerd.artifacts.loading import LoadedModel, load
from tunerd.colocation import Engine, MemberError
from tunerd.colocation.artifacts import weights_bytes_of
from tunerd.colocation.bench import bench
from tunerd.colocation.groups import ForSeveral, groups_of, load_for_several, with_weights_of
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.in_process import InProcessPlace
from tunerd.colocation.plan import Plan, PolicyChoice
from tunerd.colocation.planning import pairs
from tunerd.colocation.planning.features import architecture_of, at_share, features_of
from tunerd.colocation.planning.pairs import Pair, Side
from tunerd.errors import ExitCode, HostError, InputError
from tunerd.report.colocation import bench_page
from tunerd.system import host
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Arrays
from tunerd.vocabulary.verdict import Interval

WAIT_SECS = 120
NAMES = ("a", "b", "c", "d")
pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")


needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two slices take two cores")


def side_of(artifact: Path, share: int) -> Side:
    of = at_share(features_of(artifact).named(), share)
    return Side(artifact.name, architecture_of(artifact), share, of)


@dataclass(frozen=True)
class Tenants:
    """Four models with weights of their own; the first has kernels for 1, 2 and 4 at once."""

    artifact: Path
    alone: Mapping[str, Path]
    models: Mapping[str, LoadedModel]

    @property
    def artifacts(self) -> list[Path]:
        return [self.artifact, *(self.alone[name] for name in NAMES[1:])]

    def side(self, share: int, *, together: int) -> Side:
        return replace(side_of(self.artifact, share), together=together)

    def plan(self, **said: Any) -> Plan:
        members = [{"name": "a", "artifact": self.artifact, "tenants": ["x", "y"]}]
        members += [{"name": n, "artifact": self.alone[n]} for n in NAMES[1:]]
        policy = {"kind": "space-time"} | said.pop("policy", {})
        return Plan.model_validate({"members": members, "policy": policy} | said)

    def is_right(self, name: str, given: Arrays, answer: Arrays) -> bool:
        """Say whether an answer is that of a member's weights, and of no other's."""
        fits = {
            other: all(
                np.allclose(answer[key], values, rtol=1e-5, atol=1e-6)
                for key, values in model(given).items()
            )
            for other, model in self.models.items()
        }
        return [other for other, is_fit in fits.items() if is_fit] == [name]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    root = tmp_path_factory.mktemp("tenants")
    models = {name: tenant(CONVNET, seed, root) for seed, name in enumerate(NAMES)}
    alone = {name: artifact_of(model, root / name) for name, model in models.items()}
    artifact = super_artifact(models["a"], root / "super")
    return Tenants(artifact, alone, {name: load(path) for name, path in alone.items()})


POISON = np.float32(999.0)  # inputs that have this in them fault


class Poisoned:
    """A model for tenants that waits for a gate, and faults on some inputs."""

    def __init__(self, model: ForSeveral, gate: threading.Event, entered: threading.Event) -> None:
        self._model, self._gate, self._entered = model, gate, entered
        self.own, self.counts = model.own, model.counts[-1:]  # all launches take equally long
        self.add, self.bring = model.add, model.bring
        self.brought = 0

    def run(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Arrays]:
        self._entered.set()
        assert self._gate.wait(WAIT_SECS)
        if any(POISON in given["x"] for _, given in requests):
            raise RuntimeError("illegal address")
        return self._model.run(requests)


def poisoned(gate: threading.Event, entered: threading.Event) -> InProcessPlace:
    return InProcessPlace(
        open_for_several=lambda path: Poisoned(load_for_several(path), gate, entered)
    )


def test_members_of_one_architecture_are_a_group_and_others_are_not(
    tenants: Tenants, tmp_path: Path
) -> None:
    plan = tenants.plan()
    (group,) = groups_of(plan.members, 8)
    assert (group.name, group.members, group.together) == ("a+3", NAMES, 4)
    assert group.kernels == tenants.artifact
    assert groups_of(plan.members, 1)[0].together == 1
    assert groups_of(plan.members[1:], 8) == ()  # nobody has kernels for several


def test_under_load_each_caller_has_the_answer_of_its_own_weights(tenants: Tenants) -> None:
    gate = threading.Event()
    gate.set()
    with Engine(tenants.plan(), place=poisoned(gate, threading.Event())) as engine:
        specs = engine.inputs_of("b")
        given = {seed: random_inputs(specs, seed) for seed in range(3)}
        asked: list[tuple[str, int, Future[Arrays]]] = [
            (name, seed, engine.submit(name, given[seed]))
            for _ in range(10)
            for name, seed in itertools.product(NAMES, given)
        ]
        asked += [("a", 0, engine.submit("a", given[0], tenant="y")) for _ in range(5)]
        wait([future for _, _, future in asked], WAIT_SECS)
        for name, seed, future in asked:
            assert tenants.is_right(name, given[seed], future.result(0))
        stats = engine.stats()
    launched = stats.groups["a+3"]
    assert launched.requests == len(asked)
    assert launched.per_launch is not None
    assert 1.5 < launched.per_launch <= 4
    assert [lane.name for lane in stats.lanes] == ["slice-0"]
    assert all(member.planned_bytes > 0 for member in stats.members.values())


def with_room_for(tenants: Tenants, count: int, **said: Any) -> Plan:
    size_bytes = 1 + count * weights_bytes_of(tenants.artifact)
    return tenants.plan(weights_gib=size_bytes / (1 << 30), **said)


@pytest.mark.parametrize("together", [1, 2])
def test_members_whose_weights_have_no_room_together_are_all_served(
    tenants: Tenants, together: int
) -> None:
    policy = {"together": together, "window_ms": 0}
    plan = with_room_for(tenants, together + 1, policy=policy)
    with Engine(plan) as engine:
        given = random_inputs(engine.inputs_of("a"), 1)
        asked = [(name, engine.submit(name, given)) for _ in range(5) for name in NAMES]
        for name, future in asked:
            assert tenants.is_right(name, given, future.result(WAIT_SECS))
        before = engine.stats().groups["a+3"].brought
        for name in NAMES * 3:  # whoever is asked was away for longest
            answer = engine.submit(name, given).result(WAIT_SECS)
            assert tenants.is_right(name, given, answer)
        stats = engine.stats()
        brought = stats.groups["a+3"].brought
        assert brought - before >= 2 * 3  # but for "a", whose artifact it is, and at the beginning
        for _ in range(3):
            engine.submit("d", given).result(WAIT_SECS)
        assert engine.stats().groups["a+3"].brought == brought
    with Engine(tenants.plan(policy=policy)) as engine:
        engine.submit("b", given).result(WAIT_SECS)
        whole = engine.stats()
    assert whole.groups["a+3"].brought == 0  # all were there before
    assert sum(m.planned_bytes for m in stats.members.values()) < sum(
        m.planned_bytes for m in whole.members.values()
    )


def test_weights_have_room_for_what_may_run_at_once(tenants: Tenants) -> None:
    with pytest.raises(
        InputError, match=r"weights_gib: a\+3 has .* up to 3 of its members may run"
    ):
        Engine(with_room_for(tenants, 2, policy={"together": 2})).start()
    alone = Engine(with_room_for(tenants, 2, policy={"kind": "time"}))
    with alone:
        assert alone.stats().groups["a+3"].brought == 0


def test_memory_for_weights_is_divided_among_groups_by_what_theirs_take(tenants: Tenants) -> None:
    plan = tenants.plan()
    (group,) = groups_of(plan.members, 8)
    size_bytes = weights_bytes_of(group.kernels)
    half = replace(group, name="half", members=group.members[:2])
    assert with_weights_of([group, half], 6 * size_bytes) == (group, half)  # all fit
    made = with_weights_of([group, half], 3 * size_bytes)
    assert [each.weights_bytes for each in made] == [2 * size_bytes, size_bytes]


@pytest.mark.parametrize("kind", ["time", "streams"])
def test_other_policies_run_the_same_plan_one_request_at_a_time(
    tenants: Tenants, kind: str
) -> None:
    with Engine(tenants.plan(policy={"kind": kind})) as engine:
        given = random_inputs(engine.inputs_of("a"), 1)
        answers = {name: engine.submit(name, given).result(WAIT_SECS) for name in NAMES}
        assert all(tenants.is_right(name, given, answer) for name, answer in answers.items())
        assert engine.stats().groups["a+3"].per_launch == 1.0


def test_a_fault_in_a_launch_fails_the_request_that_it_is_of_and_no_other(
    tenants: Tenants,
) -> None:
    gate, entered = threading.Event(), threading.Event()
    gate.set()
    with Engine(tenants.plan(policy={"window_ms": 0}), place=poisoned(gate, entered)) as engine:
        given = random_inputs(engine.inputs_of("a"), 1)
        poison = given | {"x": np.full_like(given["x"], POISON)}
        gate.clear()
        entered.clear()
        first = engine.submit("a", given)
        assert entered.wait(WAIT_SECS)
        others = {n: engine.submit(n, poison if n == "c" else given) for n in ("b", "c", "d")}
        queues = engine._scheduler._queues.values()  # type: ignore[union-attr]
        until(lambda: sum(map(len, queues)) == len(others))  # all are in the next launch
        gate.set()
        assert tenants.is_right("a", given, first.result(WAIT_SECS))
        with pytest.raises(MemberError, match="c failed: RuntimeError: illegal address"):
            others["c"].result(WAIT_SECS)
        for name in ("b", "d"):
            assert tenants.is_right(name, given, others[name].result(WAIT_SECS))
        assert tenants.is_right("c", given, engine.submit("c", given).result(WAIT_SECS))
        faults = engine.stats().faults
    assert [(fault.member, fault.retried) for fault in faults] == [("", 3), ("c", 0)]


def test_a_bench_says_how_often_weights_were_brought(tenants: Tenants) -> None:
    said = {"kind": "closed", "clients": 1, "duration": 0.5}
    plan = with_room_for(tenants, 2, policy={"kind": "time"}, load=said)
    found = bench(plan, (), lambda _: None)
    (result,) = found.results
    assert result.brought["a+3"] > 0
    assert f"weights of a+3 were brought {result.brought['a+3']:,} times" in bench_page(found)


def test_a_bench_says_how_many_requests_a_launch_has(tenants: Tenants) -> None:
    load_said = {"kind": "closed", "clients": 4, "duration": 1.0}
    plan = tenants.plan(load=load_said)
    found = bench(plan, [PolicyChoice(kind="space-time")], lambda _: None)
    (result,) = found.results
    per_launch = result.per_launch["a+3"]
    assert per_launch is not None
    assert 1 <= per_launch <= 4  # real kernels: as it pays on this host
    assert "requests per launch of a+3" in bench_page(found)


@needs_two_cores
def test_what_launches_of_four_and_a_model_in_slices_cost_each_other_is_measured(
    tenants: Tenants, tmp_path: Path
) -> None:
    artifacts, other = tenants.artifacts, artifact(tmp_path, 0)
    four, one = tenants.side(50, together=4), side_of(other, 50)
    like = Plan.model_validate({"members": [{"name": "long", "artifact": other}]})
    found = pairs.measure(
        (four, artifacts), (one, [other]), like=like, device="here", say=lambda _: None,
        rounds=2, round_secs=0.5,
    )  # fmt: skip
    assert [(each.of, each.beside) for each in found] == [(four, one), (one, four)]
    assert all(0.2 < each.slowdown.value < 50 for each in found)


@needs_two_cores
def test_a_group_is_planned_in_a_slice_beside_another_models_lane_and_served(
    tenants: Tenants, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "200")
    # One request in a launch is told to be so slow that four have to go together, the whole device
    # to be no faster than half of it, and what is long to take longer than the others may wait.
    secs = {("net", 1): 0.012, ("net", 4): 0.014, ("long", 1): 0.2}
    points = [
        {"of": of, "share": share, "together": together, "secs": [each]}
        for (of, together), each in secs.items()
        for share in (50, 100)
    ]
    (tmp_path / "points.json").write_text(json.dumps(points))
    four, one = tenants.side(50, together=4), side_of(artifact(tmp_path, 0), 50)
    slower, device = Interval(1.1, 1.1, 1.1), host.facts().cpu_model
    told = [Pair(*each, device, slower, "told") for each in ((four, one), (one, four))]
    pairs.append(tmp_path / "pairs.jsonl", told)
    net = {"name": "net", "artifacts": [*map(str, tenants.artifacts)], "rate": 18}
    other = {"name": "long", "artifact": str(artifact(tmp_path, 0)), "rate": 2.5}
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        yaml.safe_dump({
            "members": [net | {"slo_ms": 80}, other | {"slo_ms": 4000}],
            "search": {"shares": [50], "together": [1, 4]},
            "curves": ["points.json"],
            "pairs": ["pairs.jsonl"],
            "load": {"duration": "2s"},
        })
    )  # fmt: skip
    out = tmp_path / "out"
    assert colocate("plan", mix, "--out", out, "--dry-run") in (0, ExitCode.CANNOT_TELL)
    page = " ".join(capsys.readouterr().out.split())
    assert "50%: long; 50%: net-0 to net-3 (up to 4 in a launch)" in page
    assert "Launches: 4 models of one architecture in the slice of 50%, up to 4 in a launch" in page
    assert "beside 1 lane of others" in page

    found = api.colocate_plan(mix, out=out)
    assert found.plan is not None
    assert found.proof is not None
    assert all(each.answered for each in found.proof.members)
    assert found.answer.chosen is not None
    assert {each.slowdown.how for each in found.answer.chosen.expected} == {"measured"}
    plan = Plan.read(out / "plan.yaml")
    assert plan.policy.parameters["slices"] == "lanes"
    names = [member.name for member in plan.members if member.name != "long"]
    # Without objectives: who is served together is asked here, not when.
    members = tuple(m.model_copy(update={"slo_ms": None}) for m in plan.members)
    with Engine(plan.model_copy(update={"members": members})) as engine:
        given = random_inputs(engine.inputs_of("net-0"), 3)

        def has_launched_several_together() -> bool:
            futures = [(name, engine.submit(name, given)) for _ in range(8) for name in names]
            long = engine.submit("long", inputs())
            for name, future in futures:
                own = NAMES[names.index(name)]
                assert tenants.is_right(own, given, future.result(WAIT_SECS))
            assert long.result(WAIT_SECS)
            (launches,) = engine.stats().groups.values()
            return launches.launches < launches.requests

        until(has_launched_several_together)


def test_runners_take_no_groups_and_say_so(tenants: Tenants) -> None:
    with pytest.raises(HostError, match="the place processes takes no groups"):
        Engine(tenants.plan(place="processes")).start()


def test_weights_of_another_architecture_stay_by_themselves(
    tenants: Tenants, tmp_path: Path
) -> None:
    other = artifact_of(tenant("encoder", 0, tmp_path), tmp_path / "encoder")
    plan = tenants.plan()
    members = (*plan.members, plan.members[1].model_copy(update={"name": "e", "artifact": other}))
    (group,) = groups_of(members, 8)
    assert group.members == NAMES
    with Engine(plan.model_copy(update={"members": members})) as engine:
        given = random_inputs(engine.inputs_of("e"), 2)
        answer = engine.submit("e", given).result(WAIT_SECS)
        assert all(np.array_equal(answer[key], v) for key, v in load(other)(given).items())


def on_a_gpu(tenants: Tenants, launched: list[tuple[int, int]]) -> CudaStreamsPlace:
    model = load_for_several(tenants.artifact)
    return CudaStreamsPlace(
        FakeGpu(),
        make_contexts=FakeContexts,
        open_for_several=lambda _: FakeCudaGroup(model, launched),
    )


def test_on_a_gpu_weights_are_brought_while_others_are_served(tenants: Tenants) -> None:
    plan = with_room_for(tenants, 3, policy={"kind": "streams"})
    place = on_a_gpu(tenants, [])
    with pytest.raises(InputError, match=r"up to 4 of its members may run at once"):
        Engine(plan, place=place).start()  # four lanes, each with two of them
    plan = with_room_for(tenants, 3, policy={"kind": "time"})
    with Engine(plan, place=on_a_gpu(tenants, [])) as engine:
        given = random_inputs(engine.inputs_of("a"), 1)
        asked = [(n, engine.submit(n, given)) for _ in range(20) for n in NAMES]
        for name, future in asked:
            assert tenants.is_right(name, given, future.result(WAIT_SECS))
        stats = engine.stats()
    assert not stats.faults
    assert stats.groups["a+3"].brought >= 1


def test_on_a_gpu_a_launch_takes_the_smallest_graph_that_fits(tenants: Tenants) -> None:
    launched: list[tuple[int, int]] = []
    place = on_a_gpu(tenants, launched)
    with Engine(tenants.plan(policy={"slices": 4}), place=place) as engine:
        given = random_inputs(engine.inputs_of("a"), 1)
        launched.clear()
        asked = [(n, engine.submit(n, given)) for _ in range(20) for n in NAMES]
        for name, future in asked:
            assert tenants.is_right(name, given, future.result(WAIT_SECS))
        stats = engine.stats()
    assert [lane.name for lane in stats.lanes] == [f"slice-{n}" for n in range(4)]
    assert {proof.mechanism for proof in stats.proofs} == {"green context"}
    assert sum(requests for _, requests in launched) == len(asked)
    assert all(count == next(n for n in (1, 2, 4) if n >= of) for count, of in launched)
    assert stats.groups["a+3"].requests == len(asked)
