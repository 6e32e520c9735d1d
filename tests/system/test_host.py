"""Host facts, targets, the plans of GPU slices from made-up hosts, and what doctor says."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from tests.lib import ROOT
from tests.lib.models import conv_net
from tunerd.cli.doctor import doctor
from tunerd.doctor import checks
from tunerd.errors import ExitCode, HostError
from tunerd.frontend.model import read_model
from tunerd.runs.plan import tuning_bytes
from tunerd.slices import whole
from tunerd.slices.mps import mps_slice
from tunerd.system import cores, gpus, host, targets
from tunerd.system.gpus import GpuFacts, GpuState
from tunerd.system.host import HostFacts
from tunerd.vocabulary import Conditions, SliceRequest, SliceSpec, to_json

UUID = "GPU-11111111-2222-3333-4444-555555555555"
H200 = GpuFacts(
    index=0,
    uuid=UUID,
    name="NVIDIA H200",
    mem_bytes=139 << 30,
    mem_free_bytes=138 << 30,
    compute_capability="9.0",
    sm_count=132,
    mig=False,
    compute_mode="default",
    l2_bytes=60 << 20,
)
CLIENT = {
    "device": "NVIDIA H200",
    "sm_count": 52,
    "mps_enabled": True,
    "compute_capability": "9.0",
    "pid": 4242,
}


@pytest.fixture
def runtime_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("r", numbered=True)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(folder))


@pytest.fixture
def gpu_host(monkeypatch: pytest.MonkeyPatch, runtime_folder: None) -> HostFacts:
    """A host of 16 cores with one H200."""
    monkeypatch.setattr(mps_slice, "driver_library_problem", lambda: "")
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((H200,), ""))
    monkeypatch.setattr(gpus, "driver_versions", lambda: ("580.159.04", "13.0"))
    return dataclasses.replace(
        host.facts(), cores=tuple(range(16)), core_quota=None, mps_control="/usr/bin/control"
    )


def with_gpu(facts: HostFacts, **changes: object) -> HostFacts:
    return dataclasses.replace(facts, gpus=(dataclasses.replace(H200, **changes),))  # type: ignore[arg-type]


# --- facts -------------------------------------------------------------------------------------


def test_facts_can_be_stored_as_json() -> None:
    facts = host.facts()
    stored = json.loads(json.dumps(to_json(facts)))
    assert stored["cores"] == sorted(os.sched_getaffinity(0))
    assert dict(map(tuple, stored["packages"]))["ray"] == importlib.metadata.version("ray")


def test_facts_name_the_commit_of_a_checkout() -> None:
    if not (ROOT / ".git").exists():
        assert host.facts().commit is None
        return
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert host.facts().commit == said.strip()


def test_a_host_without_a_driver_says_why_it_has_no_gpu() -> None:
    facts = host.facts()
    if facts.gpus:
        pytest.skip("this machine has a GPU")
    assert "driver" in facts.no_gpu
    assert gpus.conditions(UUID) == Conditions()


class SeveralGpus:
    """NVML of GPUs of which some do not answer a function, given by index: (function, error)."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int, failing: dict[int, tuple[str, str]]) -> None:
        self._count, self._failing = count, failing

    def _told(self, function: str, index: int, value: Any) -> Any:
        failing, error = self._failing.get(index, ("", ""))
        if failing == function:
            raise self.NVMLError(error)
        return value

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return int(self._told("nvmlDeviceGetHandleByIndex", index, index))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, index: int) -> str:
        return str(self._told("nvmlDeviceGetName", index, "NVIDIA H200"))

    def nvmlDeviceGetUUID(self, index: int) -> str:
        return str(self._told("nvmlDeviceGetUUID", index, f"GPU-{index}"))

    def nvmlDeviceGetCudaComputeCapability(self, index: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, index: int) -> SimpleNamespace:
        memory = SimpleNamespace(total=139 << 30, free=138 << 30)
        return self._told("nvmlDeviceGetMemoryInfo", index, memory)  # type: ignore[no-any-return]

    def nvmlDeviceGetNumGpuCores(self, index: int) -> int:
        return 132 * 128


LOST = ("nvmlDeviceGetHandleByIndex", "GPU is lost")


