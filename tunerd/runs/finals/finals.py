"""Winners -> Outcome: the artifact, and whether it is right and faster.

The whole model is compiled twice, with the winners and with the defaults, checked against its
reference and timed in turns on the quiet slice. Kernels that win alone may lose together: where the
tuned model is slower, the default schedules ship.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunerd.artifacts.compile import compile_artifact, finish_manifest
from tunerd.artifacts.lane_check import inputs_for, pairs_of
from tunerd.builder.objects import Objects
from tunerd.errors import InfrastructureError
from tunerd.frontend.kernels import Kernels
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.runner.base import TorchModule
from tunerd.runs.finals import onnxruntime, pytorch
from tunerd.runs.finals.allowance import Allowance
from tunerd.runs.finals.quiet_slice import (
    QuietSlice,
    disturbed_by,
)
from tunerd.runs.finals.selection import Say, choose_winners
from tunerd.runs.finals.verify import Expected, expected_of, with_lanes
from tunerd.runs.folder import RunFolder
from tunerd.runs.plan import RunPlan
from tunerd.slices.neighbors import NONE
from tunerd.stats.paired import compare
from tunerd.system.text import duration_text
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    MODEL,
    Build,
    Candidate,
    CapProof,
    Failure,
    Measurement,
    Model,
    Phase,
    Profile,
)
from tunerd.vocabulary.outcome import Comparison, Latency, Outcome, TaskOutcome, Verification
from tunerd.vocabulary.verdict import Verdict

_ALONE = "alone"  # the folder of a model of one tenant, where lanes serve several


@dataclass(frozen=True)
class Ending:
    """What the end of a run works with."""

    plan: RunPlan
    folder: RunFolder
    kernels: Kernels
    quiet: QuietSlice  # sees the run folder; with the other slices of its device that live
    cores: tuple[int, ...]  # of it, where they are this machine's
    proofs: tuple[CapProof, ...]
    say: Say
    enter: Callable[[Phase], None]
    unsearched: Mapping[str, str] = field(default_factory=dict)  # task_id -> why it has no trials
    built: Sequence[Build] = ()  # by the search
    allowance: Allowance = field(default_factory=Allowance)

    @property
    def model(self) -> Model:
        return self.kernels.model

    @property
    def tenants(self) -> int | None:
        """How many models' requests a launch takes; None where it serves one model alone."""
        return self.plan.settings.lanes

    @property
    def has_onnxruntime(self) -> bool:
        """Whether ONNX Runtime is timed beside the model: it is, on cores of this machine."""
        return bool(self.cores) and isinstance(self.model.graph, OnnxGraph)


@dataclass(frozen=True)
class _Trial:
    """The whole model, tuned, beside its default."""

    folder: Path
    expected: Expected
    verification: Verification
    default: Latency
    tuned: Latency
    disturbed_by: str

    @property
    def comparison(self) -> Comparison:
        return compare(self.default.run_secs, self.tuned.run_secs)


def finish(ending: Ending) -> Outcome:
    """Choose the winners, compile, verify and time the model; store and return the outcome."""
    ending.enter(Phase.FINALS)
    quiet = _with_neighbours(ending.quiet)
    # Nothing becomes the artifact before it is verified. Each folder is compiled once: a runner
    # keeps the models that it has loaded, by their paths.
    trials = ending.folder.paths.root.resolve() / "trials"  # a runner works in another folder
    try:
        with Objects() as objects, ThreadPoolExecutor() as pool:
            compiling = _Compiling(ending, trials, objects, pool)
            if ending.plan.layout.target.is_cuda:  # whose kernels are timed on no core
                compiling.begin()
            outcomes = choose_winners(
                ending.kernels.tasks,
                ending.folder.store,
                quiet,
                say=ending.say,
                unsearched=ending.unsearched,
                built=ending.built,
                libraries=ending.plan.settings.libraries,
                allowance=ending.allowance,
            )
            ending.enter(Phase.MODEL)
            outcomes, trial = _compared(ending, quiet, compiling, outcomes)
        outcome = _kept(ending, outcomes, trial)
        if outcome.verification.verdict is not Verdict.WRONG:
            outcome = _beside_onnxruntime(ending, quiet, outcome)
            outcome = _beside_pytorch(ending, quiet, outcome, trial.expected)
            outcome = _with(ending, outcome, (), ending.allowance.remarks())
        return outcome
    finally:
        shutil.rmtree(trials, ignore_errors=True)


