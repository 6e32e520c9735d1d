"""Requests of one model in an engine: several in a launch of a batch that was compiled for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.lib.fake_gpu import FakeContexts, FakeCudaGroup, FakeGpu
from tests.lib.models import floats
from tests.lib.sized_models import by_hand, packed, products
from tests.lib.waiting import until
from tunerd import api
from tunerd.artifacts.manifest import LoadError
from tunerd.colocation import Engine
from tunerd.colocation.bench import bench
from tunerd.colocation.groups import ForSeveral, groups_of, load_for_several
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.in_process import InProcessPlace
from tunerd.colocation.plan import Plan, PolicyChoice
from tunerd.colocation.planning import launched
from tunerd.errors import HostError
from tunerd.report.colocation import bench_page
from tunerd.vocabulary import Arrays

WAIT_SECS = 120
SIZES = ({"batch": 1}, {"batch": 4}, {"batch": 8})
pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(products(), SIZES, tmp_path_factory.mktemp("batches"))


def plan_of(artifact: Path, **said: Any) -> Plan:
    member = {"name": "net", "artifact": artifact} | said.pop("member", {})
    policy = {"kind": "space-time"} | said.pop("policy", {})
    return Plan.model_validate({"members": [member], "policy": policy} | said)


class Gated:
    """A model that waits for a gate, and notes how many requests each of its launches had."""

    def __init__(self, model: ForSeveral, gate: threading.Event, entered: threading.Event) -> None:
        self._model, self._gate, self._entered = model, gate, entered
        self.own, self.counts = model.own, model.counts[-1:]  # all launches take equally long
        self.add, self.bring = model.add, model.bring
        self.brought = 0
        self.launched: list[int] = []

    def run(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Arrays]:
        self._entered.set()
        assert self._gate.wait(WAIT_SECS)
        self.launched.append(len(requests))
        return self._model.run(requests)


def require_right(x: np.ndarray, answer: Arrays) -> None:
    assert answer["y"].shape == (1, 5)
    np.testing.assert_allclose(answer["y"], by_hand(x), rtol=1e-5, atol=1e-6)


def test_a_member_whose_artifact_has_batches_is_a_group_of_its_own(artifact: Path) -> None:
    plan = plan_of(artifact)
    (group,) = groups_of(plan.members, 16)
    assert (group.name, group.members, group.together) == ("net+", ("net",), 8)
    assert group.kernels == artifact
    assert groups_of(plan.members, 1)[0].together == 1


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 11])
def test_each_request_has_its_own_row_whatever_size_holds_it(artifact: Path, count: int) -> None:
    model = load_for_several(artifact)
    assert model.counts == (1, 4, 8)
    given = [floats(1, 6, seed=seed) for seed in range(count)]
    answers = model.run([(model.own, {"x": x}) for x in given])
    assert len(answers) == count
    for x, answer in zip(given, answers, strict=True):
        require_right(x, answer)


def test_what_waits_goes_into_one_launch_and_each_caller_has_their_own_answer(
    artifact: Path,
) -> None:
    gate, entered = threading.Event(), threading.Event()
    gate.set()
    made: list[Gated] = []

    def opened(path: Path) -> Gated:
        made.append(Gated(load_for_several(path), gate, entered))
        return made[-1]

    place = InProcessPlace(open_for_several=opened)
    with Engine(plan_of(artifact, policy={"window_ms": 0}), place=place) as engine:
        (model,) = made
        gate.clear()
        entered.clear()
        model.launched.clear()
        given = [floats(1, 6, seed=seed) for seed in range(12)]
        futures = [engine.submit("net", {"x": given[0]})]
        assert entered.wait(WAIT_SECS)
        futures += [engine.submit("net", {"x": x}) for x in given[1:]]
        queues = engine._scheduler._queues.values()  # type: ignore[union-attr]
        until(lambda: sum(map(len, queues)) == len(given) - 1)
        gate.set()
        for x, future in zip(given, futures, strict=True):
            require_right(x, future.result(WAIT_SECS))
        stats = engine.stats()
    assert model.launched == [1, 8, 3]
    assert stats.groups["net+"].of_size == {1: 1, 3: 1, 8: 1}
    assert stats.groups["net+"].requests == len(given)
    assert stats.members["net"].planned_bytes > 0


def test_a_request_with_a_deadline_that_a_full_launch_would_miss_goes_without_company(
    artifact: Path,
) -> None:
    """Launches of 8 take 0.3 s here, and those of one hardly any time."""

    class Slow(Gated):
        def run(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Arrays]:
            if len(requests) > 1:
                threading.Event().wait(0.3)
            return super().run(requests)

    gate, entered = threading.Event(), threading.Event()
    gate.set()
    made: list[Slow] = []

    def opened(path: Path) -> Slow:
        model = load_for_several(path)
        made.append(Slow(model, gate, entered))
        made[-1].counts = (1, 8)
        return made[-1]

    place = InProcessPlace(open_for_several=opened)
    with Engine(plan_of(artifact, policy={"window_ms": 0}), place=place) as engine:
        gate.clear()
        entered.clear()
        made[0].launched.clear()
        x = floats(1, 6)
        futures = [engine.submit("net", {"x": x})]
        assert entered.wait(WAIT_SECS)
        futures += [engine.submit("net", {"x": x}, deadline_secs=0.25)]
        futures += [engine.submit("net", {"x": x}) for _ in range(7)]
        gate.set()
        for future in futures:
            require_right(x, future.result(WAIT_SECS))
    assert made[0].launched[:2] == [1, 1]


def test_other_policies_run_the_same_plan_one_request_at_a_time(artifact: Path) -> None:
    with Engine(plan_of(artifact, policy={"kind": "time"})) as engine:
        x = floats(1, 6)
        require_right(x, engine.submit("net", {"x": x}).result(WAIT_SECS))
        assert engine.stats().groups["net+"].of_size == {1: 1}


@pytest.mark.parametrize("shape", [(4, 6), (6,), (1, 7)])
def test_a_request_of_another_shape_than_a_row_is_refused(
    artifact: Path, shape: tuple[int, ...]
) -> None:
    with Engine(plan_of(artifact)) as engine:
        assert [spec.shape for spec in engine.inputs_of("net")] == [(1, 6)]
        with pytest.raises(ValueError, match=r"it takes float32\[1, 6\]"):
            engine.submit("net", {"x": floats(*shape)})


def test_a_bench_says_how_many_launches_had_how_many_requests(artifact: Path) -> None:
    plan = plan_of(artifact, load={"kind": "closed", "clients": 8, "duration": 1.0})
    found = bench(plan, [PolicyChoice(kind="space-time")], lambda _: None)
    (result,) = found.results
    launches = result.launches["net+"]
    assert sum(launches.values()) > 0
    assert max(launches) <= 8
    assert f"{launches[max(launches)]:,} of {max(launches)}" in bench_page(found)


def test_runners_take_no_batches_and_say_so(artifact: Path) -> None:
    with pytest.raises(HostError, match="the place processes takes no groups"):
        Engine(plan_of(artifact, place="processes")).start()


def test_weights_of_others_have_no_place_in_a_batch(artifact: Path) -> None:
    with pytest.raises(LoadError, match="tune with --tenants"):
        load_for_several(artifact).add("other", artifact)


def test_a_mix_is_planned_by_what_its_batches_take(artifact: Path, tmp_path: Path) -> None:
    """A batch of 8 is said to take hardly longer than one of 1, which is too slow for the rate."""
    assert launched.lanes_of([artifact]) == (artifact, (1, 4, 8), True)
    said = ((1, 0.02), (4, 0.021), (8, 0.022))
    points = [{"of": "net", "share": 100, "together": n, "secs": [secs]} for n, secs in said]
    (tmp_path / "points.json").write_text(json.dumps(points))
    mix = {
        "members": [{"name": "net", "artifact": str(artifact), "rate": 45, "slo_ms": 500}],
        "search": {"shares": [100]},
        "curves": ["points.json"],
    }
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mix))
    found = api.colocate_plan(tmp_path / "mix.yaml", out=tmp_path / "out", dry_run=True)
    assert found.plan is not None
    assert found.plan.policy.kind == "space-time"
    assert found.plan.policy.parameters["together"] in (4, 8)
    assert [member.name for member in found.plan.members] == ["net"]


def test_a_batch_is_timed_by_the_engine_with_requests_of_one_member(artifact: Path) -> None:
    like = plan_of(artifact)
    found = launched.measure(
        "net", [artifact], 100, count=4, like=like, rounds=1, round_secs=1.0, say=lambda _: None
    )
    assert (found.of, found.share, found.together) == ("net", 100, 4)
    assert 0 < found.secs.value <= found.tail_secs


def test_on_a_gpu_a_launch_takes_the_smallest_graph_that_fits(artifact: Path) -> None:
    noted: list[tuple[int, int]] = []
    model = load_for_several(artifact)
    place = CudaStreamsPlace(
        FakeGpu(),
        make_contexts=FakeContexts,
        open_for_several=lambda _: FakeCudaGroup(model, noted),
    )
    with Engine(plan_of(artifact), place=place) as engine:
        noted.clear()
        given = [floats(1, 6, seed=seed) for seed in range(40)]
        futures = [engine.submit("net", {"x": x}) for x in given]
        for x, future in zip(given, futures, strict=True):
            require_right(x, future.result(WAIT_SECS))
    assert sum(requests for _, requests in noted) == len(given)
    assert all(size == next(n for n in (1, 4, 8) if n >= of) for size, of in noted)
    assert max(of for _, of in noted) > 1
