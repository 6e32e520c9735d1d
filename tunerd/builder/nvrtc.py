"""CUDA source to cubin with NVRTC, on machines with or without a GPU driver.

Everything comes from PyPI wheels (`pip install 'tunerd[cuda]'`); cuda.pathfinder finds a CUDA
toolkit where the wheels of libraries and headers are not installed. This module knows nothing of
TVM except what its CUDA code generator writes at the top of a source.

A cubin, never PTX: a driver loads the cubin of any CUDA of its own major version ("minor version
compatibility" in NVIDIA's CUDA Compatibility guide), but it compiles no PTX newer than itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tunerd.builder.cuda_source import kernel_sources
from tunerd.system.host import install_command

CUDA_MAJOR = 13  # what TVM's CUDA runtime library is linked against (libcudart.so.13)
# As cuda.pathfinder names them, and the packages that bring them.
_LIBRARIES = {"nvrtc": "nvidia-cuda-nvrtc", "cudart": "nvidia-cuda-runtime"}
_HEADERS = {
    "cuda_fp16.h": "nvidia-cuda-runtime",
    "crt/mma.h": "nvidia-cuda-crt",
    "cuda/std/cstdint": "nvidia-cuda-cccl",
}
_CACHED_CUBINS = 512  # about 20 kB each

# Of tvm.support.nvcc: a tuned schedule must see the compiler that the final model is built with.
_OPTIONS = (
    "-default-device",
    "--device-int128",
    "-D__NV_SILENCE_DEPRECATION_BEGIN=",
    "-D__NV_SILENCE_DEPRECATION_END=",
    "-D__NV_SILENCE_HOST_DEPRECATION_BEGIN=",
    "-D__NV_SILENCE_HOST_DEPRECATION_END=",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-U__CUDA_NO_BFLOAT162_CONVERSIONS__",
    "--use_fast_math",
    "--ptxas-options=--register-usage-level=10",
    "--disable-warnings",  # not TVM's: it leaves the errors in the log
)
# NVRTC's cache of what it has compiled (its documentation, "Caching") is the driver's, which it
# starts for that: a process that compiles would be a client of whatever MPS daemon is there.
_NO_CACHE = "--no-cache"

# TVM's sources include these three headers of libcu++ for a handful of names, and parsing them
# takes longer than compiling most kernels. NVRTC takes headers from memory before it looks for
# files, so these stand in for them. The types are those of libcu++ under NVRTC. A source that needs
# what is only declared here fails, and is compiled with the real headers.
STAND_INS = {
    "cuda/std/cstdint": """#pragma once
using int8_t = signed char;
using int16_t = signed short;
using int32_t = signed int;
using int64_t = signed long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using intptr_t = int64_t;
using uintptr_t = uint64_t;
namespace cuda { namespace std {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::intptr_t; using ::uintptr_t;
} }
""",
    "cuda/std/type_traits": """#pragma once
namespace cuda { namespace std {
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <class A, class B> struct is_same { static constexpr bool value = is_same_v<A, B>; };
template <class T> struct is_integral;
template <class T> struct is_signed;
template <class T> struct is_unsigned;
template <class T> struct is_floating_point;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
} }
""",
    "cuda/std/limits": """#pragma once
namespace cuda { namespace std {
template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static float infinity() { return __int_as_float(0x7f800000); }
};
} }
""",
}
# Sources with these include more of libcu++, which the stand-ins would break.
_NEEDS_LIBCUXX = ("<cuda/barrier>", "<cooperative_groups.h>", "<nvshmem")

# --use_fast_math makes tanhf the instruction tanh.approx, whose error of 2^-11 is half of what a
# whole fp32 model is allowed. The error of this one is 4e-7 (relative, against float64 in NumPy).
_TANH = """static __device__ __forceinline__ float tunerd_tanhf(float x) {
  float s = x * x, a = fabsf(x);
  float near = x + x * s * (((-17.0f / 315.0f) * s + 2.0f / 15.0f) * s - 1.0f / 3.0f);
  float far = copysignf(1.0f - 2.0f / (__expf(a + a) + 1.0f), x);
  return a < 0.25f ? near : far;
}
#define tanhf tunerd_tanhf

