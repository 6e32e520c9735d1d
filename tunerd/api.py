"""tunerd from Python: what the commands do, as functions that return values.

    run = tunerd.tune("model.onnx", gpu_pct=40, budget_secs=600)
    print(run.verdict, run.speedup.ratio)
    y = run.artifact.load()(x)

Nothing here prints, configures logging or ends the process. Errors for people are TunerdError:
`tunerd/errors.py` draws their tree. What takes long tells of it through callbacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from tunerd.errors import FolderError, InputError, Interrupted, WrongResultError
from tunerd.records import Store
from tunerd.records.paths import Paths
from tunerd.report.story import Story, story_of
from tunerd.studies.bench.artifact import DURATION_SECS, BenchResult
from tunerd.studies.compare import GateResult
from tunerd.studies.profile.folder import REPORT
from tunerd.studies.profile.measuring import Effort
from tunerd.studies.profile.plan import SHARES, plan_shares, slice_kind_for
from tunerd.studies.profile.profile import LOSS, Profile
from tunerd.telemetry.progress import Progress, ProgressState, QuietProgress
from tunerd.vocabulary.outcome import (
    Comparison,
    Correctness,
    Latency,
    Outcome,
    TaskOutcome,
    Verdict,
)

if TYPE_CHECKING:
    import pandas as pd

    from tunerd.artifacts.loading import LoadedModel
    from tunerd.settings import TuneSettings
    from tunerd.studies.profile.auto import Aftermath, Choice

StrPath = str | os.PathLike[str]
OnStep = Callable[[str], None]
OnProgress = Callable[[ProgressState], None]
Device = Literal["gpu", "cpu"]
SliceKind = Literal["mps", "whole", "cpu", "simulated"]


def _nothing(step: str) -> None:
    """Take what comes next, and show it nowhere."""


@dataclass(frozen=True)
class Artifact:
    """A compiled model: a folder that is loaded without a compiler, and may be copied."""

    path: Path

    def load(self, *, device: int | None = None, beside: Iterable[LoadedModel] = ()) -> LoadedModel:
        """Check and load it, as `tunerd.load` does."""
        from tunerd.artifacts.loading import load

        return load(self.path, device=device, beside=beside)


@dataclass(frozen=True)
class ReviewedShare:
    """A share that was chosen by a profile, and what the tuned artifact's profile says of it."""

    aftermath: Aftermath
    folder: Path  # of the artifact's profile

    @property
    def report(self) -> Path:
        return self.folder / REPORT


