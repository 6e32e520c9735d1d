"""The precision of `--precision auto`: the fastest that stays near enough to the reference.

How fast a precision is shows after the search alone, but which is faster does not: on tensor cores
products of fp16 and bf16 take the same time, half of TF32's, and fp32 uses none of them. So ORDER
has the precisions of a target, the fastest first, and of equal ones the one of more digits. The
model is compiled with its default schedules in one after the other, and run on a slice of the run's
share; the first that stays within TOLERANCE is tuned. What is tuned is compared as well. Where that
is too far off, its run is moved aside, and the next precision is tuned in its place.

The default kernels of TF32 compute in fp32; what the precision costs is estimated by what rounding
the weights does to the outputs. The last of an order is taken without a look: the run verifies it.

OUT                  the run; its settings have the precision and what was tried
OUT.wrong-PRECISION  a run whose tuned model was too far off
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tunerd.artifacts.compile import compile_artifact
from tunerd.errors import FolderError, ModelError
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.model import FixedModel
from tunerd.frontend.samples import read_samples
from tunerd.records import Store, typed
from tunerd.records.outcome import outcome_from_json
from tunerd.records.paths import Paths
from tunerd.runner.base import Runner
from tunerd.runs.finals.verify import expected_of
from tunerd.runs.folder import prepare
from tunerd.runs.plan import read
from tunerd.settings import TuneSettings
from tunerd.settings.texts import AUTO
from tunerd.slices import require_plan
from tunerd.studies.timing import started
from tunerd.system.text import reason_of
from tunerd.vocabulary import BF16, FP16, FP32, TF32, Arrays, SliceSpec, TargetSpec
from tunerd.vocabulary.outcome import Outcome, TriedPrecision, Verification
from tunerd.vocabulary.verdict import Verdict

# By kind of target. Kernels of CPUs compute in fp32, whatever is stored.
ORDER = {"cuda": (FP16, BF16, TF32, FP32), "llvm": (FP32,)}
TOLERANCE = 0.01  # of an output's largest value

Say = Callable[[str], None]


def resolve_precision(settings: TuneSettings, say: Say) -> TuneSettings:
    """Return settings with the precision that was chosen for them, earlier or now.

    Raises HostError where this machine has no such slice, ModelError or InputError where the model
    or its inputs cannot be used, and FolderError where the folder's run was given a precision.
    """
    known = _chosen_before(settings)
    if known is not None:
        return _with(settings, known)
    prepare(settings.out)
    planned = require_plan(settings.slice_request)
    order = ORDER[planned.target.kind]
    model = read(settings)
    samples = read_samples(settings.inputs, model.inputs, settings.values)
    tried = _wrong_before(settings, order, model)
    left = order[len(tried) :]
    if len(left) > 1:
        judged = _judged(settings, left[:-1], planned.slices[0], planned.target, samples, say)
        tried += judged
    if not tried or tried[-1].refused:
        tried += (TriedPrecision(order[-1]),)
    return _with(settings, tried)


def fall_back(settings: TuneSettings, outcome: Outcome, say: Say) -> TuneSettings | None:
    """Return settings with the next precision where the tuned model is too far off; else None.

    The run is moved aside then, as a whole. `say` is told so, in a line.
    """
    order = ORDER[outcome.target.kind]
    if settings.precision_from != AUTO or settings.precision == order[-1]:
        return None
    refused = _refusal(outcome.verification, _error(outcome.verification))
    if not refused:
        return None
    assert settings.precision is not None
    aside = _aside(settings.out, settings.precision)
    say(
        f"{settings.precision} is not taken: tuned, {refused}; its run is in {aside}, and the next "
        "precision is tuned"
    )
    _move(settings.out, aside)
    asked = settings.model_copy(update={"precision": None, "precision_tried": ()})
    return resolve_precision(asked, say)


def _with(settings: TuneSettings, tried: tuple[TriedPrecision, ...]) -> TuneSettings:
    return settings.model_copy(update={"precision": tried[-1].precision, "precision_tried": tried})


# --- what is said of a precision ---------------------------------------------------------------


def _judged(
    settings: TuneSettings,
    precisions: tuple[str, ...],
    spec: SliceSpec,
    target: TargetSpec,
    samples: tuple[Arrays, ...],
    say: Say,
) -> tuple[TriedPrecision, ...]:
    """Judge one precision after the other, up to the first that is near enough."""
    tried: tuple[TriedPrecision, ...] = ()
    say("choosing the precision: starting a slice")
    with started([spec]) as (one,), tempfile.TemporaryDirectory(prefix="tunerd-") as folder:
        for precision in precisions:
            say(f"choosing the precision: {precision}")
            model = read(settings.model_copy(update={"precision": precision}))
            place = Path(folder, precision)
            try:
                tried += (_judge(model, target, one.runner, samples, place),)
            except ModelError as error:  # of this precision, or of all: the last one tells
                tried += (TriedPrecision(precision, refused=str(error)),)
            if not tried[-1].refused:
                break
    return tried


def _judge(
    fixed: FixedModel,
    target: TargetSpec,
    runner: Runner,
    samples: tuple[Arrays, ...],
    folder: Path,
) -> TriedPrecision:
    kernels = kernels_of(fixed, target)
    model = kernels.model
    compile_artifact(kernels.lowered, kernels.tasks, {}, target, folder, model=model, pct=100)
    expected = expected_of(model, samples)
    verification = expected.verify(lambda inputs: runner.run_model(str(folder), inputs))
    error = _error(verification)
    if fixed.precision == TF32:
        error = max(error, expected.rounding)
    return TriedPrecision(fixed.precision, error, _refusal(verification, error))


def _error(verification: Verification) -> float:
    return max((of.error for of in verification.accuracy), default=0.0)


def _refusal(verification: Verification, error: float) -> str:
    if verification.verdict is Verdict.WRONG:
        return verification.message
    if error <= TOLERANCE:
        return ""
    return f"off by {error:.2g} of an output's largest value, where {TOLERANCE:g} is allowed"


# --- what the folders say ----------------------------------------------------------------------


def _chosen_before(settings: TuneSettings) -> tuple[TriedPrecision, ...] | None:
    """Return what a run in the folder was begun with; None where none was."""
    if not Paths(settings.out).store.exists():
        return None
    with Store.read(settings.out) as store:
        found = store.facts().settings
    tried = typed.of_kind(tuple[TriedPrecision, ...], found.get("precision_tried") or ())
    if found.get("precision_from") != AUTO or not tried:
        raise FolderError(
            f"{settings.out} holds a run whose precision was given, or was left as exported; give "
            "it again, or choose another folder with --out"
        )
    return tried


def _wrong_before(
    settings: TuneSettings, order: tuple[str, ...], model: FixedModel
) -> tuple[TriedPrecision, ...]:
    """Return what earlier sessions tuned and moved aside, and what was refused before these."""
    tried: tuple[TriedPrecision, ...] = ()
    for precision in order[:-1]:
        aside = _aside(settings.out, precision)
        if not Paths(aside).store.exists():
            continue
        with Store.read(aside) as store:
            facts, found = store.facts(), store.outcome()
        if facts.model_digest != model.digest or found is None:
            continue
        before = typed.of_kind(
            tuple[TriedPrecision, ...], facts.settings.get("precision_tried") or ()
        )
        verification = outcome_from_json(found).verification
        error = _error(verification)
        if refused := _refusal(verification, error):
            why = f"tuned, {refused}; see {aside}"
            tried = (*before[:-1], TriedPrecision(precision, error, why))
    return tried


def _aside(out: Path, precision: str) -> Path:
    whole = out.resolve()
    return whole.with_name(f"{whole.name}.wrong-{precision}")


def _move(out: Path, aside: Path) -> None:
    """Move a run aside, and leave what another one in its place begins with."""
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of another model, or of an earlier try
        out.resolve().rename(aside)
        prepare(out)
        for name in (Paths(out).shares.name, Paths(out).model.name):
            if (aside / name).is_dir():
                shutil.copytree(aside / name, out / name)
    except OSError as error:
        raise FolderError(
            f"{out} cannot be moved to {aside}: {reason_of(error)}; choose a folder of "
            "yours with --out"
        ) from error
