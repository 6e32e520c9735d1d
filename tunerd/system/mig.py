"""The instances of GPUs in MIG mode, as NVML tells them. Nothing here makes or changes one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tunerd.system.gpus import nvml_library


@dataclass(frozen=True)
class MigInstance:
    """A compute instance, which CUDA takes for a GPU of its own."""

    uuid: str  # "MIG-...", for CUDA_VISIBLE_DEVICES
    gpu_uuid: str
    name: str  # "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    mem_bytes: int
    mem_free_bytes: int
    sm_count: int


def mig_instances() -> tuple[MigInstance, ...]:
    """Return the instances that CUDA_VISIBLE_DEVICES leaves to us, in NVML's order.

    A setting that names a GPU leaves all of its instances. Never raises: what NVML does not tell
    is no instance.
    """
    nvml, _ = nvml_library()
    if nvml is None:
        return ()
    found: list[MigInstance] = []
    for index in range(_asked(nvml, "nvmlDeviceGetCount") or 0):
        gpu = _asked(nvml, "nvmlDeviceGetHandleByIndex", index)
        mode = None if gpu is None else _asked(nvml, "nvmlDeviceGetMigMode", gpu)
        if not mode or not mode[0]:
            continue
        gpu_uuid = str(_asked(nvml, "nvmlDeviceGetUUID", gpu))
        for number in range(_asked(nvml, "nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
            handle = _asked(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, number)
            if handle is None:  # no instance of that number
                continue
            instance = _instance(nvml, handle, gpu_uuid)
            if instance is not None and _is_visible(index, gpu_uuid, instance.uuid):
                found.append(instance)
    return tuple(found)


def _instance(nvml: Any, handle: Any, gpu_uuid: str) -> MigInstance | None:
    uuid, name, memory, attributes = (
        _asked(nvml, function, handle)
        for function in (
            "nvmlDeviceGetUUID",
            "nvmlDeviceGetName",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetAttributes_v2",
        )
    )
    if uuid is None or memory is None or attributes is None:
        return None
    sms = int(attributes.multiprocessorCount)
    return MigInstance(uuid, gpu_uuid, name or uuid, memory.total, memory.free, sms)


def _asked(nvml: Any, function: str, *args: Any) -> Any:
    try:
        return getattr(nvml, function)(*args)
    except (nvml.NVMLError, AttributeError):
        return None


def _is_visible(index: int, gpu_uuid: str, uuid: str) -> bool:
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None or (not setting and "RAY_RAYLET_PID" in os.environ):
        return True
    wanted = [item.strip() for item in setting.split(",") if item.strip()]
    return any(
        item == str(index)
        or (item.startswith("GPU-") and gpu_uuid.startswith(item))
        or (item.startswith("MIG-") and uuid.startswith(item))
        for item in wanted
    )
