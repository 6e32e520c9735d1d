"""Builds for CUDA on a machine without a GPU: cubins, the stand-in headers, what is missing."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.compile.cubins import machine_code
from tests.lib.build_fixtures import (
    built,
    candidate_of,
    conv_task,
    default_of,
    matmul_task,
    new_schedule,
    task_of,
)
from tests.lib.fresh_python import run_python
from tests.lib.watched_driver import WatchedDriver
from tunerd.builder import build, library, nvrtc
from tunerd.candidates.base import LoweredKernel
from tunerd.system import host
from tunerd.vocabulary import Failure, Kind, Stage, TargetSpec

CUDA = TargetSpec(
    "cuda",
    json.dumps(
        {
            "kind": "cuda",
            "arch": "sm_90",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        }
    ),
)
EM_CUDA = 190  # elf.h

needs_nvrtc = pytest.mark.skipif(
    nvrtc.cuda_build_problem() is not None, reason=str(nvrtc.cuda_build_problem())
)


def embedded_cubins(library: bytes) -> list[int]:
    """Return the architectures of the CUDA ELF files inside a library: 90 for sm_90."""
    found, at = [], library.find(b"\x7fELF", 1)
    while at >= 0:
        (machine,) = struct.unpack_from("<H", library, at + 18)
        (flags,) = struct.unpack_from("<I", library, at + 48)
        if machine == EM_CUDA:
            # The number is in the low byte of the flags up to CUDA 12, in the second since 13.
            found.append(flags >> 8 & 0xFF if library[at + 8] >= 8 else flags & 0xFF)
        at = library.find(b"\x7fELF", at + 1)
    return found


@needs_nvrtc
def test_the_default_of_a_convolution_is_embedded_as_a_cubin() -> None:
    task = conv_task(CUDA)
    made = built(build.build_candidate(task, default_of(task)))
    assert made.compiler == "nvrtc"
    assert embedded_cubins(made.library) == [90]
    assert b"__CUDACC_RTC__" not in made.library  # no source
    assert b".version" not in made.library  # no PTX


@needs_nvrtc
def test_a_scheduled_candidate_is_embedded_as_a_cubin() -> None:
    task = matmul_task(CUDA)
    schedule = new_schedule(task)
    i, j, _ = schedule.get_loops(schedule.get_sblock("T_matmul_NN"))
    schedule.bind(i, "blockIdx.x")
    schedule.bind(j, "threadIdx.x")
    made = built(build.build_candidate(task, candidate_of(task, schedule)))
    assert made.compiler == "nvrtc"
    assert embedded_cubins(made.library) == [90]


@needs_nvrtc
def test_a_schedule_without_threads_is_a_failure_of_the_build() -> None:
    task = matmul_task(CUDA)
    kernel = LoweredKernel(new_schedule(task).mod)
    failure = build.build_candidate(task, default_of(task), lowered=kernel)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.BUILD, Kind.COMPILE)
    assert "no kernel" in failure.message


@needs_nvrtc
def test_fp16_compiles_with_the_stand_in_headers() -> None:
    library.load_tvm()
    from tvm import te, topi

    left = te.placeholder((32, 64), name="left", dtype="float16")
    right = te.placeholder((64, 48), name="right", dtype="float16")
    task = task_of([left, right, topi.nn.relu(topi.matmul(left, right))], CUDA)
    assert built(build.build_candidate(task, default_of(task))).compiler == "nvrtc"


@needs_nvrtc
def test_the_stand_in_headers_make_the_same_machine_code_as_those_of_libcuxx() -> None:
    source = KERNEL.replace("BODY", "x[threadIdx.x] = INFINITY + (float)(int64_t)threadIdx.x;")
    lean = nvrtc.run_nvrtc(source, "sm_90", headers=nvrtc.STAND_INS)
    full = nvrtc.run_nvrtc(source, "sm_90")
    assert machine_code(lean) == machine_code(full) != {}


@needs_nvrtc
def test_tanh_is_not_the_approximate_instruction() -> None:
    def code(body: str) -> dict[str, bytes]:
        source = KERNEL.replace("BODY", body)
        return machine_code(nvrtc.run_nvrtc(source, "sm_90", headers=nvrtc.STAND_INS))

    approximate = 'asm("tanh.approx.f32 %0, %1;" : "=f"(x[0]) : "f"(x[0]));'
    assert len(code(approximate)[".text.kernel"]) < len(code("x[0] = tanhf(x[0]);")[".text.kernel"])


@needs_nvrtc
def test_a_source_that_needs_libcuxx_falls_back_to_it_and_is_counted() -> None:
    before = nvrtc.counts()
    source = KERNEL.replace("BODY", "x[0] = std::is_integral<int>::value;")
    assert nvrtc.compile_cubin(source, "sm_90").compiler == "nvrtc-fallback"
    after = nvrtc.counts()
    assert (after.compiled, after.fallbacks) == (before.compiled + 1, before.fallbacks + 1)


@needs_nvrtc
def test_identical_sources_are_compiled_once_also_by_threads() -> None:
    before = nvrtc.counts()
    source = KERNEL.replace("BODY", "x[0] = 42.0f;")
    with ThreadPoolExecutor(4) as pool:
        cubins = list(pool.map(lambda _: nvrtc.compile_cubin(source, "sm_90"), range(4)))
    after = nvrtc.counts()
    assert len(set(cubins)) == 1
    assert (after.compiled, after.cached) == (before.compiled + 1, before.cached + 3)


@needs_nvrtc
def test_a_source_that_does_not_compile_raises_with_the_log_and_is_tried_again() -> None:
    before = nvrtc.counts()
    for _ in range(2):
        with pytest.raises(nvrtc.CudaCompileError, match="nonsense"):
            nvrtc.compile_cubin(KERNEL.replace("BODY", "nonsense();"), "sm_90")
    assert nvrtc.counts().failed == before.failed + 2


@needs_nvrtc
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_are_compiled_apart_to_what_they_are_together(threads: int) -> None:
    source = two_kernels("x[0] = 5.0f;", "x[0] = sqrtf(x[1]);")
    cubins = nvrtc.compile_kernels(source, "sm_90", threads=threads)
    assert list(cubins) == ["first", "second"]
    together = machine_code(nvrtc.run_nvrtc(source, "sm_90", headers=nvrtc.STAND_INS))
    apart = [machine_code(cubin.code) for cubin in cubins.values()]
    assert [list(code) for code in apart] == [[".text.first"], [".text.second"]]
    assert apart[0] | apart[1] == together


@needs_nvrtc
def test_a_kernel_of_several_models_is_compiled_once() -> None:
    one = nvrtc.compile_kernels(two_kernels("x[0] = 6.0f;", "x[0] = 7.0f;"), "sm_90")
    other = nvrtc.compile_kernels(two_kernels("x[0] = 6.0f;", "x[0] = 8.0f;"), "sm_90")
    assert other["first"] is one["first"]
    assert other["second"] is not one["second"]


@needs_nvrtc
def test_kernels_that_cannot_be_compiled_apart_are_compiled_together() -> None:
    between = "__device__ float answer() { return 42.0f; }\n"
    source = two_kernels("x[0] = 9.0f;", "x[0] = answer();", between=between)
    cubins = nvrtc.compile_kernels(source, "sm_90")
    assert list(cubins) == ["first", "second"]
    assert cubins["first"] is cubins["second"]


@needs_nvrtc
def test_the_module_by_which_tvm_would_make_a_cuda_context_is_not_used() -> None:
    tvm = library.load_tvm()

    def create(*_: object) -> None:
        raise AssertionError("TVM's CUDA module was made in a process that builds")

    tvm.register_global_func("ffi.Module.create.cuda", create)  # as beside a GPU driver
    library.load_tvm.cache_clear()
    task = matmul_task(CUDA)
    assert embedded_cubins(built(build.build_candidate(task, default_of(task))).library) == [90]


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "_load", lambda name: None)
    monkeypatch.setattr(nvrtc, "include_folders", lambda: ())
    nvrtc.preload()  # harmless
    problem = nvrtc.cuda_build_problem()
    assert problem is not None
    assert "nvidia-cuda-nvrtc" in problem
    assert "nvidia-cuda-cccl" in problem
    assert problem.endswith(f": {host.install_command('cuda')}")
    assert build.build_problem(CUDA) == problem


# The top is what TVM's code generator writes for NVRTC, in short.
KERNEL = """
#include <cuda/std/cstdint>
using cuda::std::int64_t;
#include <cuda/std/type_traits>
namespace std {
  using cuda::std::is_same;
  using cuda::std::is_integral;
}
extern "C" __global__ void kernel(float* x) { BODY }
"""


def two_kernels(first: str, second: str, *, between: str = "") -> str:
    """Return a source of two kernels as TVM's code generator writes it."""
    head, _, _ = KERNEL.partition('extern "C"')
    header = 'extern "C" __global__ void __launch_bounds__(64) {}(float* __restrict__ x)'
    one, other = header.format("first"), header.format("second")
    return (
        f"{head}{one};\n{other};\n{one} {{\n  {first}\n}}\n\n{between}{other} {{\n  {second}\n}}\n"
    )


