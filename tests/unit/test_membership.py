"""Who is started again, who is given up, and what happens as nodes join and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import create_autospec

import pytest

from tests.lib.node_fixtures import TARGET, cpu_slices, gpu_slices, node, settings
from tunerd.cluster import membership as crew_module
from tunerd.cluster.actor_bodies import WorkerReply
from tunerd.cluster.layout import layout_of
from tunerd.cluster.membership import (
    LOOK_SECS,
    MAX_FAULTS,
    MAX_RESTARTS,
    MEASURED_A_FAULT,
    WAIT_SECS,
    Membership,
)
from tunerd.cluster.nodes import Node, TunerSpec
from tunerd.cluster.ray_cluster import Cluster
from tunerd.errors import DeviceError, HostError, InfrastructureError
from tunerd.records import RunFacts, Store
from tunerd.telemetry.events import Telemetry
from tunerd.vocabulary import CapProof, Failure, Kind, Measurement, SliceSpec, Stage


@dataclass
class FakeCluster:
    """Notes what is started where. Nodes are alive while they are in `living`."""

    living: dict[str, Node] = field(default_factory=dict)
    slice_ids: set[str] = field(default_factory=set)
    tuner_ids: set[str] = field(default_factory=set)
    restarted: list[str] = field(default_factory=list)
    mute: set[str] = field(default_factory=set)  # slices that do not answer
    sm_count: int = 52  # that slices obtain
    surveyed_ids: list[str] = field(default_factory=list)

    def living_nodes(self) -> dict[str, int]:
        return {node_id: found.cpus for node_id, found in self.living.items()}

    def survey(self, node_id: str, *_: object, **__: object) -> None:
        self.surveyed_ids.append(node_id)

    def surveyed(self, answer: WorkerReply) -> Node:
        return self.living[answer.worker_id]

    def start_tuners(self, specs: tuple[TunerSpec, ...], *_: object) -> None:
        self.tuner_ids |= {s.tuner_id for s in specs}

    def start_slices(self, specs: tuple[tuple[SliceSpec, str | None], ...]) -> list[CapProof]:
        self.slice_ids |= {s.slice_id for s, _ in specs}
        self.mute -= {s.slice_id for s, _ in specs}
        return [proof(s.slice_id, self.sm_count) for s, _ in specs]

    def silent(self, slice_ids: tuple[str, ...]) -> list[str]:
        return [s for s in slice_ids if s in self.mute]

    def start_slice(self, spec: SliceSpec, _: str | None) -> None:
        self.slice_ids.add(spec.slice_id)

    def add_tuner(self, spec: TunerSpec) -> None:
        self.tuner_ids.add(spec.tuner_id)

    def restart(self, worker_id: str) -> None:
        self.restarted.append(worker_id)
        (self.tuner_ids if worker_id.startswith("tuner") else self.slice_ids).add(worker_id)

    def drop(self, worker_id: str) -> None:
        self.slice_ids.discard(worker_id)
        self.tuner_ids.discard(worker_id)


def proof(slice_id: str, sm_count: int = 52) -> CapProof:
    return CapProof(slice_id, "a device", sm_count, 132, "mps", attached=True)


def answer(worker_id: str, method: str, value: Any = None, error: str = "") -> WorkerReply:
    return WorkerReply(worker_id, method, value, error, 0.0, 1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(crew_module.time, "monotonic", lambda: now[0])

    def advance(secs: float) -> None:
        now[0] += secs

    return advance


MakeMembership = Callable[..., tuple[Membership, FakeCluster]]


@pytest.fixture
def make_membership(store: Store) -> MakeMembership:
    def make(*nodes: Node, elastic: bool = True, **given: Any) -> tuple[Membership, FakeCluster]:
        cluster = FakeCluster({str(n.node_id): n for n in nodes})
        asked = settings(**given)
        telemetry = create_autospec(Telemetry, instance=True)
        layout = layout_of(nodes, asked)
        membership = Membership(
            cast(Cluster, cluster),
            layout,
            settings=asked,
            store=store,
            telemetry=telemetry,
            elastic=elastic,
        )
        membership.start()
        return membership, cluster

    return make


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    facts = RunFacts("net", "d" * 64, TARGET, "a device", "cpu", 50, "0.27.0")
    with Store.create_or_open(tmp_path, facts=facts) as found:
        yield found


# --- those that end ----------------------------------------------------------------------------


def test_a_lost_worker_is_started_again_as_long_as_it_does_something(
    make_membership: MakeMembership,
) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,))), elastic=False)
    for _ in range(3 * MAX_RESTARTS):
        membership.lose("cpu-0-0", "it ended")
        membership.has_answered("cpu-0-0")
    assert cluster.restarted == ["cpu-0-0"] * 3 * MAX_RESTARTS


def test_a_worker_that_does_nothing_is_given_up_and_the_others_go_on(
    make_membership: MakeMembership,
) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,), (1,))), elastic=False)
    for _ in range(MAX_RESTARTS + 1):
        membership.lose("cpu-0-0", "it ended")
    assert cluster.restarted == ["cpu-0-0"] * MAX_RESTARTS
    assert cluster.slice_ids == {"cpu-0-1"}


def test_the_last_one_that_does_nothing_ends_the_run(make_membership: MakeMembership) -> None:
    membership, _ = make_membership(node("a", cpu_slices((0,))), elastic=False)
    for _ in range(MAX_RESTARTS):
        membership.lose("cpu-0-0", "it ended")
    with pytest.raises(InfrastructureError, match=r"the last slice ended 4 times, .*: it ended;"):
        membership.lose("cpu-0-0", "it ended")


def test_a_slice_that_comes_back_with_another_share_measures_nothing(
    make_membership: MakeMembership,
) -> None:
    membership, cluster = make_membership(
        node("a", gpu_slices(0)), cpu_pct=None, gpu_pct=40, slice_kind="mps"
    )
    assert membership.is_fit(answer("mps-0-0", "start", proof("mps-0-0")))
    assert not membership.is_fit(answer("mps-0-1", "start", proof("mps-0-1", sm_count=132)))
    assert cluster.slice_ids == {"mps-0-0"}
    with pytest.raises(HostError, match="no slice is left that has it"):
        membership.is_fit(answer("mps-0-0", "start", proof("mps-0-0", sm_count=132)))


def test_slices_that_do_not_answer_are_started_again_and_only_they(
    make_membership: MakeMembership,
) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,), (1,))), elastic=False)
    cluster.mute = {"cpu-0-1"}
    cluster.slice_ids.clear()
    membership.revive(membership.slice_ids, "it was killed")
    assert cluster.slice_ids == {"cpu-0-1"}
    assert cluster.mute == set()


def test_a_slice_that_is_started_again_with_another_share_decides_nothing(
    make_membership: MakeMembership,
) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,), (1,))), elastic=False)
    cluster.mute, cluster.sm_count = {"cpu-0-1"}, 132
    with pytest.raises(InfrastructureError, match="cpu-0-1 did not get its share again"):
        membership.revive(["cpu-0-1"], "it was killed")


CRASH = Failure(Stage.RUN, Kind.CRASH, "an illegal address")
LOST = Failure(Stage.RUN, Kind.COLLATERAL, "a neighbour's fault")
MEASURED = Measurement((1e-3,), 1, "search-v6", "mps-0-0", 52)


def test_a_device_whose_trials_only_fault_is_left_alone_with_all_its_slices(
    make_membership: MakeMembership,
) -> None:
    membership, cluster = make_membership(node("a", gpu_slices(0, 1)))
    first, second, *others = membership.slice_ids
    assert membership.has_faulted(first, [CRASH, LOST] * (MAX_FAULTS - 1)) == ()
    assert membership.has_faulted(others[0], [CRASH] * (MAX_FAULTS - 1)) == ()
    faulty = membership.has_faulted(second, [CRASH])
    assert faulty == (first, second)
    membership.leave_alone(faulty)
    assert cluster.slice_ids == set(others)
    assert cluster.restarted == []


def test_a_device_that_measures_two_trials_for_each_that_faults_goes_on(
    make_membership: MakeMembership,
) -> None:
    membership, _ = make_membership(node("a", gpu_slices(0)))
    first, *_ = membership.slice_ids
    for _ in range(10 * MAX_FAULTS):
        assert membership.has_faulted(first, [MEASURED] * MEASURED_A_FAULT + [CRASH]) == ()


def test_a_device_on_which_every_second_trial_faults_is_left_alone(
    make_membership: MakeMembership,
) -> None:
    membership, _ = make_membership(node("a", gpu_slices(0)))
    first, *_ = membership.slice_ids
    results = [CRASH, MEASURED] * (2 * MAX_FAULTS)
    assert any(membership.has_faulted(first, [result]) for result in results)


def test_the_last_device_that_only_faults_ends_the_run(make_membership: MakeMembership) -> None:
    membership, _ = make_membership(node("a", gpu_slices(0)))
    faulty = membership.has_faulted(membership.slice_ids[0], [CRASH] * MAX_FAULTS)
    with pytest.raises(DeviceError, match="16 trials more have faulted there"):
        membership.leave_alone(faulty)


# --- nodes that come and go --------------------------------------------------------------------


def test_a_node_that_joins_is_asked_once_and_gets_its_workers(
    make_membership: MakeMembership, clock: Callable[[float], None]
) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,))))
    cluster.living["b"] = node("b", cpu_slices((0,)), machine="m1")
    for _ in range(3):
        clock(LOOK_SECS)
        membership.look()
    assert cluster.surveyed_ids == ["b"]
    membership.join(answer("b", "survey"))
    assert cluster.slice_ids == {"cpu-0-0", "n1-cpu-0-0"}
    assert cluster.tuner_ids == {"tuner-0-0", "tuner-1-0"}
    assert (
        membership.lane("n1-cpu-0-0") == membership.lane("tuner-1-0") != membership.lane("cpu-0-0")
    )
    assert membership.role("n1-cpu-0-0") == "slice"


def test_workers_of_a_node_that_left_are_not_started_again(make_membership: MakeMembership) -> None:
    membership, cluster = make_membership(
        node("a", cpu_slices((0,))), node("b", cpu_slices((0,)), machine="m1")
    )
    del cluster.living["b"]
    membership.lose("n1-cpu-0-0", "its node has died")
    assert cluster.restarted == []
    assert membership.slice_ids == ("n0-cpu-0-0",)


def test_who_was_idle_on_a_node_that_left_is_lost_before_it_is_given_work(
    make_membership: MakeMembership, clock: Callable[[float], None]
) -> None:
    membership, cluster = make_membership(
        node("a", cpu_slices((0,))), node("b", cpu_slices((0,)), machine="m1")
    )
    del cluster.living["b"]
    clock(LOOK_SECS)
    assert set(membership.look()) == {"n1-cpu-0-0", "tuner-1-0"}
    assert cluster.slice_ids == set(membership.slice_ids) == {"n0-cpu-0-0"}
    assert cluster.restarted == []
    clock(LOOK_SECS)
    assert membership.look() == ()


def test_what_a_node_had_that_left_is_given_to_another_one_of_its_machine(
    make_membership: MakeMembership, clock: Callable[[float], None]
) -> None:
    membership, cluster = make_membership(
        node("a", cpu_slices((0,), (1,))), node("b", cpu_slices((0,), (1,)))
    )
    del cluster.living["a"]
    for worker_id in ("n0-cpu-0-0", "n0-cpu-0-1", "tuner-0-0", "tuner-0-1"):
        membership.lose(worker_id, "its node has died")
    assert cluster.slice_ids == set()
    clock(LOOK_SECS)
    membership.look()
    assert cluster.slice_ids == {"n1-cpu-0-0", "n1-cpu-0-1"}
    assert cluster.tuner_ids == {"tuner-1-0", "tuner-1-1"}


def test_a_device_is_named_by_its_gpu_and_cores_by_their_slice(
    make_membership: MakeMembership,
) -> None:
    membership, _ = make_membership(
        node("a", gpu_slices(7)), node("b", cpu_slices((0,)), machine="m1")
    )
    named = [membership.device(slice_id) for slice_id in membership.slice_ids]
    assert named == ["GPU-7", "GPU-7", "n1-cpu-0-0"]


def test_of_a_slice_that_joined_it_is_known_what_it_shares_and_whose_cores_it_has(
    make_membership: MakeMembership, clock: Callable[[float], None]
) -> None:
    membership, cluster = make_membership(
        node("a", gpu_slices(0)), gpu_pct=40, cpu_pct=None, slice_kind="mps"
    )
    cluster.living["b"] = node("b", gpu_slices(0, 1), machine="m1")
    clock(LOOK_SECS)
    membership.look()
    membership.join(answer("b", "survey"))
    first, second, *_ = (s for s in membership.slice_ids if s.startswith("n1-mps-0"))
    assert membership.beside(first) == (second,)
    cluster.slice_ids.discard(second)
    assert membership.beside(first) == ()
    assert membership.cores_here(first) == ()


@pytest.mark.parametrize(("is_here", "cores"), [(True, (3,)), (False, ())])
def test_cores_of_another_machine_are_not_this_machine_s(
    make_membership: MakeMembership, is_here: bool, cores: tuple[int, ...]
) -> None:
    membership, _ = make_membership(replace(node("a", cpu_slices((3,))), is_here=is_here))
    assert membership.cores_here("cpu-0-0") == cores


def test_a_node_with_another_device_is_left_out(
    make_membership: MakeMembership,
    clock: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,))))
    other = node("b", cpu_slices((0,)), machine="m1")
    cluster.living["b"] = replace(other, survey=replace(other.survey, device="another device"))
    clock(LOOK_SECS)
    membership.look()
    membership.join(answer("b", "survey"))
    assert cluster.slice_ids == {"cpu-0-0"}
    assert "host-b is left out: it has another device" in caplog.text


def test_a_node_that_leaves_before_it_answers_is_left_out(make_membership: MakeMembership) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,))))
    membership.join(answer("b", "survey", error="its node has died"))
    assert cluster.slice_ids == {"cpu-0-0"}


def test_no_more_tuners_join_than_were_asked_for(
    make_membership: MakeMembership, clock: Callable[[float], None]
) -> None:
    membership, cluster = make_membership(node("a", gpu_slices(0)), tuners=4)
    cluster.living["b"] = node("b", gpu_slices(0), machine="m1")
    clock(LOOK_SECS)
    membership.look()
    membership.join(answer("b", "survey"))
    assert len(cluster.tuner_ids) == 4
    assert len(cluster.slice_ids) == 4


def test_a_run_without_a_node_waits_for_one_and_not_for_ever(
    make_membership: MakeMembership, clock: Callable[[float], None]
) -> None:
    membership, cluster = make_membership(node("a", cpu_slices((0,))))
    del cluster.living["a"]
    membership.lose("cpu-0-0", "its node has died")
    membership.lose("tuner-0-0", "its node has died")
    clock(LOOK_SECS)
    membership.look()
    clock(WAIT_SECS)
    with pytest.raises(InfrastructureError, match="no node of the cluster has had a slice"):
        membership.look()
