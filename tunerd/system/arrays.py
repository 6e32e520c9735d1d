"""Seeded arrays that kernels and models are run on, and how far apart two results may be.

    random_inputs        of a model, where import checks what it changes
    verification_inputs  of a model that is compared with ONNX Runtime
    comparison_values    of a kernel's argument, where two schedules are compared
    timing_values        of whatever is timed

The four differ because what shows a wrong result is not what takes a usual time. Tolerances are by
floating type: relative error, and absolute error in units of the scale, which is the largest value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tunerd.vocabulary import Arrays, TensorSpec

Array = np.ndarray[Any, Any]

# Of a model's outputs. Sums in another order move float32 outputs of light_densenet121 by 5e-5 of
# their scale, with ONNX Runtime against itself; the rest is room for fast math on GPUs. In float16,
# 4,096 products summed one by one are up to 8.6e-3 of the scale away from ONNX Runtime, which sums
# in float32, and up to 6.2e-3 where the output is small. Other types: exact.
MODEL_TOLERANCES = {
    "float64": (1e-6, 1e-7),
    "float32": (1e-3, 1e-3),
    "float16": (2e-2, 8e-3),
}

# Where tensors between kernels are stored in another precision than the file's, or products are of
# rounded operands: four roundings, of 2^-11 in fp16 and TF32, and of 2^-8 in bf16. What all layers
# of a model make of them is measured (runs.finals.verify).
PRECISION_TOLERANCES = {"tf32": (2e-3, 2e-3), "fp16": (2e-3, 2e-3), "bf16": (1.6e-2, 1.6e-2)}

# Of a kernel's arguments. Measured on a CPU: searched schedules of ResNet-50's convolutions in
# float32 were up to 4.1e-6 of the scale away from the default's; 4,608 products of random values,
# summed one by one, were 1.7e-6 in float32, 3.3e-15 in float64 and 1.8e-2 in float16 away from the
# exact sum. The rest is room for other operations, and for fast math on GPUs. Other types: exact.
KERNEL_TOLERANCES = {
    "float64": (1e-9, 1e-9),
    "float32": (1e-4, 1e-4),
    "float16": (2e-2, 3e-2),
    "bfloat16": (1.6e-2, 1.6e-2),  # stored alone, never summed in: four roundings of 2^-8
}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the type of a name; bfloat16 is of ml_dtypes, which TVM brings along."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def rounded(array: Array, precision: str) -> Array:
    """Return float32 values as they are in a precision of PRECISION_TOLERANCES."""
    if precision == "fp16":
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float16).astype(np.float32)
        return np.where(np.isfinite(narrow), narrow, array)
    kept = {"tf32": 13, "bf16": 16}[precision]  # bits of the fraction that go; to nearest, even
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    half = np.uint32((1 << (kept - 1)) - 1) + ((bits >> np.uint32(kept)) & np.uint32(1))
    near = ((bits + half) >> np.uint32(kept)) << np.uint32(kept)
    return np.where(np.isfinite(array), near.view(np.float32), array).astype(np.float32)


def random_inputs(specs: Iterable[TensorSpec], seed: int) -> Arrays:
    """Return seeded inputs by name: standard normal floats; integers and booleans of 0 and 1.

    Zero and one are valid where integers are indices into a table or a mask.
    """
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for spec in specs:
        dtype = np.dtype(spec.dtype)
        is_float = np.issubdtype(dtype, np.floating)
        values = rng.standard_normal(spec.shape) if is_float else rng.integers(0, 2, spec.shape)
        arrays[spec.name] = np.asarray(values).astype(dtype)
    return arrays


def verification_inputs(specs: Iterable[TensorSpec], seed: int) -> Arrays:
    """Return seeded inputs: those of `random_inputs`, in odd seeds with a mean of each channel.

    Noise alone would not do: a network that averages over an image maps any two images of
    independent noise to nearly the same outputs. Shifted channels, or rows, alone would not do
    either: they drive some networks into a softmax that is all zeros and a one.
    """
    specs = tuple(specs)
    arrays = random_inputs(specs, seed)
    if seed % 2 == 0:
        return arrays
    rng = np.random.default_rng(seed)
    for spec in specs:
        values = arrays[spec.name]
        if np.issubdtype(values.dtype, np.floating):
            kept = spec.shape[: max(1, len(spec.shape) - 2)]
            means = rng.standard_normal(kept).reshape(kept + (1,) * (len(spec.shape) - len(kept)))
            shifted = values + means.astype(values.dtype)
            arrays[spec.name] = np.asarray(shifted)  # a sum of arrays without axes is a scalar
    return arrays


def comparison_values(
    spec: TensorSpec, seed: int, nth: int, *, least: float = -1.0, integers: int = 2
) -> Array:
    """Return the seeded values of an argument: floats from `least` to 1, integers below `integers`.

    Signed, because a kernel that loses a ReLU, or takes an absolute value, does nothing wrong to
    values that are not; and sums of them stay small, so that one wrong term shows. Below 1, because
    a float may be cast to an index. Integers may be indices of a table, as in `random_inputs`:
    what is wrong for others than 0 and 1 alone does not show.
    """
    rng = np.random.default_rng((seed, nth))
    dtype = dtype_of(spec.dtype)
    if not is_floating(dtype):
        return rng.integers(0, integers, spec.shape, np.uint8).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    values: Array = np.asarray(rng.random(spec.shape, wide))
    np.multiply(values, 1.0 - least, out=values)
    np.add(values, least, out=values)
    return values.astype(dtype, copy=False)


def timing_values(spec: TensorSpec, seed: int) -> Array:
    """Return seeded values in [-1, 1); zeros for integers, which may be indices.

    Of both signs, because some functions take as long as their argument lets them: a product of
    two matrices of positive values is so large that erf has nothing left to compute.
    """
    dtype = dtype_of(spec.dtype)
    if not is_floating(dtype):
        return np.zeros(spec.shape, dtype)
    values = np.random.default_rng(seed).random(spec.shape, np.float32)
    return (2 * values - 1).astype(dtype)