@dataclass(frozen=True)
class Run:
    """A run of `tunerd.tune`, as it was when it was opened. Times are seconds of an inference.

    `verdict`, `speedup`, `latencies` and `artifact` are of a run that came to its end: they raise
    FolderError while there is none.
    """

    folder: Path
    story: Story = field(repr=False)  # all that the report shows
    share: ReviewedShare | None = None  # where `tunerd.tune` was to choose it

    @property
    def name(self) -> str:
        """The model's name."""
        return self.story.name

    @property
    def is_finished(self) -> bool:
        """Whether the run has its result, and no later session is under way or was stopped."""
        return not self.story.is_unfinished

    @property
    def outcome(self) -> Outcome:
        """How the run ended: everything below, and the verification against ONNX Runtime."""
        if self.story.outcome is None:
            raise FolderError(
                f"the run in {self.folder} has not come to its end; tune with the same settings "
                "to go on"
            )
        return self.story.outcome

    @property
    def verdict(self) -> Verdict:
        """Whether the tuned model is faster than the one with default schedules.

        CANNOT_TELL also where its results could not be verified, and SAME where no task was tuned:
        both models are the same then, whatever was timed. Raises WrongResultError where the tuned
        model disagrees with ONNX Runtime.
        """
        outcome = self.outcome
        match outcome.verification.verdict:
            case Correctness.WRONG:
                raise WrongResultError(
                    f"the tuned model disagrees with ONNX Runtime: {outcome.verification.message}; "
                    f"it was not kept as an artifact, see {self.report_path}"
                )
            case Correctness.CANNOT_TELL:
                return Verdict.CANNOT_TELL
        is_tuned = any(task.is_tuned for task in outcome.tasks)
        return outcome.end_to_end.verdict if is_tuned else Verdict.SAME

    @property
    def speedup(self) -> Comparison:
        """The tuned model against the default one: ratio and 95% interval, above 1 is faster."""
        return self.outcome.end_to_end

    @property
    def tasks(self) -> tuple[TaskOutcome, ...]:
        """The model's tasks: what was chosen for each, or what was found so far."""
        return self.story.tasks

    @property
    def latencies(self) -> tuple[Latency, ...]:
        """Samples of the whole model: tuned, default, and of ONNX Runtime."""
        return self.outcome.latencies

    @property
    def artifact(self) -> Artifact:
        """The compiled model; WrongResultError where it is wrong, which is not kept."""
        _ = self.verdict
        return Artifact(Path(self.outcome.artifact))

    @property
    def report_path(self) -> Path:
        """Where the run keeps its page."""
        return Paths(self.folder).report

    def trials(self) -> pd.DataFrame:
        """Return a row per trial, also of default schedules, as `tunerd records export` has them.

        Seconds are in `median_secs`, raw samples in `run_secs`. Raises FolderError where the
        folder is gone.
        """
        from tunerd.records.export import trials_table

        with Store.read(self.folder) as store:
            return trials_table(store)

    def report(self, to: StrPath) -> Path:
        """Write the run's page, one self-contained HTML file, and return its path.

        Raises FolderError where the file cannot be written.
        """
        from tunerd.report.frame import write_page
        from tunerd.report.page import report_page

        path = Path(to)
        try:
            write_page(path, report_page(self.story))
        except OSError as error:
            raise FolderError(
                f"{path} cannot be written: {error.strerror or error}; name another file"
            ) from error
        return path


@dataclass(frozen=True)
class ProfileResult:
    """A profile, and the folder that keeps its samples."""

    folder: Path
    profile: Profile

    @property
    def report(self) -> Path:
        return self.folder / REPORT


# --- tuning --------------------------------------------------------------------------------------


class TuneOptions(TypedDict, total=False):
    """What may be said of a tuning; one of `gpu_pct` and `cpu_pct` must be.

    gpu_pct, cpu_pct: the share to tune for, 1 to 100 percent of a GPU or of this machine's cores;
        "auto" chooses it by a profile.
    slo_ms: with "auto", the smallest share at which 95 of 100 inferences of the default model take
        at most so many milliseconds.
    out: the run folder, in which the same call goes on; runs/MODEL-gpu40 if not given.
    trials: stop after so many, earlier ones included.
    budget_secs: search for so long.
    slices: per device; as many as fit if not given.
    shapes, dims, batch: of the inputs, by input name, by dimension name, and the leading dimension.
    slice_kind: mps for GPUs and cpu for cores, if not given.
    mps: "external" uses the MPS daemon that is there.
    address: of a Ray cluster, HOST:PORT, "auto" or "local"; a private local one if not given.
    tuners: search and build processes; by the cores if not given.
    warm_start: folders of other runs to learn from.
    store: a team's, as a URL of SQLAlchemy; `require_hit` builds from its records, with no search.
    neighbours, l2, fidelity: how finalists are measured, and how many more for judging the search.
    """

    gpu_pct: int | Literal["auto"]
    cpu_pct: int | Literal["auto"]
    slo_ms: float
    out: StrPath
    trials: int
    budget_secs: float
    slices: int
    shapes: Mapping[str, Sequence[int]]
    dims: Mapping[str, int]
    batch: int
    seed: int
    slice_kind: SliceKind
    mps: Literal["own", "external"]
    address: str
    tuners: int
    warm_start: Sequence[StrPath]
    store: str
    require_hit: bool
    neighbours: Literal["none", "busy", "as-tuned"]
    l2: Literal["model", "cold", "warm"]
    fidelity: int