"""

# What tvm.support.nvcc puts before a source for NVRTC, which has no host headers.
_PREAMBLE = (
    """#include <cuda/std/cstdint>
using cuda::std::uint8_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::int8_t;
using cuda::std::int16_t;
using cuda::std::int32_t;
using cuda::std::int64_t;
#ifndef __asm__
#define __asm__ asm
#endif
#ifndef __volatile__
#define __volatile__ volatile
#endif
#include <cuda/std/limits>
#ifndef INFINITY
#define INFINITY (::cuda::std::numeric_limits<float>::infinity())
#endif

"""
    + _TANH
)


class CudaCompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@dataclasses.dataclass(frozen=True)
class Cubin:
    """Machine code of one GPU architecture, as an ELF file."""

    code: bytes = dataclasses.field(repr=False)
    compiler: str  # "nvrtc", or "nvrtc-fallback" where the stand-in headers did not do


@dataclasses.dataclass
class Counts:
    """How the compilations of this process went."""

    compiled: int = 0
    cached: int = 0  # answered from memory
    fallbacks: int = 0  # compiled, but with the headers of libcu++
    failed: int = 0


_counts = Counts()
_cubins: OrderedDict[str, Future[Cubin]] = OrderedDict()
_lock = threading.Lock()


def counts() -> Counts:
    """Return a copy of this process's counts."""
    with _lock:
        return dataclasses.replace(_counts)


def preload() -> None:
    """Load cudart and NVRTC, so that TVM finds them. Call it before `import tvm`.

    TVM's CUDA runtime library needs cudart, which the wheels put where no loader looks, and TVM
    says nothing when it cannot load. Harmless where the libraries are absent.
    """
    for name in reversed(_LIBRARIES):
        _load(name)


def cuda_build_problem() -> str | None:
    """Say why this machine cannot build for CUDA and what to do, or None where it can."""
    missing = missing_for_builds()
    return missing and f"{missing}. Install what is missing with: {install_command('cuda')}"


def missing_for_builds() -> str | None:
    """Say what this machine lacks to build for CUDA, or None where it lacks nothing."""
    missing = [] if _bindings() else ["cuda.bindings (package cuda-bindings)"]
    missing += [
        f"lib{name}.so.{CUDA_MAJOR} (package {package})"
        for name, package in _LIBRARIES.items()
        if not _load(name)
    ]
    missing += [
        f"{name} (package {package})"
        for name, package in _HEADERS.items()
        if not any((folder / name).is_file() for folder in include_folders())
    ]
    if not missing:
        return None
    return (
        f"Builds for CUDA need {', '.join(missing)}: found neither among the Python packages nor "
        f"in a CUDA {CUDA_MAJOR} toolkit"
    )


def compile_kernels(source: str, arch: str, *, threads: int = 1) -> dict[str, Cubin]:
    """Compile what TVM's CUDA code generator wrote for `arch`, such as "sm_90", kernel by kernel.

    Returns a cubin for each kernel, by name. A kernel becomes the same machine code as among
    others (scripts/lab/compile/whole_model.py), in so many `threads` at once, and one that several
    models have is compiled once. Raises CudaCompileError with NVRTC's log, and ValueError where
    the source is not of TVM's form.
    """
    sources = kernel_sources(source)
    try:
        if threads == 1:  # without a pool, whose threads a process waits for when it ends
            return {name: compile_cubin(each, arch) for name, each in sources.items()}
        with ThreadPoolExecutor(threads) as pool:
            cubins = pool.map(lambda each: compile_cubin(each, arch), sources.values())
            return dict(zip(sources, cubins, strict=True))
    except CudaCompileError:
        if len(sources) == 1:
            raise
    # A kernel may need more of the source than was left to it.
    return dict.fromkeys(sources, compile_cubin(source, arch))


