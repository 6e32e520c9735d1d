"""Say whether a compiled model is right: its outputs against a reference's, on several seeds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tunerd.errors import ModelError
from tunerd.system.arrays import (
    MODEL_TOLERANCES,
    PRECISION_TOLERANCES,
    verification_inputs,
)
from tunerd.vocabulary import Arrays, Model, Ways
from tunerd.vocabulary.outcome import Accuracy, Verification
from tunerd.vocabulary.verdict import Correctness, Verdict

# How much farther than rounded weights move an output all rounding may: weights are rounded once,
# what lies between kernels once for each of them.
ROUNDINGS = 4.0
SEEDS = 3  # two at least: a model that ignores its input must differ from one of them

# How far apart the reference's outputs for two inputs must be, in tolerances: a compiled model
# that ignored its input would be out of tolerance by half of it on one of the two.
MIN_SPREAD = 10.0

_LEAST_CLASSES = 3  # of an output of a rank of two, that its values are scores of classes
_FEW = 0.01  # of the elements of a quantised output, that may be off by a step
_MANY = 0.05  # of them, where rounding moves some by several


def verify(
    run: Callable[[Arrays], Arrays], model: Model, samples: Sequence[Arrays] = ()
) -> Verification:
    """Compare `run`'s outputs with those of the model's reference.

    The inputs are the samples given, or of SEEDS seeds.

    An element is right when |out - ref| <= atol * scale + rtol * |ref|, where scale is the
    largest finite |ref| of that output for that seed. Where the reference is finite, NaN and
    infinity are never right. Integers and booleans must be equal.

    Where an element is not, the reference is asked how well it knows it: it computes the outputs in
    other ways (`Graph.ways`), and what lies between two of its answers is right, as is what lies
    beyond them by ROUNDINGS times as far as rounding moves that output, or, of a quantised one of
    which rounding does not move many values, by one step. Of integers ROUNDINGS times as many may
    differ as do between those ways, and one of a hundred by a step.

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
    precision, and wider where the model is sensitive to it: the reference runs the model once more
    with its weights rounded as they are stored, and ROUNDINGS times as far as that moves an output
    is allowed. No compiled kernel has a part in it.

    Raises ModelError where the reference cannot run the model.
    """
    return expected_of(model, samples).verify(run)


def expected_of(model: Model, samples: Sequence[Arrays] = ()) -> Expected:
    """Run a model's reference once, to compare several compiled ones with it; see `verify`."""
    inputs = list(samples) or [verification_inputs(model.inputs, seed) for seed in range(SEEDS)]
    references = _references(model, inputs)
    outputs = _outputs(model)
    if model.precision in PRECISION_TOLERANCES:
        graph = model.graph.with_rounded_weights(model.precision)
        moved = _references(replace(model, graph=graph), inputs)
        outputs = [replace(o, slack=ROUNDINGS * _moved(o.name, references, moved)) for o in outputs]
    of = "samples" if samples else "seeds"
    reference = model.graph.reference
    return Expected(
        tuple(inputs),
        tuple((found,) for found in references),
        tuple(outputs),
        reference,
        of,
        model.graph.ways,
    )


def _moved(name: str, references: Sequence[Arrays], moved: Sequence[Arrays]) -> float:
    """Return how far an output moves, in its largest value, for any seed."""
    pairs = zip(references, moved, strict=True)
    worst = max(_share_apart(other[name], one[name]) for one, other in pairs)
    return min(worst, 1.0 / ROUNDINGS)  # beyond that nothing is told