def tune(
    model: StrPath,
    *,
    on_progress: OnProgress | None = None,
    on_warning: OnStep | None = None,
    on_step: OnStep | None = None,
    **options: Unpack[TuneOptions],
) -> Run:
    """Tune an ONNX file for a share of a device; leave a verified artifact and a report.

    The same call goes on in the same folder where it stopped, after any kill.

    Args:
        on_progress: is given the state of the run as often as it changes.
        on_warning: is told what a person should know; the log "tunerd" has it, too.
        on_step: is told what comes next while a share is chosen or looked at again.
        options: `TuneOptions` says what there is.

    Raises TunerdError: InputError and ModelError for what cannot be used, FolderError for the
    folder of something else, HostError where this machine lacks the slices, WrongResultError where
    the tuned model disagrees with ONNX Runtime, InfrastructureError where Ray or a slice stays
    down, and Interrupted after SIGINT or SIGTERM, with what was measured kept.
    """
    settings, choice = _settings(model, options), None
    say = on_step or _nothing
    if settings.share_from == "auto":
        settings, choice = choose_share(settings, say)
    run = carry_out(settings, _Callbacks(on_progress, on_warning))
    _ = run.verdict
    return run if choice is None else review_share(run, settings, choice, say)


def carry_out(settings: TuneSettings, progress: Progress) -> Run:
    """Tune as settings say, whose share is known, and write the report; raises as `tune` does.

    A model that is wrong is returned, and its `verdict` raises.
    """
    from tunerd.report.page import write_report
    from tunerd.runs.run import tune as tuned

    outcome = tuned(settings, progress, write_report=write_report)
    run = open_run(settings.out)
    return replace(run, story=replace(run.story, outcome=outcome))


def choose_share(settings: TuneSettings, say: OnStep) -> tuple[TuneSettings, Choice]:
    """Return settings with the share that a profile of the default model chooses for them."""
    from tunerd.report.share_page import write_profile
    from tunerd.studies.profile.auto import resolve_share

    resolved, choice, found = resolve_share(settings, say)
    if found is not None:
        write_profile(found, Paths(settings.out).shares / "default")
    return resolved, choice


def review_share(run: Run, settings: TuneSettings, choice: Choice, say: OnStep) -> Run:
    """Profile what was tuned, and return the run with what that says of the chosen share."""
    from tunerd.report.share_page import write_profile
    from tunerd.studies.profile.auto import look_again

    after, folder = look_again(settings, choice, run.artifact.path, say)
    write_profile(after.profile, folder)
    return replace(run, share=ReviewedShare(after, folder))


class _Callbacks(QuietProgress):
    def __init__(self, on_progress: OnProgress | None, on_warning: OnStep | None) -> None:
        self._on_progress, self._on_warning = on_progress, on_warning

    def update(self, state: ProgressState) -> None:
        if self._on_progress is not None:
            self._on_progress(state)

    def warn(self, sentence: str) -> None:
        if self._on_warning is not None:
            self._on_warning(sentence)


# --- looking at what is there --------------------------------------------------------------------


def open_run(folder: StrPath) -> Run:
    """Read a run from its folder, also one that is alive, was stopped or was killed.

    Raises FolderError where there is none, or it is damaged.
    """
    root = Path(folder)
    with Store.read(root) as store:
        return Run(root, story_of(store))


