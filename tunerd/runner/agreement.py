"""Whether two builds of one task compute the same, on a device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from tunerd.libraries import calls
from tunerd.runner.arguments import aligned
from tunerd.runner.sampling import FIRST_GPU, Device, failure
from tunerd.system.arrays import (
    KERNEL_TOLERANCES,
    Array,
    comparison_values,
    dtype_of,
    is_floating,
)
from tunerd.vocabulary import (
    BF16,
    FP16,
    SLOT_BYTES,
    TF32,
    Build,
    Failure,
    Kind,
    Stage,
    TensorSpec,
)

Call = Callable[[Sequence[Array]], list[Array]]

SEEDS = (0, 1)

_PART = 1 << 14  # elements
# A product of rounded operands is as far off as one of stored ones: TF32 has the fraction of fp16.
_HALVES = ("float16", "bfloat16")
_ROUNDS_AS = {TF32: "float16", FP16: "float16", BF16: "bfloat16"}


def disagreement(device: Device, reference: Build, build: Build) -> Failure | None:
    """Run both on equal random arguments, of each seed; None where the results agree.

    An element agrees when |out - ref| <= atol * scale + rtol * |ref|, with the largest finite |ref|
    as the scale and the KERNEL_TOLERANCES of the lowest floating type among the arguments, or of
    the precision that the task computes in: what float16 has rounded off, a result in float32
    lacks, too. All arguments are compared: inputs must stay as they are.

    Where a schedule has its weights in a layout or type of its own, they are put into it; the
    default may have one, and a candidate the task's. A layout that is not known (`Build.layouts`)
    is a failure: only weights that are all one value would be the same in it, and those would not
    show a wrong index.

    Kernels of several models are given other weights for each lane, in another order than the
    lanes'.
    """
    known = {i for i, _ in (*build.layouts, *reference.layouts)}
    for i, (own, spec) in enumerate(zip(reference.args, build.args, strict=True)):
        if own.shape != spec.shape and i not in known:
            message = f"{spec.name} is taken in a layout that is not known, so nothing can be said"
            return Failure(Stage.VERIFY, Kind.WRONG_ANSWER, message)
    with tempfile.TemporaryDirectory(prefix="tunerd-agree-") as folder:
        try:
            problem = _first_difference(device, reference, build, Path(folder))
        except Exception as error:
            return failure(Stage.VERIFY, error)
    return Failure(Stage.VERIFY, Kind.WRONG_ANSWER, problem) if problem else None


def _first_difference(device: Device, reference: Build, build: Build, folder: Path) -> str:
    """Say how the results of a build differ, or nothing; raises what loading and running raise."""
    floats = {spec.dtype for spec in _floats(reference.args)}
    floats |= {_ROUNDS_AS[build.precision]} if build.precision in _ROUNDS_AS else set()
    tolerance = max((KERNEL_TOLERANCES[dtype] for dtype in floats), default=(0.0, 0.0))

    with _said_of_the_default():
        default = _loaded(device, reference, folder / "reference.so")
    scratch = [np.zeros(spec.shape, spec.dtype) for spec in build.scratch]
    call: Call | None = None  # not before the default has run
    for seed in SEEDS:
        with _said_of_the_default():
            given, expected = _expected(default, reference, seed)
        call = call or _loaded(device, build, folder / "build.so")
        found = call([*_laid_out(given, build), *scratch])[: len(build.args)]
        for spec, one, other in zip(build.args, _laid_out(expected, build), found, strict=True):
            if problem := _difference(one, other, tolerance):
                return f"{spec.name} differs from the default schedule's: {problem}"
    return ""


@contextmanager
def _said_of_the_default() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = f"the default schedule cannot be compared with: {error}"
        raise RuntimeError(message) from error


def _loaded(device: Device, build: Build, path: Path) -> Call:
    path.write_bytes(build.library)
    calls.provide(build.calls, FIRST_GPU)
    return device.loaded(path)


def _expected(call: Call, reference: Build, seed: int) -> tuple[list[Array], list[Array]]:
    """Return the arguments of a seed, and what the default schedule makes of them.

    Where that is not finite, as with the square root of a variance, no argument has a negative
    value: nothing is known of a NaN, and two right schedules may take its maximum differently.
    """
    specs = _drawn(reference)
    # An index may be of an embedding, and an embedding of one row has no second one.
    integers = 1 if any(len(s.shape) == 2 and s.shape[0] == 1 for s in _floats(specs)) else 2

    def draw(least: float) -> list[Array]:
        drawn = [
            comparison_values(spec, seed, i, least=least, integers=integers)
            for i, spec in enumerate(specs)
        ]
        if reference.tenants > 1:
            drawn[0] = np.roll(np.arange(reference.tenants, dtype=np.int32), 1)
        return drawn

    def run(given: list[Array]) -> list[Array]:
        found = call(_laid_out(given, reference))
        apart = {i for i, _ in reference.layouts}  # which are laid out otherwise than drawn
        if reference.tenants > 1:
            apart |= {0, *reference.weight_args}
        return [given[i] if i in apart else array for i, array in enumerate(found)]

    given = draw(least=-1.0)
    expected = run(given)
    # Sums of many positive halves lose more to rounding than a wrong kernel would.
    if all(_is_finite(array) for array in expected) or any(s.dtype in _HALVES for s in specs):
        return given, expected
    given = draw(least=0.0)
    return given, run(given)


def _drawn(build: Build) -> list[TensorSpec]:
    """Return what values are drawn of: of several models, the weights of each."""
    if build.tenants == 1:
        return list(build.args)
    return [
        replace(spec, shape=(build.tenants, *spec.shape)) if i in build.weight_args else spec
        for i, spec in enumerate(build.args)
    ]


def _laid_out(arrays: Sequence[Array], build: Build) -> list[Array]:
    """Return the arguments of a build, of values as its default's were drawn."""
    known = dict(build.layouts)

    def laid_out(i: int, array: Array, spec: TensorSpec) -> Array:
        if i in known:
            return known[i].of(array)
        return array if build.tenants > 1 else array.reshape(spec.shape)

    found = [
        laid_out(i, array, spec).astype(dtype_of(spec.dtype), copy=False)
        for i, (array, spec) in enumerate(zip(arrays, build.args, strict=True))
    ]
    if build.tenants > 1:
        distance = max((aligned(found[i][0].nbytes) for i in build.weight_args), default=0)
        found[0] = arrays[0] * np.int32(distance // SLOT_BYTES)
        for i in build.weight_args:
            rows = np.zeros((build.tenants, distance // found[i].itemsize), found[i].dtype)
            rows[:, : found[i].shape[1]] = found[i]
            found[i] = rows.reshape(-1)
    return found


def _floats(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs if is_floating(dtype_of(spec.dtype))]


def _is_finite(array: Array) -> bool:
    return not is_floating(array.dtype) or bool(np.isfinite(array).all())


def _difference(expected: Array, found: Array, tolerance: tuple[float, float]) -> str:
    """Say how far two arrays are apart, or nothing where they agree."""
    if np.array_equal(expected, found):
        return ""
    if not is_floating(expected.dtype):
        return f"{int(np.count_nonzero(expected != found))} of {found.size} elements"
    if expected.dtype.kind != "f":  # NumPy's reductions do not know it
        expected, found = expected.astype(np.float32), found.astype(np.float32)
    rtol, atol = tolerance
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
