"""The device that an artifact runs on, and what is not there as the artifact was tuned for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from tunerd.artifacts.manifest import LoadError, Manifest, obtained_text
from tunerd.system import amx
from tunerd.system.arrays import dtype_of
from tunerd.system.cores import cpu_field
from tunerd.system.targets import hidden_features

_ONE_CORE_PER_THREAD, _THREADS_SHARE_CORES = -2, -3  # AffinityMode of TVM's threading_backend.h


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


class OwnThreads:
    """The threads that run a model on CPUs: as many as it was tuned for, or all cores if fewer.

    They are on whichever cores the calling thread may use, and leave that thread there: whoever
    has more cores than a model takes can run several processes of it, or threads, side by side.
    """

    def __init__(self, tvm: Any, manifest: Mapping[str, Any]) -> None:
        setting = os.environ.get("TVM_NUM_THREADS", "")  # lowers or raises the number, as TVM's
        limit = int(setting) if setting.isdecimal() else 0  # what is no number is no limit
        self._count = limit or max(manifest["share"]["sm_counts"], default=0)
        self._configure = tvm.get_global_func("runtime.config_threadpool")

    def use(self) -> None:
        """Have what TVM runs for this thread, from here on, run on these threads."""
        cores = os.sched_getaffinity(0)
        use_threads(self._configure, min(self._count or len(cores), len(cores)), cores)


def use_threads(configure: Callable[..., None], count: int, cores: Set[int]) -> None:
    """Have what TVM runs for this thread, from here on, run on so many threads on these cores.

    TVM has a pool for each thread that calls it. By default that has half of the machine's logical
    cores, and moves the caller to the first of them, whichever it may use. A pool never gets more
    threads than it was made with, so it is made for all cores. Nothing else may set it: what it is
    set to is known here.

    Args:
        configure: TVM's runtime.config_threadpool.
    """
    wanted = (count, cores)
    if getattr(_pool, "is_for", None) == wanted:
        return
    mode = _ONE_CORE_PER_THREAD if count == len(cores) else _THREADS_SHARE_CORES
    configure(mode, count, [str(core) for core in sorted(cores)])
    _pool.is_for = wanted


_pool = threading.local()  # what this thread's pool is set to