def bench(
    artifact: Run | Artifact | StrPath,
    *,
    gpu_pct: int | None = None,
    cpu_pct: int | None = None,
    beside: Artifact | StrPath | None = None,
    replicas: int | None = None,
    duration_secs: float = DURATION_SECS,
    on_step: OnStep | None = None,
) -> BenchResult:
    """Measure an artifact's latency and throughput in a slice of this machine.

    Args:
        gpu_pct, cpu_pct: the share, in percent; without one, that of the tuning.
        beside: what the device's other slices run: "copies", "memory-hog" or an artifact.
        replicas: slices that run the artifact; 1, or all of them beside copies.
        duration_secs: of each condition, alone and beside neighbours; 1 at least.
        on_step: is told what comes next.

    Raises LoadError for a folder that is no whole artifact, InputError, HostError where this
    machine has no such slices, and InfrastructureError where one of them fails.
    """
    from tunerd.studies.bench.artifact import bench_request, measure_artifact

    request = bench_request(
        _artifact_folder(artifact),
        gpu_pct=gpu_pct,
        cpu_pct=cpu_pct,
        beside=beside.path if isinstance(beside, Artifact) else _as_text(beside),
        replicas=replicas,
        duration_secs=duration_secs,
    )
    return measure_artifact(request, say=on_step or _nothing)


def profile(
    model: Run | Artifact | StrPath,
    *,
    shares: Sequence[int] = SHARES,
    batches: Sequence[int] = (),
    device: Device | None = None,
    slice_kind: SliceKind | None = None,
    loss: float = LOSS,
    slo_ms: float | None = None,
    rounds: int = Effort.rounds,
    duration_secs: float = Effort.duration_secs,
    seed: int = 0,
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
    out: StrPath | None = None,
    on_step: OnStep | None = None,
) -> ProfileResult:
    """Measure a model's latency and throughput over shares of a device, and find the knee.

    The knee is the smallest share at which an inference takes at most `loss` longer than on the
    whole device. The same call in the same folder measures only what is missing.

    Args:
        model: an ONNX file, which gets its default schedules, or what a run has tuned.
        shares: in percent; the whole device always is one.
        batches: batch sizes of an ONNX file; without any, as exported.
        device: without one, an artifact's own, else a GPU where this machine has one.
        slice_kind: mps for GPUs and cpu for cores, if not given.
        loss: a fraction: 0.1 is 10%.
        slo_ms: say which share answers 95 of 100 inferences in so many milliseconds.
        rounds: how often each share is visited.
        duration_secs: of a visit, at least; 0.05 to 600.
        shapes, dims: of inputs with open dimensions, by input and by dimension.
        out: the profile's folder; profiles/NAME-gpu if not given.

    Raises TunerdError, and Interrupted after SIGINT or SIGTERM, with what was measured kept.
    """
    from tunerd.report.share_page import write_profile
    from tunerd.runs.names import sized_name
    from tunerd.studies.profile import profile as study
    from tunerd.studies.profile.subject import subject_of

    _require(rounds >= 1, f"rounds={rounds} is less than 1")
    _require(all(1 <= pct <= 100 for pct in shares), f"shares={shares} are not all 1 to 100")
    _require(loss > 0, f"loss={loss} is not above 0")
    _require(slo_ms is None or slo_ms > 0, f"slo_ms={slo_ms} is not above 0")
    _require(0.05 <= duration_secs <= 600, f"duration_secs={duration_secs} is not 0.05 to 600")
    path = model.path if isinstance(model, Artifact) else _folder(model)
    sizes = {name: tuple(shape) for name, shape in shapes.items()}
    subject = subject_of(path, batches, shapes=sizes, dims=dims)
    kind = slice_kind or slice_kind_for(subject, gpu=device == "gpu", cpu=device == "cpu")
    if (device == "gpu" and kind == "cpu") or (device == "cpu" and kind in ("mps", "whole")):
        raise InputError(f"--slice {kind} is of the other device; leave one of the two flags out")
    planned = plan_shares(kind, shares)
    if out is not None:
        root = Path(out)
    else:
        name = sized_name(_profiled_name(path), shapes=sizes, dims=dims)
        root = Path("profiles") / f"{name}-{'cpu' if kind == 'cpu' else 'gpu'}"
    slo_secs = None if slo_ms is None else slo_ms / 1e3
    try:
        found = study.profile(
            subject,
            planned,
            root,
            effort=Effort(rounds, duration_secs, seed),
            say=on_step or _nothing,
            loss=loss,
            slo_secs=slo_secs,
        )
    except Interrupted as stopped:
        part = study.so_far(subject, planned, root, loss=loss, slo_secs=slo_secs)
        if part is None:
            raise
        write_profile(part, root)
        there = f"{part.rounds} of {rounds} rounds are in {root / REPORT}"
        raise Interrupted(f"{stopped}; {there}") from None
    write_profile(found, root)
    return ProfileResult(root, found)