def with_failing(
    monkeypatch: pytest.MonkeyPatch, count: int, failing: dict[int, tuple[str, str]]
) -> HostFacts:
    nvml = SeveralGpus(count, failing)
    monkeypatch.setattr(gpus, "nvml_library", lambda: (nvml, ""))
    monkeypatch.setattr(mps_slice, "driver_library_problem", lambda: "")
    return host.facts()


@pytest.mark.parametrize(
    "failing",
    [
        LOST,
        ("nvmlDeviceGetName", "GPU requires reset"),
        ("nvmlDeviceGetUUID", "Unknown Error"),
        ("nvmlDeviceGetMemoryInfo", "Not Supported"),
    ],
)
def test_a_gpu_that_does_not_answer_is_left_out_and_named(
    failing: tuple[str, str], monkeypatch: pytest.MonkeyPatch, runtime_folder: None
) -> None:
    facts = with_failing(monkeypatch, 2, {1: failing})
    assert [gpu.uuid for gpu in facts.gpus] == ["GPU-0"]
    ((index, problem),) = ((gpu.index, gpu.problem) for gpu in facts.failed_gpus)
    assert index == 1
    assert problem.startswith("GPU 1 ")
    assert failing[1] in problem
    assert {spec.gpu_uuid for spec in whole.plan_for(facts, SliceRequest("whole", 100)).slices} == {
        "GPU-0"
    }
    found = {finding.name: finding for finding in checks._gpus(facts)}
    assert found["GPU 0"].status is checks.Status.OK
    assert found["GPU 1"].status is checks.Status.WARN
    assert failing[1] in found["GPU 1"].fact
    assert found["GPU 1"].fix


def test_what_nvml_does_not_tell_of_a_gpu_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def sms_and_l2(uuid: str) -> tuple[int, int]:
        asked.append(uuid)
        return 142, 96 << 20

    monkeypatch.setattr(gpus, "sms_and_l2", sms_and_l2)
    assert with_failing(monkeypatch, 1, {}).gpus[0].l2_bytes == 60 << 20
    assert asked == []  # of an H200 both are known
    monkeypatch.setattr(SeveralGpus, "nvmlDeviceGetName", lambda *_: "NVIDIA L40S")
    (gpu,) = with_failing(monkeypatch, 1, {}).gpus
    assert (gpu.sm_count, gpu.l2_bytes) == (132, 96 << 20)  # by NVML's cores, and by CUDA
    monkeypatch.setattr(SeveralGpus, "nvmlDeviceGetCudaComputeCapability", lambda *_: (13, 0))
    (gpu,) = with_failing(monkeypatch, 1, {}).gpus
    assert gpu.sm_count == 142


def test_a_gpu_of_which_cuda_tells_nothing_has_no_sizes() -> None:
    assert gpus.sms_and_l2("GPU-that-is-not-there") == (None, None)


def test_where_no_gpu_answers_plans_and_doctor_say_which_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = with_failing(monkeypatch, 1, {0: LOST})
    for problem in (
        whole.plan_for(facts, SliceRequest("whole", 100)).problem,
        mps_slice.plan_for(facts, SliceRequest("mps", 40)).problem,
    ):
        assert "GPU 0" in problem
        assert "GPU is lost" in problem
    statuses = {finding.name: finding.status for finding in checks._gpus(facts)}
    assert statuses == {"driver": checks.Status.OK, "GPU 0": checks.Status.FAIL}