class _Compiling:
    """The models of a run's end, of which the default ones need no winners.

    So they may be compiled while these are chosen, and in any case beside the tuned one: most of it
    holds no lock of Python's.
    """

    def __init__(
        self, ending: Ending, trials: Path, objects: Objects, pool: ThreadPoolExecutor
    ) -> None:
        self.trials = trials
        self._compiled = functools.partial(_compile, ending, objects=objects)
        self._is_alone = ending.tenants is not None
        self._pool = pool
        self._defaults: list[Future[None]] = []

    def begin(self) -> None:
        """Begin with the default models, unless they have begun."""
        if self._defaults:
            return
        self._defaults.append(self._pool.submit(self._compiled, (), self.trials / "default"))
        if self._is_alone:
            alone = self._pool.submit(self._compiled, (), self.trials / _ALONE, is_alone=True)
            self._defaults.append(alone)

    def tuned(self, outcomes: Sequence[TaskOutcome], name: str) -> Path:
        """Compile a model with winners, wait for all, and return its folder."""
        self.begin()
        self._compiled(outcomes, self.trials / name)
        for default in self._defaults:
            default.result()
        return self.trials / name


def _compared(
    ending: Ending,
    quiet: QuietSlice,
    compiling: _Compiling,
    outcomes: tuple[TaskOutcome, ...],
) -> tuple[tuple[TaskOutcome, ...], _Trial]:
    """Compile the model and try it beside its default; without winners where it is slower."""
    ending.say("compiling the model, with its default schedules and with the tuned ones")
    trial = _try(ending, quiet, compiling.tuned(outcomes, "tuned"), outcomes)
    if trial.comparison.verdict is Verdict.SLOWER and any(o.is_tuned for o in outcomes):
        outcomes = tuple(_stay(o, "the whole model is slower with it") for o in outcomes)
        ending.say("compiling the model with the default schedules instead")
        trial = _try(ending, quiet, compiling.tuned(outcomes, "untuned"), outcomes)
    return outcomes, trial


def _with_neighbours(quiet: QuietSlice) -> QuietSlice:
    """Have the others of the device idle, unless they are to work beside the finalists."""
    if quiet.finals.neighbours == NONE:
        return replace(quiet, others=())
    if not quiet.others:
        raise InfrastructureError(
            f"the finals are to have neighbours, and no other slice of {quiet.slice_id}'s "
            "device lives; what was measured is stored, and the same command goes on"
        )
    return quiet


def _kept(ending: Ending, outcomes: tuple[TaskOutcome, ...], trial: _Trial) -> Outcome:
    """Make the trial the artifact, or reject it where it is wrong; store and return the outcome."""
    artifact = ending.folder.paths.artifact
    outcome = Outcome(
        model=ending.model,
        target=ending.plan.layout.target,
        tasks=outcomes,
        verification=trial.verification,
        latencies=(trial.default, trial.tuned),
        end_to_end=trial.comparison,
        artifact=str(artifact),
        proofs=ending.proofs,
        disturbed_by=trial.disturbed_by,
    )
    if trial.verification.verdict is Verdict.WRONG:
        place = artifact.with_name("artifact.rejected")
    else:
        place = artifact
        tried = ending.plan.settings.precision_tried
        finish_manifest(trial.folder, outcome, precision_tried=tried)
    for old in (artifact, place):
        shutil.rmtree(old, ignore_errors=True)
    trial.folder.rename(place)
    ending.folder.store.save_outcome(outcome)
    return outcome


def _beside_onnxruntime(ending: Ending, quiet: QuietSlice, outcome: Outcome) -> Outcome:
    """Time ONNX Runtime on the cores of the quiet slice, where those are this machine's.

    What was kept stays, whatever comes of it.
    """
    if not ending.has_onnxruntime:
        return outcome
    ending.say("timing ONNX Runtime on the same cores, in turns with the tuned model")
    latencies, remarks = onnxruntime.timed_beside(
        quiet,
        str(Path(outcome.artifact).resolve()),
        ending.model,
        cores=ending.cores,
        sample=next(iter(ending.plan.samples), None),
        requests=ending.tenants or 1,
        profile=ending.allowance.for_models(MODEL, 2),
    )
    return _with(ending, outcome, latencies, remarks)


