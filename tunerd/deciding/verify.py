"""Say whether a compiled model is right: its outputs against ONNX Runtime's, on several seeds."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunerd.errors import ModelError
from tunerd.models.reference import Reference, random_inputs
from tunerd.outcome import Correctness, Latency, Verification
from tunerd.vocabulary import Arrays, Model, Profile, TensorSpec

# Relative error, and absolute error in units of an output's scale (its largest value). Sums
# in another order move float32 outputs of light_densenet121 by 5e-5 of their scale, with ONNX
# Runtime against itself; the rest is room for fast math on GPUs. Other types: exact.
TOLERANCES = {
    "float64": (1e-6, 1e-7),
    "float32": (1e-3, 1e-3),
    "float16": (2e-2, 5e-3),
}

# How far apart the reference's outputs for two inputs must be, in tolerances: a compiled model
# that ignored its input would be out of tolerance by half of it on one of the two.
MIN_SPREAD = 10.0

_MAX_CALLS_PER_SAMPLE = 10_000


def verify(
    run: Callable[[Arrays], Arrays],
    model: Model,
    *,
    seeds: int = 3,
    rtol: float | None = None,
    atol: float | None = None,
    threads: int = 0,
) -> Verification:
    """Compare `run`'s outputs with ONNX Runtime's for `seeds` seeded inputs.

    An element is right when |out - ref| <= atol * scale + rtol * |ref|, where scale is the
    largest |ref| of that output for that seed. `rtol` and `atol` default by the output's dtype
    (TOLERANCES); integers and booleans must be equal. NaN is never right.

    CANNOT_TELL: the reference is not finite, or its outputs for no two inputs differ by MIN_SPREAD
    tolerances, so that a kernel that returns a constant could pass. At least 2 seeds are used.
    `threads` is ONNX Runtime's; 0 is its default. Raises ModelError where it cannot run the model.
    """
    inputs = [verification_inputs(model.inputs, seed) for seed in range(max(seeds, 2))]
    references = _references(model, inputs, threads)
    limits = _limits(model, rtol, atol)

    def verdict(is_right: Correctness, worst: float, message: str) -> Verification:
        # The tolerances in force for the widest dtype among the outputs; exact ones show as 0.
        return Verification(
            verdict=is_right,
            seeds=len(inputs),
            rtol=max((limit.rtol for limit in limits.values()), default=0.0),
            atol=max((limit.atol for limit in limits.values()), default=0.0),
            worst_error=worst,
            message=message,
        )

    if problem := _reference_problem(references, limits):
        return verdict(Correctness.CANNOT_TELL, 0.0, problem)
    worst, where = 0.0, ""
    for seed, (given, expected) in enumerate(zip(inputs, references, strict=True)):
        outputs = run(given)
        for name, limit in limits.items():
            if problem := _shape_problem(name, outputs, expected[name]):
                return verdict(Correctness.WRONG, math.inf, f"seed {seed}: {problem}")
            error = limit.error(outputs[name], expected[name])
            if error > worst:
                worst, where = error, f"output '{name}', seed {seed}"
    if worst > 1.0:
        message = f"{where} is {worst:.3g} times the tolerance away from ONNX Runtime"
        return verdict(Correctness.WRONG, worst, message)
    message = f"all outputs agree with ONNX Runtime on {len(inputs)} seeds"
    return verdict(Correctness.RIGHT, worst, message)


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
            arrays[spec.name] = values + means.astype(values.dtype)
    return arrays


@dataclass(frozen=True)
class _Limit:
    """The tolerance of one output."""

    rtol: float
    atol: float

    def error(self, out: npt.NDArray[np.generic], ref: npt.NDArray[np.generic]) -> float:
        """Return the largest difference in tolerances; infinite for NaN."""
        if ref.size == 0:
            return 0.0
        wide, expected = out.astype(np.float64), ref.astype(np.float64)
        difference = np.abs(wide - expected)
        allowed = self.atol * np.abs(expected).max() + self.rtol * np.abs(expected)
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(difference == 0.0, 0.0, difference / allowed)
        worst = float(np.max(errors))  # NaN, if there is one
        return math.inf if math.isnan(worst) else worst


def _limits(model: Model, rtol: float | None, atol: float | None) -> dict[str, _Limit]:
    limits = {}
    for spec in model.outputs:
        if spec.dtype in TOLERANCES:
            default_rtol, default_atol = TOLERANCES[spec.dtype]
            limits[spec.name] = _Limit(
                rtol=default_rtol if rtol is None else rtol,
                atol=default_atol if atol is None else atol,
            )
        else:
            limits[spec.name] = _Limit(rtol=0.0, atol=0.0)
    return limits


def _references(model: Model, inputs: Sequence[Arrays], threads: int) -> list[Arrays]:
    try:
        reference = Reference(model.proto, threads=threads)
        return [reference.run(given, [o.name for o in model.outputs]) for given in inputs]
    except Exception as error:  # its exceptions share no base of their own
        raise ModelError(
            f"ONNX Runtime cannot run {model.name}, so nothing tells whether the tuned model is "
            f"right: {error}"
        ) from error


def _reference_problem(references: Sequence[Arrays], limits: dict[str, _Limit]) -> str | None:
    """Say why the reference proves nothing, or None where it does."""
    for name in limits:
        kind = np.asarray(references[0][name]).dtype.kind
        if kind == "f" and not all(np.all(np.isfinite(ref[name])) for ref in references):
            return f"ONNX Runtime's output '{name}' holds NaN or infinity for random inputs"
    for name, limit in limits.items():
        first = references[0][name]
        spread = max(limit.error(ref[name], first) for ref in references[1:])
        if spread < MIN_SPREAD:
            return (
                f"the outputs do not depend on the input: ONNX Runtime's '{name}' differs by only "
                f"{spread:.2g} tolerances between inputs ({MIN_SPREAD:g} are needed); use a model "
                "with trained weights"
            )
    return None


def _shape_problem(name: str, outputs: Arrays, ref: npt.NDArray[np.generic]) -> str | None:
    if name not in outputs:
        return f"there is no output '{name}', only {sorted(outputs)}"
    out = outputs[name]
    if out.shape != ref.shape or out.dtype != ref.dtype:
        return (
            f"output '{name}' is {out.dtype}{list(out.shape)}, "
            f"ONNX Runtime's is {ref.dtype}{list(ref.shape)}"
        )
    return None


def onnxruntime_latency(
    model: Model, *, threads: int, cores: Sequence[int], profile: Profile
) -> Latency:
    """Measure ONNX Runtime, fully optimized, with `threads` threads on `cores`.

    It runs in a thread of its own that is bound to the cores, as are the threads that it starts;
    the caller's affinity stays.
    """
    samples: list[float] = []
    errors: list[BaseException] = []

    def measure() -> None:
        try:
            os.sched_setaffinity(0, cores)  # of this thread alone; its children inherit it
            reference = Reference(model.proto, threads=threads, optimize=True)
            inputs = verification_inputs(model.inputs, 0)
            samples.extend(_samples(lambda: reference.run(inputs), profile))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=measure, name="onnxruntime")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return Latency("onnxruntime", tuple(samples))


def _samples(call: Callable[[], object], profile: Profile) -> list[float]:
    call()
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-7)
    calls = min(max(1, math.ceil(profile.min_sample_secs / once)), _MAX_CALLS_PER_SAMPLE)
    samples: list[float] = []
    deadline = time.perf_counter() + profile.max_total_secs
    while len(samples) < profile.max_samples:
        if len(samples) >= profile.min_samples and time.perf_counter() >= deadline:
            break
        started = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - started) / calls)
    return samples
