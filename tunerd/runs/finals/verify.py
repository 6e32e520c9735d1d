"""Say whether a compiled model is right: its outputs against ONNX Runtime's, on several seeds."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tunerd.errors import ModelError
from tunerd.frontend.onnx.graphs import subgraphs
from tunerd.frontend.onnx.inference import shapes_without_weights
from tunerd.frontend.onnx.reference import Reference
from tunerd.system.arrays import (
    MODEL_TOLERANCES,
    PRECISION_TOLERANCES,
    rounded,
    verification_inputs,
)
from tunerd.vocabulary import Arrays, Model, Profile
from tunerd.vocabulary.outcome import Latency, Verification
from tunerd.vocabulary.verdict import Correctness, Verdict

if TYPE_CHECKING:
    import onnx

# How much farther than rounded weights move an output all rounding may: weights are rounded once,
# what lies between kernels once for each of them.
ROUNDINGS = 4.0
SEEDS = 3  # two at least: a model that ignores its input must differ from one of them

# How far apart the reference's outputs for two inputs must be, in tolerances: a compiled model
# that ignored its input would be out of tolerance by half of it on one of the two.
MIN_SPREAD = 10.0

_MAX_CALLS_PER_SAMPLE = 10_000


def verify(
    run: Callable[[Arrays], Arrays], model: Model, samples: Sequence[Arrays] = ()
) -> Verification:
    """Compare `run`'s outputs with ONNX Runtime's for the samples given, or SEEDS seeded inputs.

    An element is right when |out - ref| <= atol * scale + rtol * |ref|, where scale is the
    largest finite |ref| of that output for that seed. Where the reference is finite, NaN and
    infinity are never right. Integers and booleans must be equal.

    `rtol` and `atol` are the MODEL_TOLERANCES of the lowest floating type among the values that an
    output is computed from: a cast to float32 does not bring back what float16 has rounded off. A
    sum of n terms in a type of unit roundoff u is off by up to n u sum |term| (Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, section 4.2), with u = 2**-11 in float16 and 2**-24 in
    float32 (IEEE 754).

    WRONG: an output disagrees, whatever else is not known. CANNOT_TELL: all agree, but no output
    depends on an input, or one proves nothing: the reference is not finite, or it depends on an
    input, and no two references differ by MIN_SPREAD tolerances, so that a kernel that returns a
    constant could pass. An output that depends on no input has one value: it is compared, no more.

    Where kernels are to compute in another precision than the file's, the tolerance is that of the
    precision, and wider where the model is sensitive to it: ONNX Runtime runs the model once more
    with its weights rounded as they are stored, and ROUNDINGS times as far as that moves an output
    is allowed. No compiled kernel has a part in it.

    Raises ModelError where ONNX Runtime cannot run the model.
    """
    return expected_of(model, samples).verify(run)


def expected_of(model: Model, samples: Sequence[Arrays] = ()) -> Expected:
    """Run a model in ONNX Runtime once, to compare several compiled ones with it; see `verify`."""
    inputs = list(samples) or [verification_inputs(model.inputs, seed) for seed in range(SEEDS)]
    references = _references(model, inputs)
    outputs = _outputs(model)
    if model.precision in PRECISION_TOLERANCES:
        moved = _references(replace(model, proto=with_rounded_weights(model)), inputs)
        outputs = [replace(o, slack=ROUNDINGS * _moved(o.name, references, moved)) for o in outputs]
    of = "samples" if samples else "seeds"
    return Expected(tuple(inputs), tuple(references), tuple(outputs), of)


def _moved(name: str, references: Sequence[Arrays], moved: Sequence[Arrays]) -> float:
    """Return how far an output moves, in its largest value, for any seed."""
    worst = 0.0
    for one, other in zip(references, moved, strict=True):
        wide, near = one[name].astype(np.float64), other[name].astype(np.float64)
        is_known = np.isfinite(wide) & np.isfinite(near)
        scale = float(np.abs(wide[is_known]).max(initial=0.0))
        if scale:
            worst = max(worst, float(np.abs(wide - near)[is_known].max(initial=0.0)) / scale)
    return min(worst, 1.0 / ROUNDINGS)  # beyond that nothing is told


def with_rounded_weights(model: Model) -> onnx.ModelProto:
    """Return a model whose weights have been rounded to its precision, and widened again."""
    import onnx
    from onnx import numpy_helper

    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for part in subgraphs(proto.graph):
        for tensor in part.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                array = rounded(numpy_helper.to_array(tensor), model.precision)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return proto


@dataclass(frozen=True)
class Expected:
    """What ONNX Runtime returns for the inputs of each seed."""

    inputs: tuple[Arrays, ...]
    references: tuple[Arrays, ...]
    outputs: tuple[_Output, ...]
    of: str = "seeds"  # what the inputs are

    def verify(self, run: Callable[[Arrays], Arrays]) -> Verification:
        """Compare `run`'s outputs with these, as the function `verify` does."""
        worst, where, one = 0.0, "", self.of.removesuffix("s")
        for seed, (given, expected) in enumerate(zip(self.inputs, self.references, strict=True)):
            found = run(given)
            for output in self.outputs:
                if problem := _shape_problem(output.name, found, expected[output.name]):
                    return self._verdict(Verdict.WRONG, math.inf, f"{one} {seed}: {problem}")
                error = output.error(found[output.name], expected[output.name])
                if error > worst:
                    worst, where = error, f"output '{output.name}', {one} {seed}"
        if worst > 1.0:
            message = f"{where} is {worst:.3g} times the tolerance away from ONNX Runtime"
            return self._verdict(Verdict.WRONG, worst, message)
        if doubt := _doubt(self.outputs, self.references):
            return self._verdict(Verdict.CANNOT_TELL, worst, doubt)
        message = f"all outputs agree with ONNX Runtime on {len(self.inputs)} {self.of}"
        return self._verdict(Verdict.RIGHT, worst, message)

    def _verdict(self, is_right: Correctness, worst: float, message: str) -> Verification:
        # The tolerances in force for the widest output; exact ones show as 0.
        return Verification(
            verdict=is_right,
            seeds=len(self.inputs),
            rtol=max((output.rtol for output in self.outputs), default=0.0),
            atol=max((output.atol for output in self.outputs), default=0.0),
            worst_error=worst,
            message=message,
        )