def compile_cubin(source: str, arch: str) -> Cubin:
    """Compile a CUDA source; identical ones once per process, also when threads ask at once.

    NVRTC runs without the GIL: cuda.bindings releases it. Raises CudaCompileError with NVRTC's log.
    """
    lines = "\n".join(line.rstrip() for line in source.splitlines() if line.strip())
    key = hashlib.sha256(f"{arch}\n{lines}".encode()).hexdigest()
    with _lock:
        known = _cubins.get(key)
        if known is None:
            mine: Future[Cubin] = Future()
            _cubins[key] = mine
            while len(_cubins) > _CACHED_CUBINS:
                _cubins.popitem(last=False)
        else:
            _counts.cached += 1
            _cubins.move_to_end(key)
    if known is not None:
        return known.result()
    try:
        cubin = _compile_either(source, arch)
    except BaseException as error:
        with _lock:
            _counts.failed += 1
            _cubins.pop(key, None)
        mine.set_exception(error)
        raise
    with _lock:
        _counts.compiled += 1
        _counts.fallbacks += cubin.compiler != "nvrtc"
    mine.set_result(cubin)
    return cubin


def _compile_either(source: str, arch: str) -> Cubin:
    if not any(name in source for name in _NEEDS_LIBCUXX):
        try:
            return Cubin(run_nvrtc(source, arch, headers=STAND_INS), "nvrtc")
        except CudaCompileError:
            pass  # the compilation below says whether the headers or the source are to blame
    return Cubin(run_nvrtc(source, arch), "nvrtc-fallback")


def run_nvrtc(source: str, arch: str, *, headers: Mapping[str, str] | None = None) -> bytes:
    """Compile with TVM's options and return the cubin. `headers` come before those in files."""
    nvrtc = _bindings()
    if nvrtc is None or not _load("nvrtc"):
        raise CudaCompileError(cuda_build_problem() or "NVRTC does not load")
    options = [f"--gpu-architecture={arch}", *_OPTIONS, _NO_CACHE]
    options += [f"-I{folder}" for folder in include_folders()]
    headers = headers or {}
    # tvm.support.nvcc drops this include too: NVRTC has no host headers.
    text = _PREAMBLE + source.replace("#include <cuda.h>", "")
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text.encode(),
            b"tvm_kernels.cu",
            len(headers),
            [content.encode() for content in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        compiled = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if compiled[0]:
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            text = log.rstrip(b"\0").decode(errors="replace")
            raise CudaCompileError(text or _error(compiled[0]))
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(size: Callable[[Any], Any], content: Callable[[Any, Any], Any], program: Any) -> bytes:
    buffer = bytearray(_checked(size(program)))
    _checked(content(program, buffer))
    return bytes(buffer)


def _error(status: Any) -> str:
    nvrtc: Any = _bindings()
    return str(_checked(nvrtc.nvrtcGetErrorString(status)).decode())


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a call; raise CudaCompileError where it failed."""
    status, *value = result
    if status:
        raise CudaCompileError(f"NVRTC: {_error(status)}")
    return value[0] if value else None


@functools.cache
def _module(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _bindings() -> Any | None:
    return _module("cuda.bindings.nvrtc")


@functools.cache
def _load(name: str) -> bool:
    """Load a library of CUDA for all of the process; False where it is not of our CUDA."""
    finder = _module("cuda.pathfinder")
    if finder is None:
        return False
    try:
        path = finder.load_nvidia_dynamic_lib(name).abs_path
    except RuntimeError:  # DynamicLibNotFoundError, and one that does not load
        return False
    return f".so.{CUDA_MAJOR}" in Path(path).resolve().name


@functools.cache
def include_folders() -> tuple[Path, ...]:
    """Return the folders with headers of CUDA and of libcu++: the wheels', then a toolkit's.

    The wheels may bring a part of them alone: PyTorch's have no crt/mma.h.
    """
    finder = _module("cuda.pathfinder")
    found = [finder.find_nvidia_header_directory(n) for n in ("cudart", "cccl")] if finder else []
    roots = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    includes = [Path(root, "include") for root in roots if root]
    toolkits = [f for include in includes for f in (include, include / "cccl") if f.is_dir()]
    return (*(Path(folder) for folder in found if folder), *toolkits)
