"""Several nodes: what each is asked, who gets which device, and a real cluster of two raylets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from tests.lib.models import conv_net
from tests.lib.node_fixtures import cpu_slices, gpu_slices, node, settings
from tests.lib.ray_processes import (
    TOKEN,
    TWO_NODES,
    Child,
    child,
    clean_environment,
    short_folder,
    two_nodes,
)
from tunerd.cluster.layout import layout_of, open_cluster
from tunerd.cluster.nodes import (
    Node,
    TunerSpec,
    cut_beside,
    cut_once,
    is_on,
    match_slices,
    plan_tuners,
    survey_here,
    tuners_beside,
)
from tunerd.errors import ExitCode, HostError
from tunerd.system import host
from tunerd.vocabulary import SliceRequest


def ids(found: Node) -> list[str]:
    return [s.slice_id for s in found.slices]


# --- one machine, several nodes ----------------------------------------------------------------


def test_the_cores_of_a_machine_are_cut_once_however_many_nodes_it_has() -> None:
    both = cpu_slices((0, 1), (2, 3))
    first, second = cut_once([node("a", both), node("b", both)])
    assert [s.cores for s in first.slices] == [(0, 1), (2, 3)]
    assert second.slices == ()


def test_containers_with_cores_of_their_own_are_both_cut() -> None:
    found = cut_once([node("a", cpu_slices((0, 1))), node("b", cpu_slices((2, 3)))])
    assert [[s.cores for s in n.slices] for n in found] == [[(0, 1)], [(2, 3)]]


def test_only_the_cores_that_overlap_are_given_to_the_first_node() -> None:
    found = cut_once([node("a", cpu_slices((0, 1))), node("b", cpu_slices((0, 1), (2, 3)))])
    assert [s.cores for s in found[1].slices] == [(2, 3)]


def test_a_gpu_that_two_nodes_of_a_machine_see_is_cut_once_with_all_its_slices() -> None:
    first, second = cut_once([node("a", gpu_slices(0)), node("b", gpu_slices(0, 1))])
    assert [s.gpu_uuid for s in first.slices] == ["GPU-0", "GPU-0"]
    assert [s.gpu_uuid for s in second.slices] == ["GPU-1", "GPU-1"]


def test_equal_cores_of_two_machines_are_told_apart() -> None:
    cut = cut_once([node("a", cpu_slices((0,))), node("b", cpu_slices((0,)), machine="m1")])
    slices = [s for n in cut for s in n.slices]
    assert len({s.slice_id for s in slices}) == 2
    assert len({s.lane for s in slices}) == 2  # or one would wait for the other
    assert [(t.lane, t.node_id) for t in plan_tuners(cut, None)] == [
        (s.lane, n.node_id) for n in cut for s in n.slices
    ]


def test_a_single_node_with_slices_keeps_their_short_names() -> None:
    cut = cut_once([node("a"), node("b", cpu_slices((0,)))])
    assert [ids(n) for n in cut] == [[], ["cpu-0-0"]]


def test_the_driver_s_node_comes_first() -> None:
    other, near = node("a", gpu_slices(0)), node("b", gpu_slices(1), is_here=True)
    driver = node("c", gpu_slices(1), is_here=True, is_driver=True)
    cut = cut_once([other, near, driver])
    assert [n.node_id for n in cut] == ["c", "b", "a"]
    assert [len(n.slices) for n in cut] == [2, 0, 2]


def test_what_a_node_had_that_left_goes_to_another_one_of_its_machine() -> None:
    first, second = cut_once([node("a", cpu_slices((0,), (1,))), node("b", cpu_slices((0,), (1,)))])
    assert ids(cut_beside(second, [first], number=1)) == []
    left = cut_beside(second, [], number=1)
    assert ids(left) == ["n1-cpu-0-0", "n1-cpu-0-1"]
    assert cut_beside(left, [], number=1) == left
    more = tuners_beside(left, 1, [], [])
    assert [t.tuner_id for t in more] == ["tuner-1-0", "tuner-1-1"]
    assert tuners_beside(left, 1, [], more) == []


# --- tuners ------------------------------------------------------------------------------------


def test_no_tuner_works_on_cores_that_another_node_s_slices_measure_on() -> None:
    cut = cut_once([node("a", cpu_slices((0, 1))), node("b", cpu_slices((0, 1)))])
    assert plan_tuners(cut, None) == [
        TunerSpec("tuner-0-0", 2, (0, 1), cut[0].slices[0].lane, "a"),
    ]


def test_nodes_of_one_machine_share_its_cores_between_their_tuners() -> None:
    cut = cut_once([node("a", gpu_slices(0, each=1), is_here=True), node("b", cpus=4)])
    tuners = plan_tuners(cut, None)
    assert len(tuners) == 4


def test_a_node_without_slices_searches_and_builds() -> None:
    cut = cut_once([node("a", gpu_slices(0), is_here=True), node("b", machine="m1", cpus=3)])
    assert [t.node_id for t in plan_tuners(cut, None)] == ["a"] * 4 + ["b"] * 3


def test_more_tuners_than_cores_are_refused() -> None:
    with pytest.raises(HostError, match=r"--tuners 9 is more than the 4 that fit"):
        plan_tuners(cut_once([node("a", cpu_slices((0,), (1,), (2,), (3,)))]), 9)


def test_slices_on_more_cores_than_ray_hands_out_are_refused_with_what_to_do() -> None:
    cut = cut_once([node("a", cpu_slices((0, 1), (2, 3)), cpus=2)])
    with pytest.raises(HostError, match=r"take 4 cores, .* has 2 CPUs; start it with --num-cpus=4"):
        plan_tuners(cut, None)


# --- layouts -----------------------------------------------------------------------------------


def test_the_device_is_the_nodes_and_not_the_driver_s() -> None:
    found = layout_of([node("a", gpu_slices(0))], settings())
    assert found.device == "a device"


def test_nodes_with_different_devices_are_refused_by_name() -> None:
    other = node("b", gpu_slices(1), machine="m1")
    other = replace(other, survey=replace(other.survey, device="another device"))
    with pytest.raises(HostError, match=r"a device .* another device"):
        layout_of([node("a", gpu_slices(0)), other], settings())


def test_a_cluster_without_a_device_says_what_each_node_lacks() -> None:
    with pytest.raises(HostError, match="host-a: no device; host-b: no device"):
        layout_of([node("a"), node("b")], settings())


def test_only_nodes_of_a_cluster_that_asks_for_no_token_are_warned_of() -> None:
    mine, theirs = node("a", gpu_slices(0)), node("b", gpu_slices(1), machine="m1")
    anybodys = replace(theirs, survey=replace(theirs.survey, is_open=True))
    assert open_cluster(layout_of([mine, theirs], settings())) == ""
    assert "no token on host-b: " in open_cluster(layout_of([mine, anybodys], settings()))
    alone = replace(anybodys, node_id=None)  # this machine, without a cluster
    assert open_cluster(layout_of([alone], settings())) == ""


# --- which GPU Ray gave ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [("1", True), ("0", False), ("GPU-1", True), ("GPU-0", False)],
)
def test_ray_s_gpu_is_known_by_its_index_or_its_uuid(given: str, expected: bool) -> None:
    (spec,) = gpu_slices(1, each=1)
    assert is_on(spec, (given,)) is expected


def test_actors_get_the_slices_of_their_gpu_in_whatever_order_ray_chose() -> None:
    waiting = [(s, "a") for s in gpu_slices(0, 1)]
    chosen, left = match_slices(
        [("a", ("1",)), ("a", ("0",)), ("a", ("1",)), ("a", ("0",))], waiting
    )
    assert [s.slice_id for s in chosen if s] == ["mps-1-0", "mps-0-0", "mps-1-1", "mps-0-1"]
    assert left == []


def test_the_first_gpu_of_two_nodes_is_not_mixed_up() -> None:
    far, near = gpu_slices(0, each=1)[0], replace(gpu_slices(0, each=1)[0], slice_id="near")
    chosen, _ = match_slices([("near", ("0",)), ("far", ("0",))], [(far, "far"), (near, "near")])
    assert chosen == [near, far]


def test_an_actor_on_a_gpu_without_a_waiting_slice_gets_none() -> None:
    waiting = [(s, "a") for s in gpu_slices(0, 1, each=1)]
    chosen, left = match_slices([("a", ("0",)), ("a", ("0",))], waiting)
    assert [s.slice_id if s else None for s in chosen] == ["mps-0-0", None]
    assert [s.slice_id for s, _ in left] == ["mps-1-0"]


# --- surveys -----------------------------------------------------------------------------------


def test_a_survey_says_why_a_kind_cannot_be_used_here() -> None:
    if host.facts().gpus:
        pytest.skip("there is a GPU here")
    survey = survey_here(SliceRequest("mps", 40))
    assert survey.plan.slices == ()
    assert survey.plan.problem.startswith("no mps slices here: ")


# --- a real cluster ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Child]:
    with two_nodes() as found:
        yield found


def tunerd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tunerd", *arguments],
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    onnx.save(conv_net(), path)
    return path


def tune(
    tiny: Path, out: Path, address: str, *more: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    arguments = ["tune", str(tiny), "--out", str(out), "--address", address, "--trials", "4"]
    return tunerd(*arguments, "--json", *more, **environment)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param("simulated", "simulated device", marks=pytest.mark.nightly),
        ("cpu", host.facts().cpu_model),
    ],
)
def test_a_model_is_tuned_on_a_cluster_of_two_nodes(
    kind: str, device: str, cluster: Child, tiny: Path, tmp_path: Path
) -> None:
    address = cluster.said["address"]
    pct = ("--cpu-pct", "50", "--slice", kind)
    done = tune(tiny, tmp_path / "run", address, *pct, RAY_AUTH_TOKEN=TOKEN)
    assert done.returncode < 10, done.stderr
    document = json.loads(done.stdout)
    assert document["verification"]["verdict"] == "right"
    assert {p["device"] for p in document["proofs"]} == {device}
    # Both nodes see the same device, which is cut for one of them.
    assert len({p["slice_id"] for p in document["proofs"]}) == 100 // 50


@pytest.mark.nightly
def test_a_wrong_token_is_one_sentence(cluster: Child, tiny: Path, tmp_path: Path) -> None:
    done = tune(tiny, tmp_path / "run", cluster.said["address"], "--cpu-pct", "50",
                RAY_AUTH_TOKEN="8" * 64)  # fmt: skip
    assert done.returncode == ExitCode.INFRASTRUCTURE
    (line,) = done.stderr.splitlines()
    assert "does not let us in; set RAY_AUTH_TOKEN" in line


def test_a_token_that_is_missing_is_one_sentence(
    cluster: Child, tiny: Path, tmp_path: Path
) -> None:
    # Ray looks for a token at home, too, and tries twenty times to get in, a second after another.
    environment = {"HOME": str(tmp_path), "RAY_NUM_REDIS_GET_RETRIES": "2"}
    done = tune(tiny, tmp_path / "run", cluster.said["address"], "--cpu-pct", "50", **environment)
    assert done.returncode == ExitCode.INFRASTRUCTURE
    (line,) = done.stderr.splitlines()
    assert "does not let us in; set RAY_AUTH_TOKEN" in line


@pytest.mark.nightly
def test_a_cluster_that_asks_for_no_token_is_joined_with_a_warning(
    tiny: Path, tmp_path: Path
) -> None:
    said = "Ray asks for no token on "
    with (
        short_folder() as folder,
        child(TWO_NODES, RAY_TMPDIR=str(folder), RAY_USAGE_STATS_ENABLED="0") as open_to_all,
    ):
        address = ("--address", open_to_all.said["address"])
        asked = ("tune", str(tiny), "--cpu-pct", "50", "--slice", "simulated", "--trials", "4")
        # A token of ours does not close it.
        plan = tunerd(*asked, *address, "--dry-run", RAY_AUTH_TOKEN=TOKEN)
        done = tunerd(*asked, *address, "--out", str(tmp_path / "run"))
    assert plan.returncode == 0, plan.stderr
    assert " ".join(plan.stderr.split()).count(said) == 1
    assert "RAY_AUTH_MODE=token" in plan.stderr
    assert done.returncode < 10, done.stderr
    assert " ".join(done.stderr.split()).count(said) == 1


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("127.0.0.1:1", ExitCode.INFRASTRUCTURE, "nothing answers at --address 127.0.0.1:1"),
        ("ray://head:10001", ExitCode.BAD_INPUT, "is not HOST:PORT"),
        ("head", ExitCode.BAD_INPUT, "is not HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_is_one_sentence(
    address: str, code: ExitCode, said: str, tiny: Path, tmp_path: Path
) -> None:
    done = tune(tiny, tmp_path / "run", address, "--cpu-pct", "50")
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert said in line


def test_another_version_of_ray_is_one_sentence(cluster: Child, tiny: Path, tmp_path: Path) -> None:
    # A Ray that says it is of another version; the cluster's stays what it is.
    (tmp_path / "sitecustomize.py").write_text("import ray; ray.__version__ = '2.0.0'\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = tune(tiny, tmp_path / "run", cluster.said["address"], "--cpu-pct", "50",
                RAY_AUTH_TOKEN=TOKEN, PYTHONPATH=path)  # fmt: skip
    assert done.returncode == ExitCode.INFRASTRUCTURE
    (line,) = done.stderr.splitlines()
    assert "Version mismatch" in line
    assert "2.0.0" in line
