"""Inputs that a user gives, in place of random ones: files of NumPy arrays, and single numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tunerd.errors import InputError
from tunerd.system import npz
from tunerd.system.arrays import Array, verification_inputs
from tunerd.vocabulary import Arrays, TensorSpec

MOST_SAMPLES = 16  # of those that are given, the first; each is run in ONNX Runtime
LEAST_SAMPLES = 3  # that verification compares, as many as random inputs


def read_samples(
    path: Path | None, specs: Sequence[TensorSpec], values: Mapping[str, float]
) -> tuple[Arrays, ...]:
    """Return samples of a model's inputs, by name each; none where nothing is given.

    Args:
        path: an .npz file whose arrays are named as the inputs, each of an input's shape, or of
            that shape behind an axis of samples; or a folder of such files, in the order of their
            names. MOST_SAMPLES are read.
        values: by input name, a number that each of its elements has.

    Inputs of which nothing is said are random. Of fewer samples than LEAST_SAMPLES others are made:
    the same values, floats three quarters of them, moved along their last axis.

    Raises InputError for a file that cannot be read or fits none of the inputs.
    """
    if path is None and not values:
        return ()
    known = {spec.name: spec for spec in specs}
    for name in values:
        if name not in known:
            raise InputError(f"--value names no input '{name}', only {', '.join(known)}")
    samples = [] if path is None else _read(path, known)
    while len(samples) < LEAST_SAMPLES:
        samples.append(_moved(samples[-1]) if samples else {})
    filled = []
    for seed, sample in enumerate(samples):
        fixed = {n: _number(value, known[n]) for n, value in values.items()}
        filled.append(verification_inputs(specs, seed) | sample | fixed)
    return tuple(filled)


def _read(path: Path, known: Mapping[str, TensorSpec]) -> list[Arrays]:
    if not path.exists():
        raise InputError(f"there is no file {path}; give inputs, an .npz file or a folder of such")
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise InputError(
            f"{path} holds no .npz file; write one with numpy.savez, its arrays named as the inputs"
        )
    samples: list[Arrays] = []
    for file in files:
        samples += _of_file(file, known)[: MOST_SAMPLES - len(samples)]
        if len(samples) == MOST_SAMPLES:
            break
    return samples


def _of_file(path: Path, known: Mapping[str, TensorSpec]) -> list[Arrays]:
    arrays = npz.read_inputs(path, tuple(known))
    stacked = {name: _stacked(array, known[name], path) for name, array in arrays.items()}
    counts = {len(array) for array in stacked.values() if len(array) != 1} or {1}
    if len(counts) > 1 or counts == {0}:
        told = ", ".join(f"{len(array)} of '{name}'" for name, array in stacked.items())
        raise InputError(f"{path} holds samples that do not go together: {told}")
    (count,) = counts
    return [
        {name: array[min(i, len(array) - 1)] for name, array in stacked.items()}
        for i in range(count)
    ]


def _stacked(array: Array, spec: TensorSpec, path: Path) -> Array:
    """Return an array with an axis of samples, in the input's type."""
    if array.shape == spec.shape:
        array = array[None]
    elif array.ndim == 0 or array.shape[1:] != spec.shape:
        raise InputError(
            f"{path} has '{spec.name}' of shape {list(array.shape)}; the model takes "
            f"{list(spec.shape)}, or several behind an axis of their own"
        )
    if not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise InputError(f"{path} has '{spec.name}' as {array.dtype}; the model takes {spec.dtype}")
    return array.astype(spec.dtype)


def _number(value: float, spec: TensorSpec) -> Array:
    dtype = np.dtype(spec.dtype)
    try:
        with np.errstate(over="raise", invalid="raise"):
            number = np.asarray(value).astype(dtype)
        if dtype.kind != "f" and number != value:
            raise ValueError
    except (ValueError, OverflowError, FloatingPointError):
        raise InputError(
            f"--value {spec.name}={value:g} is no {dtype}, which the model takes"
        ) from None
    return np.full(spec.shape, number, dtype)


def _moved(sample: Arrays) -> Arrays:
    return {
        name: np.roll(array, 1, axis=-1 if array.ndim else None)
        * array.dtype.type(0.75 if array.dtype.kind == "f" else 1)
        for name, array in sample.items()
    }
