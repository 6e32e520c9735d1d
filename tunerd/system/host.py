"""Facts about this machine: GPUs, driver, MPS, cores, packages, commit. Creates no CUDA context.

Everything works without a driver and without NVML; `HostFacts.no_gpu` says why there is no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.vocabulary import Conditions, TargetSpec

_ROOT = Path(__file__).resolve().parents[1]  # the checkout, where this is one
MPS_CONTROL = "nvidia-cuda-mps-control"
_IMPORTED = ("tunerd", "ray", "tvm", "xgboost", "pandas", "onnx")
PACKAGES = (
    "tunerd",
    "apache-tvm",
    "apache-tvm-ffi",
    "ray",
    "nvidia-ml-py",
    "numpy",
    "onnx",
    "onnxslim",
    "onnxruntime",
    "xgboost",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
)

# FP32 cores of one SM: CUDA C++ Programming Guide, "Arithmetic Instructions" (results per clock).
_CORES_PER_SM = {
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (12, 0): 128,
    (12, 1): 128,
}
# NVML does not tell the size of the L2; these are cudaDeviceProp::l2CacheSize.
_L2_BYTES = {"H200": 60 << 20, "H100": 50 << 20, "A100": 40 << 20}

_NVML_CLOCK_SM, _NVML_TEMPERATURE_GPU = 1, 0  # nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t
_COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}


@dataclass(frozen=True)
class GpuFacts:
    """One physical GPU, as NVML tells it."""

    index: int
    uuid: str
    name: str
    mem_bytes: int
    mem_free_bytes: int
    compute_capability: str  # "9.0"
    sm_count: int | None  # None: the architecture is not in the table of cores per SM
    mig: bool
    compute_mode: str  # "default", "exclusive-process", "prohibited"
    l2_bytes: int | None = None


@dataclass(frozen=True)
class FailedGpu:
    """One physical GPU that NVML lists and that cannot be used."""

    index: int
    problem: str  # a sentence that names it


@dataclass(frozen=True)
class HostFacts:
    """What a report and the records keep about a machine."""

    hostname: str
    platform: str
    cpu_model: str
    cores: tuple[int, ...]  # those that this process may use (affinity)
    core_quota: float | None  # cores' worth of time that the cgroup allows; None: no limit
    core_siblings: tuple[tuple[int, ...], ...]  # hardware threads of one core, within `cores`
    mem_bytes: int  # the smaller of the machine's and the cgroup's
    gpus: tuple[GpuFacts, ...]
    no_gpu: str  # why there is no GPU; "" where there is one
    failed_gpus: tuple[FailedGpu, ...]  # beside `gpus`
    driver: str
    cuda_version: str  # the newest that the driver supports
    mps_control: str | None  # path of nvidia-cuda-mps-control
    python: str
    packages: tuple[tuple[str, str], ...]
    not_compiled: tuple[str, ...]  # modules that every process of a run compiles anew
    commit: str | None  # of tunerd's own checkout, if it is one

    @property
    def usable_cores(self) -> int:
        """Whole cores that this process can keep busy, by affinity and quota; at least one."""
        count = len(self.cores)
        if self.core_quota is not None:
            count = min(count, int(self.core_quota))
        return max(1, count)


def shown(command: Sequence[str]) -> list[str]:
    """Return a command without the places that only this machine has, to stand beside a figure."""
    return [Path(part).name if part.startswith("/") else part for part in command]


def facts() -> HostFacts:
    """Collect the facts anew; takes some milliseconds, with NVML's start some hundred."""
    found_gpus, no_gpu = gpus()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    driver, cuda_version = driver_versions()
    return HostFacts(
        hostname=platform.node(),
        platform=platform.platform(),
        cpu_model=_cpu_field("model name") or platform.processor() or platform.machine(),
        cores=cores,
        core_quota=core_quota(),
        core_siblings=_siblings(cores),
        mem_bytes=memory_bytes(),
        gpus=found_gpus,
        no_gpu=no_gpu,
        failed_gpus=failed_gpus(),
        driver=driver,
        cuda_version=cuda_version,
        mps_control=shutil.which(MPS_CONTROL),
        python=platform.python_version(),
        packages=tuple((name, v) for name in PACKAGES if (v := _version(name)) is not None),
        not_compiled=tuple(name for name in _IMPORTED if _is_compiled_anew(name)),
        commit=_commit(),
    )


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of the largest cache that a core of this machine uses; 0 where none tells."""
    sizes = [0]
    for path in folder.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


# --- GPUs --------------------------------------------------------------------------------------


@functools.cache
def nvml_library() -> tuple[Any, str]:
    """Return (pynvml, "") once it has started, or (None, why it has not)."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None, "the package nvidia-ml-py is not installed; run pip install nvidia-ml-py"
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA driver answers here ({error}); install one, or use --cpu-pct"
    return pynvml, ""


