"""What TVM generates code for: this machine's CPU, or a GPU of a compute capability."""

from __future__ import annotations

import json
from typing import Any

from tunerd.system import amx
from tunerd.system.cores import cpu_field
from tunerd.vocabulary import TargetSpec

# LLVM computes by these where a CPU has them.
_USED = frozenset((
    "avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512vnni", "f16c",
    "fma",
))  # fmt: skip


def cpu_target_json(num_cores: int) -> TargetSpec:
    """Return the llvm target of this host's CPU, for code that runs on `num_cores` of its cores.

    Imports TVM (seconds). LLVM names the CPU by its model number, which a hypervisor may make up:
    features that it hides from that model are switched off, so that no kernel dies of an illegal
    instruction, and those that it shows although the model has none are switched on. AMX is
    neither's where a process is not given leave to use it.

    LLVM works at its level 2. At 3, TVM's default, it unrolls further: builds take longer, and the
    best kernels are no faster (scripts/lab/compile/llvm_levels.py).
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
    flags = cpu_field("flags").split()
    if not amx.permitted():
        flags = [flag for flag in flags if not flag.startswith("amx")]
    changed = [f"-{feature}" for feature in sorted(hidden_features(features, flags))]
    changed += [f"+{feature}" for feature in sorted(shown_features(features, flags))]
    if changed:
        description["mattr"] = changed
    return TargetSpec("llvm", json.dumps(description, sort_keys=True))


def cpu_features(target: TargetSpec) -> list[str]:
    """Return what LLVM may use of a CPU of a target beside what each of its kind has.

    Empty of GPUs, and of what is no x86. Imports TVM (seconds).
    """
    if target.is_cuda:
        return []
    from tvm.target import Target, codegen

    features = {str(f) for f in codegen.llvm_get_cpu_features(Target(json.loads(target.json)))}
    return sorted(features & _USED)


def hidden_features(llvm_features: set[str], kernel_flags: list[str]) -> set[str]:
    """Return the vector features of LLVM's CPU that the kernel does not list; both spell alike."""
    if not kernel_flags:  # not x86: /proc/cpuinfo has no line `flags`
        return set()
    known = {_plain(flag) for flag in kernel_flags}
    vector = {f for f in llvm_features if f.startswith(("avx", "amx")) or f in ("fma", "f16c")}
    return {f for f in vector if _plain(f) not in known}


def shown_features(llvm_features: set[str], kernel_flags: list[str]) -> set[str]:
    """Return what kernels compute by that the kernel lists, and LLVM's CPU does not have."""
    known = {_plain(flag) for flag in kernel_flags}
    return {f for f in {*_USED, *amx.FEATURES} - llvm_features if _plain(f) in known}


def _plain(name: str) -> str:
    """Spell a feature as neither LLVM nor the kernel does: avx512_vnni, amx-int8, avx10.1."""
    return name.replace("_", "").replace("-", "").replace(".", "")


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