def compare(
    base: Run | Artifact | StrPath,
    new: Run | Artifact | StrPath,
    *,
    fail_above: float = 0.05,
    measure: bool = False,
    gpu_pct: int | None = None,
    cpu_pct: int | None = None,
    on_step: OnStep | None = None,
) -> GateResult:
    """Say whether `new` is slower than `base` by more than is allowed.

    Args:
        base, new: runs, artifacts, or a team store's runs: "ADDRESS#model=NAME,share=gpu40".
        fail_above: how much slower `new` may be, a fraction.
        measure: measure both now, in turns; artifacts always are.
        gpu_pct, cpu_pct: the share to measure at, in percent; without one, that of the tuning.

    Raises InputError for what is no run and no artifact, FolderError or StoreError for a run that
    has not ended or is damaged, LoadError for an artifact that is not whole, WrongResultError for
    a run whose model is wrong, and HostError or InfrastructureError where it cannot be measured.
    """
    from tunerd.studies.compare.gate import gate

    return gate(
        _source(base),
        _source(new),
        fail_above=fail_above,
        measure=measure,
        gpu_pct=gpu_pct,
        cpu_pct=cpu_pct,
        say=on_step or _nothing,
    )


# --- what callers give ---------------------------------------------------------------------------


def _require(is_good: bool, problem: str) -> None:
    if not is_good:
        raise InputError(problem)


def _settings(model: StrPath, options: TuneOptions) -> TuneSettings:
    from tunerd.cluster.job import cluster_address, require_kept
    from tunerd.settings import TuneSettings
    from tunerd.settings.option import checked

    if unknown := options.keys() - TuneOptions.__annotations__.keys():
        raise TypeError(f"tunerd has no option {', '.join(sorted(unknown))} for a tuning")
    values: dict[str, Any] = {"model": Path(model), **options}
    values["address"] = cluster_address(options.get("address"))
    if "out" in options:
        values["out"] = Path(options["out"])
    values["shapes"] = {name: tuple(of) for name, of in options.get("shapes", {}).items()}
    values["dims"] = dict(options.get("dims", {}))
    values["warm_start"] = tuple(Path(run) for run in options.get("warm_start", ()))
    settings = checked(TuneSettings, values)
    require_kept(settings.out)
    return settings


def _folder(given: Run | StrPath) -> Path:
    return given.folder if isinstance(given, Run) else Path(given)


def _source(given: Run | Artifact | StrPath) -> str:
    return str(given.path if isinstance(given, Artifact) else _as_text(given))


def _as_text(given: Run | StrPath | None) -> str | None:
    if given is None:
        return None
    return str(given.folder) if isinstance(given, Run) else os.fspath(given)


def _artifact_folder(given: Run | Artifact | StrPath) -> Path:
    if isinstance(given, Run):
        return given.artifact.path
    if isinstance(given, Artifact):
        return given.path
    path = Path(given)
    return Paths(path).artifact if Paths(path).store.is_file() else path


def _profiled_name(path: Path) -> str:
    resolved = path.resolve()
    if resolved.name == "artifact":
        resolved = resolved.parent
    return resolved.stem if path.is_file() else resolved.name