def _share_apart(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Return the largest difference, as a share of the largest value that is expected."""
    wide, near = expected.astype(np.float64), found.astype(np.float64)
    is_known = np.isfinite(wide) & np.isfinite(near)
    scale = float(np.abs(wide[is_known]).max(initial=0.0))
    apart = float(np.abs(wide[is_known] - near[is_known]).max(initial=0.0))
    return apart / scale if scale else 0.0


def _many_move(name: str, ways: Ways, step: float) -> Iterator[bool]:
    """Say, of two ways to compute an output, whether many of its values differ."""
    for other in ways.others:
        for one, same in zip(ways.known, other, strict=True):
            apart = np.abs(one[name].astype(np.float64) - same[name])
            yield bool(np.mean(apart > step / 2) > _MANY)


def _widened(output: _Output, ways: Ways) -> _Output:
    """Return an output with what is not known of it."""
    step = ways.steps.get(output.name, 0.0)
    first = ways.known[0][output.name]
    if first.dtype.kind == "f":
        moved = max(_moved(output.name, ways.known, other) for other in ways.others)
        # What moves by steps moves by whole ones; by several where rounding moves many values.
        is_firm = step and not any(_many_move(output.name, ways, step))
        slack = moved if is_firm else ROUNDINGS * moved
        return replace(output, slack=max(output.slack, slack), step=step)
    counts = [
        int(np.count_nonzero(one[output.name] != same[output.name]))
        for other in ways.others
        for one, same in zip(ways.known, other, strict=True)
    ]
    few = ROUNDINGS * max(counts)
    return replace(output, few=max(few, _FEW * first.size, 1.0) if step else few, step=step)


@dataclass(frozen=True)
class Expected:
    """What a model's reference returns for the inputs of each seed."""

    inputs: tuple[Arrays, ...]
    answers: tuple[tuple[Arrays, ...], ...]  # all right; the first is known best
    outputs: tuple[_Output, ...]
    reference: str  # in words
    of: str = "seeds"  # what the inputs are
    ways: Callable[[Sequence[Arrays]], Ways | None] = lambda _: None
    said_so: str = ""  # what is added of outputs that agree

    def verify(self, run: Callable[[Arrays], Arrays]) -> Verification:
        """Compare `run`'s outputs with these, as the function `verify` does."""
        found = [run(given) for given in self.inputs]
        judged = self._judged(found)
        if judged.verdict is Verdict.WRONG and self._wider is not None:
            return self._wider._judged(found)
        return judged

    @property
    def rounding(self) -> float:
        """How far rounding to the model's precision may move an output, of its largest value."""
        return max((output.slack for output in self.outputs), default=0.0)

    @functools.cached_property
    def _wider(self) -> Expected | None:
        """The same with what the reference does not know of its outputs."""
        ways = self.ways(self.inputs)
        if ways is None:
            return None
        return replace(
            self,
            answers=tuple((k, *a) for k, a in zip(ways.known, self.answers, strict=True)),
            outputs=tuple(_widened(output, ways) for output in self.outputs),
            said_so=", as far as it agrees with itself",
        )

    def _judged(self, found: Sequence[Arrays]) -> Verification:
        worst, where, one = 0.0, "", self.of.removesuffix("s")
        for seed, (outputs, answers) in enumerate(zip(found, self.answers, strict=True)):
            for output in self.outputs:
                expected = [answer[output.name] for answer in answers]
                if problem := self._shape_problem(output.name, outputs, expected[0]):
                    return self._verdict(Verdict.WRONG, math.inf, f"{one} {seed}: {problem}")
                error = output.error(outputs[output.name], *expected)
                if error > worst:
                    worst, where = error, f"output '{output.name}', {one} {seed}"
        accuracy = tuple(self._accuracy(found))
        if worst > 1.0:
            message = f"{where} is {worst:.3g} times the tolerance away from {self.reference}"
            return self._verdict(Verdict.WRONG, worst, message, accuracy)
        if doubt := self._doubt():
            return self._verdict(Verdict.CANNOT_TELL, worst, doubt, accuracy)
        message = f"all outputs agree with {self.reference} on {len(self.inputs)} {self.of}"
        message += self.said_so
        return self._verdict(Verdict.RIGHT, worst, message, accuracy)

    def _accuracy(self, found: Sequence[Arrays]) -> Iterator[Accuracy]:
        for output in self.outputs:
            pairs = [
                (outputs[output.name].astype(np.float64), answers[0][output.name])
                for outputs, answers in zip(found, self.answers, strict=True)
            ]
            first = pairs[0][1]
            if first.dtype.kind != "f" or not first.size:
                continue
            error = max(_share_apart(*pair) for pair in pairs)
            if first.ndim != 2 or first.shape[1] < _LEAST_CLASSES:
                yield Accuracy(output.name, error)
                continue
            same = sum(int(np.sum(one.argmax(1) == other.argmax(1))) for one, other in pairs)
            yield Accuracy(output.name, error, len(first) * len(pairs), same)

    def _verdict(
        self,
        is_right: Correctness,
        worst: float,
        message: str,
        accuracy: tuple[Accuracy, ...] = (),
    ) -> Verification:
        # The tolerances in force for the widest output; exact ones show as 0.
        return Verification(
            verdict=is_right,
            seeds=len(self.inputs),
            rtol=max((output.rtol for output in self.outputs), default=0.0),
            atol=max((output.atol for output in self.outputs), default=0.0),
            worst_error=worst,
            message=message,
            reference=self.reference,
            inputs=self.of.removesuffix("s"),
            accuracy=accuracy,
        )

    def _doubt(self) -> str:
        """Say why a model that agrees with the references may be wrong; "" where it is right."""
        references = [answers[0] for answers in self.answers]
        doubts = [o.doubt([ref[o.name] for ref in references]) for o in self.outputs]
        if any(doubts):
            return "; ".join(f"{self.reference}'s {doubt}" for doubt in doubts if doubt)
        if any(o.depends and references[0][o.name].size for o in self.outputs):
            return ""
        names = ", ".join(f"'{output.name}'" for output in self.outputs)
        return (
            f"the values of {names} do not depend on the input: a model that computes nothing "
            f"from it would agree with {self.reference}, too"
        )

    def _shape_problem(
        self, name: str, outputs: Arrays, ref: npt.NDArray[np.generic]
    ) -> str | None:
        if name not in outputs:
            return f"there is no output '{name}', only {sorted(outputs)}"
        out = outputs[name]
        if out.shape != ref.shape or out.dtype != ref.dtype:
            return (
                f"output '{name}' is {out.dtype}{list(out.shape)}, "
                f"{self.reference}'s is {ref.dtype}{list(ref.shape)}"
            )
        return None


def with_lanes(
    found: Verification, expected: Expected, pairs: Sequence[tuple[Arrays, Arrays]]
) -> Verification:
    """Return a verification with that of a model's lanes, which compute for several tenants.

    Args:
        found: of its own tenant, in one lane.
        expected: what the reference returns for that tenant; its tolerances are those of all.
        pairs: outputs of requests in lanes, and those of a compiled model of their tenants alone.
    """
    alone = replace(
        expected,
        inputs=tuple({} for _ in pairs),
        answers=tuple((answer,) for _, answer in pairs),
        reference="the kernels for one model, of its tenant's weights",
        of="requests",
        ways=lambda _: None,
    )
    outputs = iter([of_lane for of_lane, _ in pairs])
    lanes = alone.verify(lambda _: next(outputs))
    worst = max(found.worst_error, lanes.worst_error)
    if found.verdict is Verdict.WRONG or lanes.verdict is not Verdict.WRONG:
        message = f"{found.message}; {lanes.message}"
        return replace(found, worst_error=worst, message=message)
    return replace(found, verdict=Verdict.WRONG, worst_error=worst, message=lanes.message)


@dataclass(frozen=True)
class _Output:
    """An output, its tolerance, and whether it is computed from an input."""

    name: str
    rtol: float
    atol: float
    depends: bool
    slack: float = 0.0  # of its largest value, beside the tolerances
    step: float = 0.0  # likewise, in its own unit
    few: float = 0.0  # elements of integers that may differ, by a step where there is one

    def error(self, out: npt.NDArray[np.generic], *answers: npt.NDArray[np.generic]) -> float:
        """Return the largest difference from the answers, in tolerances; infinite for NaN.

        What lies between two answers does not differ. Elements in which an answer is not finite
        are passed over.
        """
        wide = out.astype(np.float64)
        expected = np.stack([answer.astype(np.float64) for answer in answers])
        is_known = np.isfinite(expected).all(axis=0)
        wide, expected = wide[is_known], expected[:, is_known]
        least, most = expected.min(axis=0), expected.max(axis=0)
        difference = np.maximum(np.maximum(least - wide, wide - most), 0.0)
        if self.few and difference.any():  # NaN is none of these
            beyond = float(difference.max()) / self.step if self.step else 0.0
            return max(beyond, float(np.count_nonzero(difference)) / self.few)
        size = np.abs(expected[0])
        allowed = (self.atol + self.slack) * size.max(initial=0.0) + self.rtol * size + self.step
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(difference == 0.0, 0.0, difference / allowed)
        worst = float(np.max(errors, initial=0.0))  # NaN, if there is one
        return math.inf if math.isnan(worst) else worst

    def doubt(self, references: Sequence[npt.NDArray[np.generic]]) -> str:
        """Say what of these makes agreeing with them prove nothing; "" where it does prove it."""
        first = references[0]
        if not all(np.all(np.isfinite(ref)) for ref in references if ref.dtype.kind == "f"):
            return f"output '{self.name}' holds NaN or infinity for random inputs"
        if not self.depends or first.size == 0:
            return ""
        spread = max(self.error(ref, first) for ref in references[1:])
        if spread >= MIN_SPREAD:
            return ""
        return (
            f"output '{self.name}' hardly depends on the input: it differs by only "
            f"{spread:.2g} tolerances between random inputs, and {MIN_SPREAD:g} are needed, so a "
            "model that ignores its input could pass; inputs of yours, with --inputs, may tell more"
        )


def _outputs(model: Model) -> list[_Output]:
    behind = model.graph.behind(model.outputs)
    outputs = []
    for spec in model.outputs:
        tolerance = (0.0, 0.0)
        if spec.dtype in MODEL_TOLERANCES:
            floats = {spec.dtype} | (behind[spec.name].dtypes & MODEL_TOLERANCES.keys())
            tolerance = max(MODEL_TOLERANCES[dtype] for dtype in floats)
            tolerance = max(tolerance, PRECISION_TOLERANCES.get(model.precision, tolerance))
        outputs.append(_Output(spec.name, *tolerance, depends=behind[spec.name].is_input))
    return outputs


def _references(model: Model, inputs: Sequence[Arrays]) -> list[Arrays]:
    try:
        return model.graph.run(inputs)
    except Exception as error:  # ONNX Runtime's share no base of their own
        raise ModelError(
            f"{model.graph.reference} cannot run {model.name}, so nothing tells whether the tuned "
            f"model is right: {error}"
        ) from error