_SAXPY = 'extern "C" __global__ void saxpy(float* x) { x[threadIdx.x] *= 2.0f; }'


@needs_nvrtc
def test_a_process_that_compiles_is_no_client_of_a_driver(tmp_path: Path) -> None:
    driver = WatchedDriver(tmp_path)
    text = f"from tunerd.builder import nvrtc; nvrtc.run_nvrtc({_SAXPY!r}, 'sm_90')"
    done = run_python(text, **driver.environment)
    assert done.returncode == 0, done.stderr
    assert driver.asked() == []


def test_what_runners_have_before_they_are_asked_is_no_client_of_a_driver(tmp_path: Path) -> None:
    driver = WatchedDriver(tmp_path)
    text = "from tunerd.runner.preload import preload; preload('cuda')"
    done = run_python(text, **driver.environment)
    assert done.returncode == 0, done.stderr
    assert driver.asked() == []
    done = run_python("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)", **driver.environment)
    assert done.returncode == 0, done.stderr
    assert driver.asked() == ["cuInit"]


@pytest.mark.parametrize(("precision", "expected"), [("", False), ("fp32", False), ("fp16", True)])
def test_intrinsics_of_tensor_cores_are_there_before_a_task_where_they_are_needed(
    precision: str, expected: bool
) -> None:
    text = (
        "import sys; from tunerd.builder import build;"
        "from tunerd.system.targets import cuda_target;"
        f"build.preload(cuda_target('9.0'), {precision!r});"
        "print('tvm.s_tir.tensor_intrin' in sys.modules)"
    )
    done = run_python(text)
    assert done.stdout.strip() == str(expected), done.stderr
