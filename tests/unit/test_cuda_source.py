"""One source per kernel, from what TVM's CUDA code generator writes."""

from __future__ import annotations

import pytest

from tunerd.builder.cuda_source import kernel_sources

HEAD = """#include <cuda/std/cstdint>
#define uint unsigned int
__forceinline__ __device__ void wait_for_all() {
  asm volatile("cp.async.wait_all;" :  :  : "memory");
}
__forceinline__ __device__ int lane() {
  if (true) {
    return threadIdx.x & 31;
  }
}
"""


def source(*kernels: str) -> str:
    headers = {
        name: f'extern "C" __global__ void __launch_bounds__(64) {name}(float* __restrict__ x)'
        for name in kernels
    }
    bodies = {
        "first": "  wait_for_all();\n  x[0] = 1.0f;\n",
        "second": "  for (int i = 0; i < 2; ++i) {\n    x[i] = lane();\n  }\n",
        "third": "  x[0] = 3.0f;\n",
    }
    declared = "".join(f"{header};\n" for header in headers.values())
    defined = "".join(f"{header} {{\n{bodies[name]}}}\n\n" for name, header in headers.items())
    return f"{HEAD}{declared}{defined}"


def test_each_kernel_keeps_its_body_and_what_comes_before_all() -> None:
    split = kernel_sources(source("first", "second"))
    assert list(split) == ["first", "second"]
    for name, other in (("first", "second"), ("second", "first")):
        assert split[name].startswith("#include <cuda/std/cstdint>\n#define uint")
        assert f"{name}(float" in split[name]
        assert other not in split[name]


def test_wrappers_stay_with_the_kernels_that_call_them() -> None:
    split = kernel_sources(source("first", "second", "third"))
    assert "cp.async" in split["first"]
    assert "lane()" not in split["first"]
    assert "return threadIdx.x & 31;" in split["second"]
    assert "cp.async" not in split["second"]
    assert "__device__" not in split["third"]


def test_a_kernel_has_the_same_source_whatever_is_beside_it() -> None:
    together = kernel_sources(source("first", "second", "third"))
    for name, alone in together.items():
        assert kernel_sources(source(name)) == {name: alone}


def test_a_source_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        kernel_sources("__global__ void f() {}")
