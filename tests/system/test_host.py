"""Host facts and targets."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib import ROOT
from tests.lib.gpu_hosts import UUID, runtime_folder  # noqa: F401  fixtures
from tunerd.doctor import checks
from tunerd.slices import whole
from tunerd.slices.mps import mps_slice
from tunerd.system import cores, gpus, host, targets
from tunerd.system.host import HostFacts
from tunerd.vocabulary import Conditions, SliceRequest, to_json


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


def test_fields_of_the_cpu_are_those_of_its_first_core_and_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    assert cores.cpu_field("flags", tmp_path / "none") == ""
    path.write_text("model name\t: CPU X\nflags\t\t: fma avx2\n\nmodel name\t: CPU Y\n")
    assert cores.cpu_field("model name", path) == "CPU X"
    path.unlink()
    assert cores.cpu_field("flags", path) == "fma avx2"
    assert cores.cpu_field("stepping", path) == ""


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


def test_features_that_the_kernel_shows_of_a_cpu_that_llvm_takes_for_another_are_switched_on() -> (
    None
):
    llvm = {"avx", "avx2", "fma", "sse4.2"}
    flags = ["avx", "avx2", "fma", "sse4_2", "amx_int8", "amx_tile", "avx512_vnni", "avx512_fp16"]
    assert targets.shown_features(llvm, flags) == {"amx-int8", "amx-tile", "avx512vnni"}
    assert targets.shown_features({*llvm, "avx512vnni"}, flags[:4]) == set()
    assert targets.shown_features(llvm, []) == set()  # no x86


def test_the_cuda_target_has_the_limits_that_tvm_gives_the_architecture() -> None:
    from tvm.target import Target

    mine = Target(json.loads(targets.cuda_target("9.0", l2_bytes=50 << 20).json))
    tvms = dict(Target("nvidia/nvidia-h100").attrs)
    assert mine.attrs["arch"] == "sm_90"
    assert {k: v for k, v in mine.attrs.items() if k != "arch"} == {
        k: v for k, v in tvms.items() if k != "arch"
    }


def test_an_artifact_can_say_what_it_needs_of_a_cpu() -> None:
    named = cores.cpu_field("flags").split()
    needed = targets.cpu_features(targets.cpu_target_json(1))
    assert "avx2" in needed or "avx2" not in named
    assert targets.hidden_features({*needed}, named) == set()
    assert targets.cpu_features(targets.cuda_target("9.0")) == []
