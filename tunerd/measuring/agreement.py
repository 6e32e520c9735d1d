"""Whether two builds of one task compute the same, on a device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.deciding.verify import TOLERANCES
from tunerd.measuring.measure import Device, failure, random_array
from tunerd.vocabulary import Build, Failure, Kind, Stage, TensorSpec

Array = np.ndarray[Any, Any]

_WEIGHT = 0.5  # of weights in two layouts
_PART = 1 << 14  # elements


def disagreement(device: Device, reference: Build, build: Build) -> Failure | None:
    """Run both on equal random arguments; None where the results agree.

    An element agrees when |out - ref| <= atol * scale + rtol * |ref|, as in `verify`, with the
    largest finite |ref| as the scale. Where a schedule wants its weights in a layout of its own,
    all weights of that argument are one value, which is the same in any layout.
    """
    pairs = list(zip(reference.args, build.args, strict=True))
    same = {i: _random(one, i) for i, (one, other) in enumerate(pairs) if one.shape == other.shape}
    with tempfile.TemporaryDirectory(prefix="tunerd-agree-") as folder:
        try:
            expected = _called(device, reference, same, Path(folder, "reference.so"))
        except Exception as error:
            message = f"the default schedule cannot be compared with: {error}"
            return failure(Stage.VERIFY, RuntimeError(message))
        try:
            found = _called(device, build, same, Path(folder, "build.so"))
        except Exception as error:
            return failure(Stage.VERIFY, error)
    for spec, one, other in zip(build.args, expected, found, strict=True):
        problem = "" if one.shape != other.shape else _difference(one, other)
        if problem:
            message = f"{spec.name} differs from the default schedule's: {problem}"
            return Failure(Stage.VERIFY, Kind.WRONG_ANSWER, message)
    return None


def _called(device: Device, build: Build, same: Mapping[int, Array], path: Path) -> list[Array]:
    """Run a build on the arguments that are the same for both, and weights of one value."""
    path.write_bytes(build.library)
    arrays = [
        same[i] if i in same else np.full(spec.shape, _WEIGHT, np.dtype(spec.dtype))
        for i, spec in enumerate(build.args)
    ]
    return device.call(path, arrays)


def _random(spec: TensorSpec, seed: int) -> Array:
    array = random_array(spec, seed)
    # Sums of many positive halves lose more to rounding than a wrong kernel would.
    return array - array.dtype.type(0.5) if array.dtype == np.float16 else array


def _difference(expected: Array, found: Array) -> str:
    """Say how far two arrays are apart, or nothing where they agree."""
    if np.array_equal(expected, found):
        return ""
    if expected.dtype.kind != "f":
        return f"{int(np.count_nonzero(expected != found))} of {found.size} elements"
    rtol, atol = TOLERANCES[expected.dtype.name]
    scale = float(np.abs(expected).max(initial=0, where=np.isfinite(expected)))
    wrong, worst = 0, 0.0
    for one, other in _parts(expected, found):
        finite = np.isfinite(one)
        with np.errstate(invalid="ignore"):
            apart = np.abs(other - one)
            near = apart <= atol * scale + rtol * np.abs(one)
        right = np.where(finite, near, (one == other) | (np.isnan(one) & np.isnan(other)))
        if not right.all():
            wrong += int(right.size - np.count_nonzero(right))
            worst = max(worst, np.nan_to_num(apart[finite], nan=np.inf).max(initial=0.0))
    if not wrong:
        return ""
    return f"{wrong} of {found.size} elements, by up to {worst:.3g} at a scale of {scale:.3g}"


def _parts(expected: Array, found: Array) -> Iterator[tuple[Array, Array]]:
    """Yield both in double precision, in parts that a core's cache holds."""
    one, other = expected.reshape(-1), found.reshape(-1)
    for at in range(0, one.size, _PART):
        yield one[at : at + _PART].astype(np.float64), other[at : at + _PART].astype(np.float64)