@functools.cache
def _handle(gpu_uuid: str) -> Any:
    nvml, _ = nvml_library()
    return nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)


def driver_versions() -> tuple[str, str]:
    """Return the driver's version and the newest CUDA that it supports; "" without a driver."""
    nvml, _ = nvml_library()
    if nvml is None:
        return "", ""
    try:
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return nvml.nvmlSystemGetDriverVersion(), f"{number // 1000}.{number % 1000 // 10}"
    except nvml.NVMLError:
        return "", ""


def gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Return the GPUs that work and that CUDA_VISIBLE_DEVICES leaves to us, and why none does."""
    found, _, why = _looked()
    return found, why


def failed_gpus() -> tuple[FailedGpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to us and that cannot be used."""
    return _looked()[1]


def _looked() -> tuple[tuple[GpuFacts, ...], tuple[FailedGpu, ...], str]:
    """Ask each GPU for its facts: one that is lost answers nothing, or some of it."""
    nvml, why = nvml_library()
    if nvml is None:
        return (), (), why
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return (), (), f"the NVIDIA driver does not count its GPUs ({error}); restart the machine"
    found, failed = [], []
    for index in range(count):
        try:
            gpu = _gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)
        except nvml.NVMLError as error:
            if _is_visible(index, None):
                problem = f"GPU {index} cannot be used: NVML says '{error}' of it"
                failed.append(FailedGpu(index, problem))
            continue
        if _is_visible(index, gpu.uuid):
            found.append(gpu)
    if found:
        why = ""
    elif failed:
        why = "; ".join(gpu.problem for gpu in failed)
        why += "; reset it, restart the machine, or use --cpu-pct"
    elif count:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        why = f"CUDA_VISIBLE_DEVICES is '{setting}' and hides every GPU; unset it"
    else:
        why = "the NVIDIA driver lists no GPU; pass one to this machine or container"
    return tuple(found), tuple(failed), why


def _gpu(nvml: Any, handle: Any, index: int) -> GpuFacts:
    """Return the facts of a GPU; raises NVMLError where it does not tell those that are needed."""

    def ask(function: str, *args: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *args)
        except (nvml.NVMLError, AttributeError):  # not supported by this device or driver
            return None

    name = nvml.nvmlDeviceGetName(handle)
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    cores = ask("nvmlDeviceGetNumGpuCores")
    per_sm = _CORES_PER_SM.get(capability)
    mig = ask("nvmlDeviceGetMigMode")
    return GpuFacts(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=name,
        mem_bytes=memory.total,
        mem_free_bytes=memory.free,
        compute_capability="{}.{}".format(*capability),
        sm_count=cores // per_sm if cores and per_sm else None,
        mig=bool(mig and mig[0]),
        compute_mode=_COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode") or 0, "unknown"),
        l2_bytes=next((size for part, size in _L2_BYTES.items() if part in name), None),
    )


