"""Functions that kernels call: near to the exact values, in few instructions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.contract.test_triton_tenants import compiled_ptx
from tests.lib import triton_in_numpy
from tunerd.candidates.triton.code import kernel_text
from tunerd.candidates.triton.compile import compile_kernel
from tunerd.candidates.triton.functions import ERF, SIGMOID

BLOCK = 1 << 12


def text_of(function: str) -> str:
    lines = [
        f"at = tl.program_id(0) * {BLOCK} + tl.arange(0, {BLOCK})",
        f"tl.store(p1 + at, {function}(tl.load(p0 + at)))",
    ]
    return kernel_text("k", ["p0", "p1"], lines)


def exact_sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize(
    ("function", "exact", "rtol"),
    [(ERF, math.erf, 6e-7), (SIGMOID, exact_sigmoid, 6e-6)],  # of exp(x), as Triton's own has it
    ids=["erf", "sigmoid"],
)
def test_a_function_is_near_to_the_exact_value_everywhere(
    function: str, exact: Callable[[float], float], rtol: float
) -> None:
    steps = np.linspace(-12, 12, 3 * BLOCK - 4)
    small = np.geomspace(1e-30, 1, BLOCK // 2)
    x = np.concatenate([steps, -small, small, [88.0, -88.0, 1e30, -1e30]]).astype(np.float32)
    assert x.size == 4 * BLOCK
    found = np.zeros_like(x)
    triton_in_numpy.run(text_of(function), "k", [x, found], (4, 1, 1))
    expected = np.array([exact(float(value)) for value in x])
    assert np.allclose(found, expected, rtol=rtol, atol=1e-36)


@pytest.mark.parametrize("function", [ERF, SIGMOID])
def test_no_number_stays_none_and_no_other_comes(function: str) -> None:
    x = np.full(BLOCK, np.nan, np.float32)
    x[:2] = np.inf, -np.inf
    found = np.zeros_like(x)
    triton_in_numpy.run(text_of(function), "k", [x, found], (1, 1, 1))
    assert found[:2].tolist() == [1.0, -1.0 if function == ERF else 0.0]
    assert np.isnan(found[2:]).all()


@pytest.mark.parametrize(("function", "most"), [(ERF, 18), (SIGMOID, 5)])
def test_a_function_is_a_few_instructions(
    function: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx = compiled_ptx(monkeypatch)
    types = ["float32", "float32"]
    compile_kernel(text_of(function), "k", types, arch="sm_90", warps=4, stages=1)
    lines = [line.strip() for line in ptx[0].splitlines()]
    arithmetic = [
        line for line in lines if line.split(" ")[0].endswith("f32") and not line.startswith("mov")
    ]
    assert len(arithmetic) <= most * BLOCK // 128 + 8
