"""Facts about this machine: GPUs, driver, MPS, cores, packages, commit. Creates no CUDA context.

Everything works without a driver and without NVML; `HostFacts.no_gpu` says why there is no GPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd.system import cores, gpus
from tunerd.system.gpus import FailedGpu, GpuFacts

_ROOT = Path(__file__).resolve().parents[2]  # the checkout, where this is one
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
    found_gpus, no_gpu = gpus.visible_gpus()
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    driver, cuda_version = gpus.driver_versions()
    return HostFacts(
        hostname=platform.node(),
        platform=platform.platform(),
        cpu_model=cores.cpu_field("model name") or platform.processor() or platform.machine(),
        cores=allowed,
        core_quota=cores.core_quota(),
        core_siblings=cores.siblings(allowed),
        mem_bytes=cores.memory_bytes(),
        gpus=found_gpus,
        no_gpu=no_gpu,
        failed_gpus=gpus.failed_gpus(),
        driver=driver,
        cuda_version=cuda_version,
        mps_control=shutil.which(MPS_CONTROL),
        python=platform.python_version(),
        packages=tuple((name, v) for name in PACKAGES if (v := _version(name)) is not None),
        not_compiled=tuple(name for name in _IMPORTED if _is_compiled_anew(name)),
        commit=_commit(),
    )


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