def _is_visible(index: int, uuid: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves this GPU to us; indices are taken as NVML's.

    A GPU that does not tell its UUID may be any that is named by one.
    """
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Ray empties the variable in workers that hold no GPU: that hides nothing from a planner.
    if setting is None or (not setting and "RAY_RAYLET_PID" in os.environ):
        return True
    wanted = [item.strip() for item in setting.split(",") if item.strip()]
    return any(
        item == str(index) or (item.startswith("GPU-") and (uuid is None or uuid.startswith(item)))
        for item in wanted
    )


def ask_gpu(gpu_uuid: str, function: str, *args: Any) -> Any:
    """Return what a function of NVML says of a GPU; None where it cannot tell. Never raises."""
    nvml, _ = nvml_library()
    if nvml is None:
        return None
    try:
        return getattr(nvml, function)(_handle(gpu_uuid), *args)
    except (nvml.NVMLError, AttributeError):  # not of this GPU, driver or nvidia-ml-py
        return None


def conditions(gpu_uuid: str) -> Conditions:
    """Read clock, temperature and power of a GPU now. Cheap: handles are kept; never raises."""
    milliwatts = ask_gpu(gpu_uuid, "nvmlDeviceGetPowerUsage")
    return Conditions(
        sm_clock_mhz=ask_gpu(gpu_uuid, "nvmlDeviceGetClockInfo", _NVML_CLOCK_SM),
        temperature_c=ask_gpu(gpu_uuid, "nvmlDeviceGetTemperature", _NVML_TEMPERATURE_GPU),
        power_w=None if milliwatts is None else milliwatts / 1000,
    )


# --- cores and memory --------------------------------------------------------------------------


def core_quota(cgroup_root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores' worth of time the cgroups of this process allow; None: no limit."""
    limits = []
    for folder in _cgroup_folders(cgroup_root, "cpu"):
        try:
            if (folder / "cpu.max").exists():  # v2: "max 100000" or "150000 100000"
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def own_cgroups() -> list[str]:
    """Return the lines of /proc/self/cgroup: `id:controllers:path`, see cgroups(7)."""
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup in v1 and v2, up to the root: each may set a limit."""
    folders: list[Path] = []
    for line in own_cgroups():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        inner = base / path.lstrip("/")
        folders += [inner, *(p for p in inner.parents if p == base or base in p.parents)]
    return folders


def memory_bytes() -> int:
    """Return the memory of this machine, or what the cgroups of this process allow of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroup_folders(Path("/sys/fs/cgroup"), "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():  # v2 writes "max" for no limit
                total = min(total, int(text))
    return total


def _siblings(cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    groups = set()
    for core in cores:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            members = _core_list(path.read_text())
        except (OSError, ValueError):
            members = {core}
        groups.add(tuple(sorted((members | {core}) & set(cores))))
    return tuple(sorted(groups))


def _core_list(text: str) -> set[int]:
    """Return the cores that the kernel's list format names: `0-2,8`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


# --- software ----------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(extra: str, root: Path = _ROOT) -> str:
    """Return what installs tunerd with an extra, in the checkout where `root` is one."""
    name = "." if (root / "pyproject.toml").is_file() else "tunerd"
    return f"pip install '{name}[{extra}]'"


def _is_compiled_anew(module: str) -> bool:
    """Whether a module has no bytecode, and Python keeps none of it either."""
    spec = None
    with contextlib.suppress(ValueError):  # of a module that was not imported from anywhere
        spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    kept = Path(importlib.util.cache_from_source(spec.origin))
    folder = next(folder for folder in kept.parents if folder.exists())
    return not kept.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK))


def _commit() -> str | None:
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# --- targets -----------------------------------------------------------------------------------


def cpu_target_json(num_cores: int) -> TargetSpec:
    """Return the llvm target of this host's CPU, for code that runs on `num_cores` of its cores.

    Imports TVM (seconds). LLVM names the CPU by its model number; features that a hypervisor hides
    from that model are switched off, so that no kernel dies of an illegal instruction.

    LLVM works at its level 2. At 3, TVM's default, it unrolls further: builds take longer, and the
    best kernels are no faster (scripts/benchmark_llvm_levels).
    """
    from tvm.target import Target, codegen

    description: dict[str, Any] = {
        "kind": "llvm",
        "mtriple": codegen.llvm_get_system_triple(),
        "mcpu": codegen.llvm_get_system_cpu(),
        "num-cores": num_cores,
        "opt-level": 2,
    }
    features = {str(f) for f in codegen.llvm_get_cpu_features(Target(description))}
    hidden = sorted(hidden_features(features, _cpu_field("flags").split()))
    if hidden:
        description["mattr"] = [f"-{feature}" for feature in hidden]
    return TargetSpec("llvm", json.dumps(description, sort_keys=True))


def hidden_features(llvm_features: set[str], kernel_flags: list[str]) -> set[str]:
    """Return the vector features of LLVM's CPU that the kernel does not list; both spell alike."""
    if not kernel_flags:  # not x86: /proc/cpuinfo has no line `flags`
        return set()
    known = {flag.replace("_", "") for flag in kernel_flags}
    vector = {f for f in llvm_features if f.startswith(("avx", "amx")) or f in ("fma", "f16c")}
    return {f for f in vector if f.replace("-", "").replace(".", "") not in known}


def cuda_target(compute_capability: str, *, l2_bytes: int | None = None) -> TargetSpec:
    """Return the cuda target of a compute capability such as "9.0", with its limits per block.

    The limits are those of every architecture since 7.0 (CUDA C++ Programming Guide, "Technical
    Specifications per Compute Capability"); 48 KiB is what static shared memory may take.
    """
    description: dict[str, Any] = {
        "kind": "cuda",
        "arch": "sm_" + compute_capability.replace(".", ""),
        "max_num_threads": 1024,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "registers_per_block": 65536,
        "thread_warp_size": 32,
    }
    if l2_bytes:
        description["l2_cache_size_bytes"] = l2_bytes
    return TargetSpec("cuda", json.dumps(description, sort_keys=True))
