"""The device that an artifact runs on, and what is not there as the artifact was tuned for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunerd.artifacts.manifest import LoadError, Manifest, obtained_text
from tunerd.system import amx
from tunerd.system.arrays import dtype_of
from tunerd.system.cores import cpu_field
from tunerd.system.targets import hidden_features

_CONFIG_ONE_CORE_PER_THREAD = -2  # AffinityMode kSpecifyOneCorePerThread, threading_backend.h


def preload_cuda() -> None:
    from tunerd.builder import nvrtc

    nvrtc.preload()


def open_device(tvm: Any, is_cuda: bool, index: int | None) -> Any:
    if not is_cuda:
        if index is not None:
            raise LoadError(
                f"device {index} was asked for, but the artifact is for CPUs: give none"
            )
        return tvm.cpu(0)
    device = tvm.cuda(index or 0)
    if not device.exist:
        raise LoadError(
            f"there is no CUDA device {index or 0} here, and the artifact is for a GPU; run "
            "`tunerd doctor` to see what is missing"
        )
    return device


def enable(manifest: Mapping[str, Any]) -> None:
    """Ask for what kernels of an artifact need of a CPU; raises LoadError where it is not there."""
    needed = {*manifest.get("cpu_features", [])}
    if lacking := sorted(hidden_features(needed, cpu_field("flags").split())):
        raise LoadError(
            f"the artifact's kernels use {', '.join(lacking)}, and this CPU has no such "
            "instructions; tune the model on this machine"
        )
    if needed & {*amx.FEATURES} and not amx.permitted():
        raise LoadError(
            "the artifact's kernels use AMX, which Linux (5.16 or newer) did not permit this "
            "process, perhaps for a sandbox; tune the model in this environment"
        )


def zeros(tvm: Any, shape: Sequence[int], dtype: str, device: Any) -> Any:
    """Return a tensor of zeros on a device, which are there when the device is waited for."""
    made = tvm.runtime.empty(tuple(shape), dtype, device)
    if 0 not in shape:
        made.copyfrom(np.zeros(shape, dtype_of(dtype)))
    return made


def sm_count(device: Any, is_cuda: bool) -> int:
    """Return the SMs, on CPUs the cores, that this process sees."""
    return int(device.multi_processor_count) if is_cuda else len(os.sched_getaffinity(0))


def mismatches(
    manifest: Manifest, variants: Sequence[Manifest], seen: int, device: Any, is_cuda: bool
) -> Iterator[str]:
    """Say what is not as it was tuned for; a manifest that does not know says nothing."""
    share = manifest["share"]
    if share["sm_counts"] and seen not in share["sm_counts"]:
        tuned = obtained_text(share["sm_counts"], is_cuda=is_cuda)
        of = "the artifact was tuned" if len(variants) == 1 else "the nearest kernels are tuned"
        yield (
            f"this process sees {obtained_text([seen], is_cuda=is_cuda)}; {of} for {tuned} "
            f"({share['pct']}% of the device), where other kernels may be fastest"
        )
    name = str(device.device_name) if is_cuda else cpu_field("model name")
    if share["device"] and name and name != share["device"]:
        yield f"this is a {name}; the artifact was tuned on a {share['device']}"


def use_own_cores(tvm: Any, manifest: Mapping[str, Any]) -> None:
    """Run this thread's pool on cores that the process may use, at most as many as tuned for.

    TVM's default is half of the machine's logical cores, and it moves the calling thread to the
    machine's first core even where the process may not use that one. TVM_NUM_THREADS lowers the
    number of threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    setting = os.environ.get("TVM_NUM_THREADS", "")
    limit = int(setting) if setting.isdecimal() else 0  # as TVM's: what is no number is no limit
    cores = cores[: limit or max(manifest["share"]["sm_counts"], default=len(cores))]
    configure = tvm.get_global_func("runtime.config_threadpool")
    configure(_CONFIG_ONE_CORE_PER_THREAD, len(cores), [str(core) for core in cores])
