"""Tensors in memory that two processes have in common."""

from __future__ import annotations

import os

import numpy as np

from tunerd.runner.seat_service import SharedTensors
from tunerd.system.shared_arrays import SharedArrays
from tunerd.vocabulary import TensorSpec

SPECS = [
    TensorSpec("image", (2, 3, 5), "float32"),
    TensorSpec("none", (0, 4), "int64"),
    TensorSpec("scalar", (), "float16"),
    TensorSpec("mask", (7,), "bool"),
    TensorSpec("half", (3,), "bfloat16"),
]


def test_both_sides_see_what_either_writes() -> None:
    mine = SharedArrays(SPECS)
    assert mine.descriptor is not None
    theirs = SharedArrays(SPECS, os.dup(mine.descriptor))
    rng = np.random.default_rng(0)
    for spec in SPECS:
        array = mine.arrays[spec.name]
        assert (array.shape, str(array.dtype)) == (spec.shape, spec.dtype)
        assert array.ctypes.data % 64 == 0
        array[...] = rng.integers(0, 2, spec.shape)
    for spec in SPECS:
        np.testing.assert_array_equal(theirs.arrays[spec.name], mine.arrays[spec.name])
    theirs.arrays["image"][...] = 7
    assert (mine.arrays["image"] == 7).all()
    assert not mine.flag
    theirs.flag = True
    assert mine.flag


def test_the_memory_outlives_its_descriptor() -> None:
    shared = SharedArrays(SPECS)
    shared.close()
    shared.close()
    assert shared.descriptor is None
    shared.arrays["image"][...] = 1
    assert (shared.arrays["image"] == 1).all()


def test_an_input_and_an_output_may_have_one_name_and_each_request_its_own() -> None:
    spec = TensorSpec("x", (2,), "float32")
    tensors = SharedTensors([spec], [spec], count=2)
    for nth, (inputs, outputs) in enumerate(tensors.buffers):
        inputs["x"][...] = 2 * nth
        outputs["x"][...] = 2 * nth + 1
    for nth, (inputs, outputs) in enumerate(tensors.buffers):
        assert (inputs["x"] == 2 * nth).all()
        assert (outputs["x"] == 2 * nth + 1).all()
    tensors.memory.close()
