"""The GPUs of this machine as NVML tells them: facts, and one at one moment. No CUDA context.

Works without a driver and without NVML: `visible_gpus` says why there is no GPU.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from tunerd.vocabulary import Conditions

SAMPLE_SECS = 0.2
# NVML's nvmlClocksEventReasons that make a GPU slower than its clocks were set to.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "hot: software thermal slowdown",
    0x40: "hot: hardware thermal slowdown",
    0x80: "power brake",
}
_POWER_CAP = 0x04  # of software: the board's power limit
# NVML tells neither SMs nor L2. CUDA does, in a process of its own and a quarter of a second; these
# spare that: FP32 cores of one SM by compute capability (CUDA C++ Programming Guide, "Arithmetic
# Instructions", results per clock), and cudaDeviceProp::l2CacheSize.
_CORES_PER_SM = dict.fromkeys([(7, 0), (7, 2), (7, 5), (8, 0)], 64) | dict.fromkeys(
    [(8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)], 128
)
_L2_BYTES = {"H200": 60 << 20, "H100": 50 << 20, "A100": 40 << 20}
# Prints CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT and _L2_CACHE_SIZE of the first GPU (cuda.h).
_ASK_CUDA = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, value = ctypes.c_int(), ctypes.c_int()
for number in (16, 38):
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    ):
        raise SystemExit(1)
    print(value.value)
"""
_ASK_SECS = 30.0

_NVML_CLOCK_SM, _NVML_TEMPERATURE_GPU = 1, 0  # nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t
# NVML's lists of processes that compute.
_COMPUTE = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
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
    sm_count: int | None  # None: neither NVML nor CUDA tells
    mig: bool
    compute_mode: str  # "default", "exclusive-process", "prohibited"
    l2_bytes: int | None = None


@dataclass(frozen=True)
class FailedGpu:
    """One physical GPU that NVML lists and that cannot be used."""

    index: int
    problem: str  # a sentence that names it


@dataclass(frozen=True)
class GpuState:
    """What NVML says of one GPU. None: it does not tell, or was not asked."""

    pids: tuple[int, ...] | None  # of compute processes, those through MPS included
    graphics_pids: tuple[int, ...] | None
    mem_used_bytes: int | None  # without what the driver reserves, where NVML tells them apart
    mem_bytes: int | None
    busy_pct: int | None  # utilisation, the highest of some samples
    clock_reasons: int | None
    is_persistent: bool | None

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """What holds the clocks down, in words; the power limit of the board is none."""
        return tuple(word for bit, word in _SLOWDOWNS.items() if (self.clock_reasons or 0) & bit)

    @property
    def is_power_capped(self) -> bool:
        return bool((self.clock_reasons or 0) & _POWER_CAP)


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


def visible_gpus() -> tuple[tuple[GpuFacts, ...], str]:
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
    uuid = nvml.nvmlDeviceGetUUID(handle)
    cores = ask("nvmlDeviceGetNumGpuCores")
    per_sm = _CORES_PER_SM.get(capability)
    sm_count = cores // per_sm if cores and per_sm else None
    l2_bytes = next((size for part, size in _L2_BYTES.items() if part in name), None)
    if sm_count is None or l2_bytes is None:
        asked = sms_and_l2(uuid)
        sm_count, l2_bytes = sm_count or asked[0], l2_bytes or asked[1]
    mig = ask("nvmlDeviceGetMigMode")
    return GpuFacts(
        index=index,
        uuid=uuid,
        name=name,
        mem_bytes=memory.total,
        mem_free_bytes=memory.free,
        compute_capability="{}.{}".format(*capability),
        sm_count=sm_count,
        mig=bool(mig and mig[0]),
        compute_mode=_COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode") or 0, "unknown"),
        l2_bytes=l2_bytes,
    )


@functools.cache
def sms_and_l2(gpu_uuid: str) -> tuple[int | None, int | None]:
    """Ask CUDA for the SMs and the bytes of L2 of a GPU; None where it does not tell.

    In a process of its own: CUDA reads once which GPU it may see, and a client of MPS is told of
    its share.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": gpu_uuid,
        "CUDA_MPS_PIPE_DIRECTORY": f"{os.devnull}/none",
    }
    command = [sys.executable, "-E", "-S", "-c", _ASK_CUDA]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=_ASK_SECS, check=True
        )
        sm_count, l2_bytes = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, None
    return sm_count or None, l2_bytes or None


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


def gpu_state(gpu_uuid: str, *, samples: int = 0) -> GpuState:
    """Ask NVML, in some milliseconds, and SAMPLE_SECS between samples of the utilisation.

    Never raises: without a driver nothing is told.
    """
    nvml, _ = nvml_library()
    memory = ask_gpu(
        gpu_uuid, "nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None)
    ) or ask_gpu(gpu_uuid, "nvmlDeviceGetMemoryInfo")
    reasons = ask_gpu(gpu_uuid, "nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = ask_gpu(gpu_uuid, "nvmlDeviceGetCurrentClocksThrottleReasons")
    persistent = ask_gpu(gpu_uuid, "nvmlDeviceGetPersistenceMode")
    return GpuState(
        pids=_pids(gpu_uuid, *_COMPUTE),
        graphics_pids=_pids(gpu_uuid, "nvmlDeviceGetGraphicsRunningProcesses"),
        mem_used_bytes=memory.used if memory else None,
        mem_bytes=memory.total if memory else None,
        busy_pct=busy_pct(gpu_uuid, samples=samples),
        clock_reasons=reasons,
        is_persistent=None if persistent is None else bool(persistent),
    )


def busy_pct(gpu_uuid: str, *, samples: int = 1) -> int | None:
    """Return the highest of some samples of a GPU's utilisation, of which NVML makes averages."""
    found = []
    for number in range(samples):
        if number:
            time.sleep(SAMPLE_SECS)
        if (rates := ask_gpu(gpu_uuid, "nvmlDeviceGetUtilizationRates")) is not None:
            found.append(int(rates.gpu))
    return max(found, default=None)


def process_bytes(gpu_uuid: str) -> dict[int, int]:
    """Return the memory of each process that computes on a GPU and of which NVML tells it, by pid.

    A client of MPS is in two of its lists, with all of its memory in each.
    """
    found: dict[int, int] = {}
    for function in _COMPUTE:
        for process in ask_gpu(gpu_uuid, function) or ():
            if process.usedGpuMemory:
                found[process.pid] = max(found.get(process.pid, 0), int(process.usedGpuMemory))
    return found


def _pids(gpu_uuid: str, *functions: str) -> tuple[int, ...] | None:
    lists = [found for f in functions if (found := ask_gpu(gpu_uuid, f)) is not None]
    return tuple(sorted({p.pid for each in lists for p in each})) if lists else None