def _beside_pytorch(
    ending: Ending, quiet: QuietSlice, outcome: Outcome, expected: Expected
) -> Outcome:
    """Time PyTorch, where that is asked for; what was kept stays, whatever comes of it."""
    settings = ending.plan.settings
    if settings.against is None:
        return outcome
    model = outcome.model
    module = TorchModule(
        settings.against,
        model.precision,
        {spec.name: expected.inputs[0][spec.name] for spec in model.inputs},
        {spec.name: expected.answers[0][0][spec.name] for spec in model.outputs},
    )
    latencies, remarks = pytorch.timed_beside(
        quiet,
        str(Path(outcome.artifact).resolve()),
        module,
        limit_secs=settings.against_limit_secs,
        say=ending.say,
    )
    return _with(ending, outcome, latencies, remarks)


def _with(
    ending: Ending, outcome: Outcome, latencies: Sequence[Latency], remarks: Sequence[str]
) -> Outcome:
    """Add what was timed beside the artifact, and remarks, to what was kept."""
    if not latencies and not remarks:
        return outcome
    outcome = replace(
        outcome,
        latencies=(*outcome.latencies, *latencies),
        remarks=(*outcome.remarks, *remarks),
    )
    tried = ending.plan.settings.precision_tried
    finish_manifest(Path(outcome.artifact), outcome, precision_tried=tried)
    ending.folder.store.save_outcome(outcome)
    return outcome


def _try(
    ending: Ending, quiet: QuietSlice, folder: Path, outcomes: Sequence[TaskOutcome]
) -> _Trial:
    """Verify a compiled model and time it beside the default."""
    ending.say(f"comparing outputs with {ending.model.graph.reference}")
    expected = expected_of(ending.model, ending.plan.samples)
    verification = expected.verify(lambda inputs: quiet.run_model(str(folder), inputs))
    if ending.tenants is not None and verification.verdict is not Verdict.WRONG:
        ending.say("comparing each lane with a model of its tenant's weights alone")
        inputs, alone = inputs_for(expected.inputs), str(folder.with_name(_ALONE))
        pairs = pairs_of(quiet.run_model(str(folder), inputs, alone=alone))
        verification = with_lanes(verification, expected, pairs)
    # Half of what is left is for what is timed after it.
    part = 0.5 if ending.has_onnxruntime else 1.0
    profile = ending.allowance.for_models(MODEL, 2, part=part)
    takes = duration_text(_timing_secs(outcomes, profile))
    ending.say(f"timing the whole model, tuned and default in turns, for about {takes}")
    results = quiet.compare_models((str(folder.with_name("default")), str(folder)), profile)
    default, tuned = results
    return _Trial(
        folder,
        expected,
        verification,
        _latency("default", default),
        _latency("tuned", tuned),
        disturbed_by(results),
    )


def _timing_secs(outcomes: Sequence[TaskOutcome], profile: Profile) -> float:
    """Return about how long two models are timed, by what their kernels take."""
    secs = 0.0
    for kernels in (
        sum(o.weight * (o.default_secs or 0.0) for o in outcomes),
        sum(o.weight * (o.best_secs or 0.0) for o in outcomes),
    ):
        sample_secs = max(kernels, profile.min_sample_secs)
        most_secs = min(profile.max_samples * sample_secs, profile.max_total_secs)
        secs += max(profile.min_samples * sample_secs, most_secs)
    return secs


def _compile(
    ending: Ending,
    outcomes: Sequence[TaskOutcome],
    folder: Path,
    *,
    objects: Objects,
    is_alone: bool = False,
) -> None:
    winners = {o.task_id: o.winner for o in outcomes if o.is_tuned}
    compile_artifact(
        ending.kernels.lowered,
        ending.kernels.tasks,
        winners,
        ending.plan.layout.target,
        folder,
        model=ending.model,
        pct=ending.plan.settings.pct,
        proofs=ending.proofs,
        sample=next(iter(ending.plan.samples), None),
        tenants=None if is_alone else ending.tenants,
        objects=objects,
    )


def _latency(name: str, result: Measurement | Failure) -> Latency:
    if isinstance(result, Failure):
        raise InfrastructureError(f"the {name} model could not be timed: {result.message}")
    return Latency(name, result.run_secs)


def _stay(outcome: TaskOutcome, why: str) -> TaskOutcome:
    if not outcome.is_tuned:
        return outcome
    default = Candidate(
        outcome.task_id,
        next(f.candidate_id for f in outcome.finalists if f.is_default),
        DEFAULT_SOURCE,
    )
    return replace(outcome, winner=default, best_secs=outcome.default_secs, note=why)