@pytest.mark.parametrize(
    ("setting", "named"), [("0", []), ("1", [1]), ("0,1", [1]), ("GPU-1", [1]), ("", [])]
)
def test_a_failed_gpu_that_is_hidden_is_not_named(
    setting: str, named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    facts = with_failing(monkeypatch, 2, {1: LOST})
    assert [gpu.index for gpu in facts.failed_gpus] == named


def test_a_driver_that_cannot_count_its_gpus_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SeveralGpus(1, {})

    def broken() -> int:
        raise nvml.NVMLError("Driver/library version mismatch")

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", broken)
    monkeypatch.setattr(nvml, "nvmlSystemGetCudaDriverVersion_v2", broken)
    monkeypatch.setattr(gpus, "nvml_library", lambda: (nvml, ""))
    facts = host.facts()
    assert facts.gpus == ()
    assert "version mismatch" in facts.no_gpu


def test_siblings_partition_the_cores_of_this_process() -> None:
    facts = host.facts()
    assert sorted(core for group in facts.core_siblings for core in group) == list(facts.cores)


def test_the_quota_of_a_cgroup_limits_the_usable_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")  # of a parent: it counts too
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    monkeypatch.setattr(cores, "own_cgroups", lambda: ["0::/a/b"])
    assert cores.core_quota(tmp_path) == 1.5
    facts = dataclasses.replace(host.facts(), cores=(0, 1, 2, 3), core_quota=1.5)
    assert facts.usable_cores == 1


def test_an_old_cgroup_quota_is_read_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cpu,cpuacct" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(cores, "own_cgroups", lambda: ["4:cpu,cpuacct:/job"])
    assert cores.core_quota(tmp_path) == 2.0


def test_the_cpu_target_names_this_cpu_and_tvm_accepts_it() -> None:
    from tvm.target import Target

    spec = targets.cpu_target_json(2)
    target = Target(json.loads(spec.json))
    assert target.attrs["mcpu"]
    assert target.attrs["num-cores"] == 2
    assert target.attrs["opt-level"] == 2


def test_features_that_a_hypervisor_hides_are_switched_off() -> None:
    llvm = {"avx2", "avx512f", "avx512vnni", "fma", "popcnt"}
    flags = ["avx2", "avx512f", "fma"]
    assert targets.hidden_features(llvm, flags) == {"avx512vnni"}
    assert targets.hidden_features(llvm, [*flags, "avx512_vnni"]) == set()
    assert targets.hidden_features(llvm, []) == set()  # no x86


def test_the_cuda_target_has_the_limits_that_tvm_gives_the_architecture() -> None:
    from tvm.target import Target

    mine = Target(json.loads(targets.cuda_target("9.0", l2_bytes=50 << 20).json))
    tvms = dict(Target("nvidia/nvidia-h100").attrs)
    assert mine.attrs["arch"] == "sm_90"
    assert {k: v for k, v in mine.attrs.items() if k != "arch"} == {
        k: v for k, v in tvms.items() if k != "arch"
    }


# --- plans -------------------------------------------------------------------------------------


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


# --- proofs ------------------------------------------------------------------------------------

SPEC = SliceSpec("mps-0-0", "mps", 40, gpu_uuid=UUID)


def test_a_client_of_the_daemon_with_its_share_of_sms_is_a_proof(gpu_host: HostFacts) -> None:
    proof = mps_slice.proof_of(SPEC, CLIENT, listed=True)
    assert (proof.sm_count, proof.device_sm_count, proof.attached) == (52, 132, True)
    assert (proof.mechanism, proof.runner_pid, proof.driver) == ("mps", 4242, "580.159.04")


def test_where_the_client_list_cannot_tell_the_client_decides(gpu_host: HostFacts) -> None:
    assert mps_slice.proof_of(SPEC, CLIENT, listed=None).attached


@pytest.mark.parametrize(
    ("changes", "listed", "words"),
    [
        ({"mps_enabled": False}, None, "without MPS"),
        ({}, False, "does not list"),
        ({"sm_count": 132}, True, "132 SMs"),
        ({"sm_count": 56}, True, "56 SMs"),
    ],
)
def test_a_share_that_was_not_obtained_is_refused(
    gpu_host: HostFacts, changes: dict[str, object], listed: bool | None, words: str
) -> None:
    with pytest.raises(HostError, match=words):
        mps_slice.proof_of(SPEC, CLIENT | changes, listed=listed)


def test_a_whole_gpu_is_refused_where_something_caps_it(gpu_host: HostFacts) -> None:
    spec = dataclasses.replace(SPEC, pct=100)
    facts = CLIENT | {"mps_enabled": False, "sm_count": 132}
    assert whole.proof_of(spec, facts).sm_count == 132
    with pytest.raises(HostError, match="52 of 132"):
        whole.proof_of(spec, facts | {"sm_count": 52})
    with pytest.raises(HostError, match="through MPS"):
        whole.proof_of(spec, facts | {"mps_enabled": True})


# --- doctor ------------------------------------------------------------------------------------


def test_doctor_reports_this_machine_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor(json=True)
    report = json.loads(capsys.readouterr().out)
    failed = [f for f in report["findings"] if f["status"] == "fail"]
    assert code == (ExitCode.HOST_NOT_CAPABLE if failed else 0)
    assert report["cpu_tuning"], failed
    assert all(f["fix"] for f in failed)
    assert {"cores", "packages", "TVM", "Ray"} <= {f["name"] for f in report["findings"]}


def test_doctor_knows_the_versions_that_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = dict(
        match.groups()
        for requirement in project["project"]["dependencies"]
        if (match := re.fullmatch(r"([\w-]+)(==\S+|>=\S+)", requirement))
        and match[1] in checks.PINS
    )
    assert pinned == checks.PINS


def test_doctor_says_that_the_runtime_folder_cannot_be_used(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(tmp_path / "missing" / "r"))
    (finding,) = checks._attach(with_gpu(gpu_host))
    assert finding.status is checks.Status.FAIL
    assert "TUNERD_RUNTIME_FOLDER" in finding.fact


def test_doctor_says_that_every_process_compiles_modules_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (finding,) = checks._bytecode(dataclasses.replace(host.facts(), not_compiled=()))
    assert finding.status is checks.Status.OK
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert host.facts().not_compiled == ()  # the first process that imports them keeps it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    facts = host.facts()
    assert {"ray", "tvm", "tunerd"} <= set(facts.not_compiled)
    (finding,) = checks._bytecode(facts)
    assert finding.status is checks.Status.WARN
    assert "PYTHONDONTWRITEBYTECODE" in finding.fact
    assert f"{', '.join(facts.not_compiled)} have none, and" in finding.fact
    assert "compiles them again" in finding.fact
    assert "-m compileall -q " in finding.fix


def test_doctor_says_of_one_module_that_it_has_no_bytecode_and_compiles_no_whole_checkout() -> None:
    (finding,) = checks._bytecode(dataclasses.replace(host.facts(), not_compiled=("tunerd",)))
    assert finding.fact.startswith("tunerd has none, and")
    assert "compiles it again" in finding.fact
    command, _, _ = finding.fix.partition(", or")
    assert command.split()[-2:] == ["-q", str(Path(host.__file__).parents[1])]


def test_of_what_is_installed_the_folder_of_all_packages_is_compiled() -> None:
    installed = Path("/v/lib/python3.12/site-packages")
    assert checks._compiled_with(installed / "ray" / "__init__.py") == str(installed)


def test_an_extra_is_installed_from_the_checkout_where_there_is_one(tmp_path: Path) -> None:
    assert host.install_command("cuda", tmp_path) == "pip install 'tunerd[cuda]'"
    (tmp_path / "pyproject.toml").touch()
    assert host.install_command("cuda", tmp_path) == "pip install '.[cuda]'"


def test_doctor_says_once_how_cuda_libraries_are_installed(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tunerd.builder.nvrtc.missing_for_builds", lambda: "Builds for CUDA need nvrtc"
    )
    for facts in (with_gpu(gpu_host), dataclasses.replace(gpu_host, gpus=())):
        (finding,) = checks._cuda_libraries(facts)
        assert f"{finding.fact}; {finding.fix}".count("pip install") == 1


def test_doctor_says_which_libraries_are_there_and_how_to_get_them(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "missing", lambda name: "pip install it")
    for finding in checks._kernel_libraries(gpu_host):
        assert (finding.status, finding.fix) == (checks.Status.WARN, "pip install it")
        assert "only for --libraries" in finding.fact
    monkeypatch.setattr(checks, "missing", lambda name: None)
    monkeypatch.setattr(checks, "wheel_version", lambda name: "13.1.0.3")
    facts = {f.fact for f in checks._kernel_libraries(gpu_host)}
    assert facts == {"13.1.0.3"}


def test_doctor_finds_who_listens_on_a_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        addresses = checks.listening(listener.getsockname()[1])
    assert addresses == ["127.0.0.1"]
