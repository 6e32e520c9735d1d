"""The plans of GPU slices, from made-up hosts."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.lib.gpu_hosts import H200, UUID, gpu_host, runtime_folder, with_gpu  # noqa: F401  fixtures
from tests.lib.models import conv_net
from tunerd.frontend.model import read_model
from tunerd.runs.plan import tuning_bytes
from tunerd.slices import whole
from tunerd.slices.mps import mps_slice
from tunerd.system import host
from tunerd.system.gpus import GpuState
from tunerd.system.host import HostFacts
from tunerd.vocabulary import SliceRequest


@pytest.mark.parametrize(("pct", "sms"), [(100, 132), (40, 52), (10, 12)])
def test_a_share_gives_the_sms_that_were_measured_on_an_h200(pct: int, sms: int) -> None:
    assert mps_slice.expected_sms(132, pct) == sms


@pytest.mark.parametrize(("pct", "count"), [(40, 2), (50, 2), (51, 1), (10, 10), (100, 1)])
def test_as_many_slices_are_planned_as_shares_fit(
    gpu_host: HostFacts, pct: int, count: int
) -> None:
    plan = mps_slice.plan_for(with_gpu(gpu_host), SliceRequest("mps", pct))
    assert [s.slice_id for s in plan.slices] == [f"mps-0-{i}" for i in range(count)]
    assert f"{count} slices of {pct}%" in plan.bound


def test_the_environment_of_a_planned_slice_is_complete(gpu_host: HostFacts) -> None:
    (first, _) = mps_slice.plan_for(with_gpu(gpu_host), SliceRequest("mps", 40)).slices
    environment = dict(first.environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == UUID
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=56934M"  # 40% of 139 GiB
    assert environment["CUDA_MPS_PIPE_DIRECTORY"].endswith("/pipe")


def test_an_external_daemon_is_named_in_the_environment(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/theirs")
    plan = mps_slice.plan_for(with_gpu(gpu_host), SliceRequest("mps", 40, mps="external"))
    assert dict(plan.slices[0].environment)["CUDA_MPS_PIPE_DIRECTORY"] == "/run/theirs"


def serving(facts: HostFacts, free_gib: int) -> HostFacts:
    """Return a host whose GPU serves others, who leave so much of its memory."""
    gpu = dataclasses.replace(facts.gpus[0], mem_free_bytes=free_gib << 30)
    return dataclasses.replace(facts, gpus=(gpu,))


@pytest.mark.parametrize(("free_gib", "count"), [(5, 2), (21, 10), (100, 10), (1, 0)])
def test_what_others_leave_of_the_memory_bounds_the_slices(
    gpu_host: HostFacts, free_gib: int, count: int
) -> None:
    facts = serving(with_gpu(gpu_host), free_gib)
    plan = mps_slice.plan_for(facts, SliceRequest("mps", 10, if_shared="narrow"))
    assert len(plan.slices) == count
    if count in (0, 2):
        left = f"{free_gib} GiB of GPU memory, which others leave, hold {count} slices of 2 GiB"
        assert left in (plan.problem or plan.bound)
    for spec in plan.slices:  # and none may take what others have
        (limit,) = re.findall(
            r"0=(\d+)M", dict(spec.environment)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
        )
        assert int(limit) * count <= (free_gib << 10)
    plan = mps_slice.plan_for(facts, SliceRequest("mps", 10))  # nobody looks
    assert len(plan.slices) == 10


def test_a_run_of_a_model_for_several_tenants_needs_the_weights_of_all(tmp_path: Path) -> None:
    onnx.save(conv_net(), path := tmp_path / "net.onnx")
    one, four = (read_model(path, tenants=tenants) for tenants in (1, 4))
    weights = one.graph.weight_bytes()
    assert weights == 4 * sum(np.prod(w.dims, dtype=int) for w in conv_net().graph.initializer)
    assert tuning_bytes(four) - tuning_bytes(one) == 3 * (tuning_bytes(one) - (1 << 30))
    assert tuning_bytes(one) >= weights + (1 << 30)


def test_a_large_model_has_fewer_slices_beside_others(gpu_host: HostFacts) -> None:
    request = SliceRequest("mps", 25, if_shared="narrow", mem_bytes=6 << 30)
    plan = mps_slice.plan_for(serving(with_gpu(gpu_host), 13), request)
    assert len(plan.slices) == 2


@pytest.mark.parametrize("kind", ["mps", "whole"])
def test_a_gpu_that_serves_others_can_be_refused(kind: str, gpu_host: HostFacts) -> None:
    plan_for = {"mps": mps_slice.plan_for, "whole": whole.plan_for}[kind]
    request = SliceRequest(kind, 100, if_shared="refuse")
    assert plan_for(with_gpu(gpu_host), request).slices
    plan = plan_for(serving(with_gpu(gpu_host), 100), request)
    assert plan.slices == ()
    assert "others hold 39.0 GiB of GPU 0, and --if-shared refuse" in plan.problem
    narrow = dataclasses.replace(request, if_shared="narrow")
    assert "leave" in plan_for(serving(with_gpu(gpu_host), 1), narrow).problem


@pytest.mark.parametrize(("mps", "times"), [("own", "2"), ("external", "5.0")])
def test_what_a_run_may_cost_others_is_said_before_it_starts(
    mps: Any, times: str, gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = GpuState((11, 12), None, None, None, 63, None, None)
    monkeypatch.setattr(mps_slice, "gpu_state", lambda uuid, samples: busy)
    request = SliceRequest("mps", 40, if_shared="narrow", mps=mps)
    for facts in (with_gpu(gpu_host), serving(with_gpu(gpu_host), 100)):
        plan = mps_slice.beside_others(mps_slice.plan_for(facts, request), facts, request)
        if facts.gpus[0].mem_free_bytes == H200.mem_free_bytes:
            assert plan.note == ""
            continue
        assert plan.note.startswith(
            "GPU 0 serves others, too: 2 processes hold 39.0 GiB and keep it 63% busy. 2 slices "
            "take up to about 4.00 GiB of the 100 GiB that are free. While kernels are measured, "
            f"what runs there may take up to about {times} times as long"
        )


def test_host_cores_bound_the_number_of_slices_and_the_plan_says_so(gpu_host: HostFacts) -> None:
    few = dataclasses.replace(with_gpu(gpu_host), cores=(0, 1, 2))
    plan = mps_slice.plan_for(few, SliceRequest("mps", 10))
    assert len(plan.slices) == 3
    assert "3 host cores" in plan.bound


def test_gpu_memory_bounds_the_number_of_slices_and_the_plan_says_so(gpu_host: HostFacts) -> None:
    plan = mps_slice.plan_for(with_gpu(gpu_host, mem_bytes=8 << 30), SliceRequest("mps", 10))
    assert len(plan.slices) == 4
    assert "8 GiB" in plan.bound


def test_the_client_limit_of_mps_bounds_the_number_of_slices(gpu_host: HostFacts) -> None:
    many = dataclasses.replace(with_gpu(gpu_host, sm_count=400), cores=tuple(range(128)))
    plan = mps_slice.plan_for(many, SliceRequest("mps", 1))
    assert len(plan.slices) == mps_slice.MPS_CLIENT_LIMIT
    assert "clients" in plan.bound


def test_fewer_slices_can_be_asked_for_and_more_cannot(gpu_host: HostFacts) -> None:
    assert (
        len(mps_slice.plan_for(with_gpu(gpu_host), SliceRequest("mps", 40, per_device=1)).slices)
        == 1
    )
    plan = mps_slice.plan_for(with_gpu(gpu_host), SliceRequest("mps", 40, per_device=3))
    assert plan.slices == ()
    assert "3 slices per GPU do not fit: 2 slices of 40%" in plan.problem


def test_a_share_under_two_sms_is_refused_with_the_least_that_works(gpu_host: HostFacts) -> None:
    plan = mps_slice.plan_for(with_gpu(gpu_host), SliceRequest("mps", 1))
    assert plan.slices == ()
    assert "at least 2%" in plan.problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mig": True}, "MIG"),
        ({"compute_mode": "prohibited"}, "prohibited"),
        ({"compute_capability": "6.1"}, "Volta"),
    ],
)
def test_a_gpu_that_mps_cannot_cut_is_named_with_the_reason(
    gpu_host: HostFacts, changes: dict[str, object], words: str
) -> None:
    usable = mps_slice.usability_of(with_gpu(gpu_host, **changes))
    assert not usable.ok
    assert words in usable.why
    assert "NVIDIA H200" in usable.why


def test_an_exclusive_process_gpu_is_used_as_it_is(gpu_host: HostFacts) -> None:
    assert mps_slice.usability_of(with_gpu(gpu_host, compute_mode="exclusive-process")).ok


def test_a_missing_control_program_is_named_with_its_package(gpu_host: HostFacts) -> None:
    usable = mps_slice.usability_of(dataclasses.replace(with_gpu(gpu_host), mps_control=None))
    assert not usable.ok
    assert "nvidia-compute-utils" in usable.why


@pytest.mark.parametrize("kind", [mps_slice.MpsSlice, whole.WholeSlice])
def test_a_host_without_a_gpu_plans_nothing_and_says_what_is_missing(
    kind: type[mps_slice.MpsSlice] | type[whole.WholeSlice],
) -> None:
    if host.facts().gpus:
        pytest.skip("this machine has a GPU")
    assert not kind.usability().ok
    plan = kind.plan(SliceRequest(kind.kind, 40))
    assert plan.slices == ()
    assert "no GPU" in plan.problem


def test_a_whole_slice_is_one_for_each_gpu_without_any_daemon(gpu_host: HostFacts) -> None:
    (only,) = whole.plan_for(with_gpu(gpu_host), SliceRequest("whole", 100)).slices
    assert not Path(dict(only.environment)["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert "no whole one" in whole.plan_for(with_gpu(gpu_host), SliceRequest("whole", 40)).problem
