"""Powers by a constant: no call of pow is left for a GPU's fast mathematics to get wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.lib.lowered import check, load
from tests.lib.models import model


def lowered_power(tmp_path: Path, exponent: float, *before: str, dtype: str = "float32") -> str:
    """Lower x ** exponent, check its numbers, and return its kernels as text."""
    names = ["x", *before]
    nodes = [
        helper.make_node(op, [source], [op]) for source, op in zip(names, before, strict=False)
    ]
    nodes.append(helper.make_node("Pow", [names[-1], "exponent"], ["y"]))
    weights = {"exponent": np.array(exponent, dtype=dtype)}
    made = model(nodes, inputs={"x": (2, 6)}, outputs={"y": (2, 6)}, weights=weights)
    return str(check(load(tmp_path, made)).mod.script())


@pytest.mark.parametrize("exponent", [1, 2, 3, 7, 12, -1, -2, 0.5, -0.5])
def test_a_power_by_a_constant_becomes_products(tmp_path: Path, exponent: float) -> None:
    before = ("Abs",) if abs(exponent) == 0.5 else ()
    assert "T.pow" not in lowered_power(tmp_path, exponent, *before)


@pytest.mark.parametrize("exponent", [0.75, 65])
def test_any_other_power_stays(tmp_path: Path, exponent: float) -> None:
    assert "T.pow" in lowered_power(tmp_path, exponent, "Sigmoid")


def test_an_exponent_may_have_another_type_than_its_base(tmp_path: Path) -> None:
    assert "T.pow" not in lowered_power(tmp_path, 3, dtype="int64")
