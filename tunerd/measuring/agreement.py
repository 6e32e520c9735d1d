"""Whether two builds of one task compute the same, on a device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.deciding.verify import TOLERANCES
from tunerd.measuring.measure import Device, failure, random_array
from tunerd.vocabulary import Build, Failure, Kind, Stage, TensorSpec

Array = np.ndarray[Any, Any]

_WEIGHT = 0.5  # of weights in two layouts


def disagreement(device: Device, reference: Build, build: Build) -> Failure | None:
    """Run both on equal random arguments; None where the results agree.

    An element agrees when |out - ref| <= atol * scale + rtol * |ref|, as in `verify`, with the
    largest finite |ref| as the scale. Where a schedule wants its weights in a layout of its own,
    all weights of that argument are one value, which is the same in any layout.
    """
    with tempfile.TemporaryDirectory(prefix="tunerd-agree-") as folder:
        try:
            expected = _called(device, reference, build, Path(folder, "reference.so"))
        except Exception as error:
            message = f"the default schedule cannot be compared with: {error}"
            return failure(Stage.VERIFY, RuntimeError(message))
        try:
            found = _called(device, build, reference, Path(folder, "build.so"))
        except Exception as error:
            return failure(Stage.VERIFY, error)
    for spec, one, other in zip(build.args, expected, found, strict=True):
        problem = "" if one.shape != other.shape else _difference(one, other)
        if problem:
            message = f"{spec.name} differs from the default schedule's: {problem}"
            return Failure(Stage.VERIFY, Kind.WRONG_ANSWER, message)
    return None


def _called(device: Device, build: Build, other: Build, path: Path) -> list[Array]:
    path.write_bytes(build.library)
    arrays = [
        _argument(mine, its, seed)
        for seed, (mine, its) in enumerate(zip(build.args, other.args, strict=True))
    ]
    return device.call(path, arrays)


def _argument(spec: TensorSpec, other: TensorSpec, seed: int) -> Array:
    if spec.shape != other.shape:
        return np.full(spec.shape, _WEIGHT, np.dtype(spec.dtype))
    array = random_array(spec, seed)
    # Sums of many positive halves lose more to rounding than a wrong kernel would.
    return array - array.dtype.type(0.5) if array.dtype == np.float16 else array


def _difference(expected: Array, found: Array) -> str:
    """Say how far two arrays are apart, or nothing where they agree."""
    if expected.dtype.kind != "f":
        wrong = int(np.count_nonzero(expected != found))
        return f"{wrong} of {found.size} elements" if wrong else ""
    rtol, atol = TOLERANCES[expected.dtype.name]
    one, other = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(one)
    scale = float(np.abs(one[finite]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        near = np.abs(other - one) <= atol * scale + rtol * np.abs(one)
    right = np.where(finite, near, (one == other) | (np.isnan(one) & np.isnan(other)))
    if right.all():
        return ""
    wrong = int(right.size - np.count_nonzero(right))
    worst = float(np.nan_to_num(np.abs(other - one)[finite], nan=np.inf).max(initial=0.0))
    return f"{wrong} of {right.size} elements, by up to {worst:.3g} at a scale of {scale:.3g}"