@dataclass(frozen=True)
class _Output:
    """An output, its tolerance, and whether it is computed from an input."""

    name: str
    rtol: float
    atol: float
    depends: bool
    slack: float = 0.0  # of its largest value, beside the tolerances

    def error(self, out: npt.NDArray[np.generic], ref: npt.NDArray[np.generic]) -> float:
        """Return the largest difference in tolerances; infinite for NaN.

        Elements in which the reference is not finite are passed over.
        """
        wide, expected = out.astype(np.float64), ref.astype(np.float64)
        is_known = np.isfinite(expected)
        wide, expected = wide[is_known], expected[is_known]
        difference = np.abs(wide - expected)
        size = np.abs(expected)
        allowed = (self.atol + self.slack) * size.max(initial=0.0) + self.rtol * size
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(difference == 0.0, 0.0, difference / allowed)
        worst = float(np.max(errors, initial=0.0))  # NaN, if there is one
        return math.inf if math.isnan(worst) else worst

    def doubt(self, references: Sequence[npt.NDArray[np.generic]]) -> str:
        """Say why outputs that agree with these prove nothing; "" where they do."""
        first = references[0]
        if not all(np.all(np.isfinite(ref)) for ref in references if ref.dtype.kind == "f"):
            return f"ONNX Runtime's output '{self.name}' holds NaN or infinity for random inputs"
        if not self.depends or first.size == 0:
            return ""
        spread = max(self.error(ref, first) for ref in references[1:])
        if spread >= MIN_SPREAD:
            return ""
        return (
            f"ONNX Runtime's output '{self.name}' hardly depends on the input: it differs by only "
            f"{spread:.2g} tolerances between random inputs, and {MIN_SPREAD:g} are needed, so a "
            "model that ignores its input could pass; trained weights may make it differ more"
        )


def _outputs(model: Model) -> list[_Output]:
    graph = shapes_without_weights(model.proto).graph
    sources, types = _sources(graph), _float_types(graph)
    given = {spec.name for spec in model.inputs}
    outputs = []
    for spec in model.outputs:
        behind = _behind(spec.name, sources)
        tolerance = (0.0, 0.0)
        if spec.dtype in MODEL_TOLERANCES:
            floats = {spec.dtype} | {types[name] for name in behind & types.keys()}
            tolerance = max(MODEL_TOLERANCES[dtype] for dtype in floats)
            tolerance = max(tolerance, PRECISION_TOLERANCES.get(model.precision, tolerance))
        outputs.append(_Output(spec.name, *tolerance, depends=bool(behind & given)))
    return outputs


def _sources(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Return what each value of a graph and of its subgraphs is computed from, by name."""
    sources: dict[str, list[str]] = {}
    for part in subgraphs(graph):
        for node in part.node:
            inner = [out.name for attribute in node.attribute for out in attribute.g.output]
            sources |= {name: [*node.input, *inner] for name in node.output}
    return sources


def _float_types(graph: onnx.GraphProto) -> dict[str, str]:
    """Return by name the values that have MODEL_TOLERANCES, and their types."""
    from onnx import helper

    known = {helper.np_dtype_to_tensor_dtype(np.dtype(dtype)): dtype for dtype in MODEL_TOLERANCES}
    types = {}
    for part in subgraphs(graph):
        for value in (*part.input, *part.value_info, *part.output):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in part.initializer}
    return {name: known[kind] for name, kind in types.items() if kind in known}


def _behind(output: str, sources: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names of all values that an output is computed from, and its own."""
    found: set[str] = set()
    left = [output]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += sources.get(name, ())
    return found


def _references(model: Model, inputs: Sequence[Arrays]) -> list[Arrays]:
    try:
        reference = Reference(model.proto)
        return [reference.run(given, [o.name for o in model.outputs]) for given in inputs]
    except Exception as error:  # its exceptions share no base of their own
        raise ModelError(
            f"ONNX Runtime cannot run {model.name}, so nothing tells whether the tuned model is "
            f"right: {error}"
        ) from error


def _doubt(outputs: Sequence[_Output], references: Sequence[Arrays]) -> str:
    """Say why a model that agrees with the references may be wrong; "" where it proves right."""
    doubts = [output.doubt([ref[output.name] for ref in references]) for output in outputs]
    if any(doubts):
        return "; ".join(filter(None, doubts))
    if any(output.depends and references[0][output.name].size for output in outputs):
        return ""
    names = ", ".join(f"'{output.name}'" for output in outputs)
    return (
        f"the values of {names} do not depend on the input: a model that computes nothing from it "
        "would agree with ONNX Runtime, too"
    )


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
    model: Model,
    *,
    threads: int,
    cores: Sequence[int],
    profile: Profile,
    sample: Arrays | None = None,
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
            inputs = sample or verification_inputs(model.inputs, 0)
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
