"""Plan a tuning, and carry it out."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from tunerd.api.run import OnStep, ReviewedShare, Run, StrPath, nothing, open_run
from tunerd.errors import InputError
from tunerd.frontend.given import path_or_graph, save_in
from tunerd.records.paths import Paths
from tunerd.runs.folder import prepare
from tunerd.telemetry.progress import Progress, ProgressState, QuietProgress

if TYPE_CHECKING:
    from tunerd.frontend.given import Given
    from tunerd.runs.plan import RunPlan
    from tunerd.runs.shared import SharedCluster
    from tunerd.settings import TuneSettings
    from tunerd.studies.profile.auto import Choice
    from tunerd.vocabulary import Graph


_PLAN_COLUMNS = 100
OnProgress = Callable[[ProgressState], None]
SliceKind = Literal["mps", "whole", "cpu", "simulated"]


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
        Several sizes of a dimension are for `tunerd.tune_sizes`.
    tenants: how many models of this architecture one launch of the artifact serves, each with
        weights of its own. Several numbers are for `tunerd.tune_sizes`.
    io_precision: "fp32" or "fp16", that inputs and outputs of floating point have; the file's types
        if not given.
    precision: "fp32", "tf32", "fp16" or "bf16", that kernels compute in; as exported if not given.
        "auto": on a GPU the first of fp16, bf16, tf32 and fp32 whose outputs stay within 1% of an
        output's largest value, on CPUs fp32.
    libraries: names of libraries whose kernels are tried, too: "cublaslt", "cudnn".
    inputs: an .npz file of the model's inputs, or a folder of them, to verify and time on; random
        values if not given.
    values: numbers by input name, that all elements of the input have.
    constants: likewise, of inputs that always have them: kernels are made for them, and the
        artifact has no such input.
    against: "FILE.py:FUNCTION", which returns the torch.nn.Module that the file was exported from;
        PyTorch is timed beside the tuned model, where each way to run it is ready in
        `against_limit_secs`.
    slice_kind: mps for GPUs and cpu for cores, if not given.
    mps: "external" uses the MPS daemon that is there.
    address: of a Ray cluster, HOST:PORT, "auto" or "local"; a private local one if not given.
    tuners: search and build processes; by the cores if not given.
    warm_start: folders of other runs to learn from.
    store: a team's, as a URL of SQLAlchemy; `require_hit` builds from its records, with no search.
    no_wait: measure finalists at once, also on a device that is not quiet.
    if_shared: what is done where others hold memory of a GPU.
    serving: the file of a plan that serves on this device, and pairs.jsonl beside it: there are as
        many slices as slow none of its members by more than `serving_loss` (0.1), as far as that is
        measured or estimated.
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
    dims: Mapping[str, int | Sequence[int]]
    batch: int | Sequence[int]
    tenants: int | Sequence[int]
    precision: Literal["fp32", "tf32", "fp16", "bf16", "auto"]
    io_precision: Literal["fp32", "fp16"]
    libraries: Sequence[Literal["cublaslt", "cudnn"]]
    inputs: StrPath
    values: Mapping[str, float]
    constants: Mapping[str, float]
    against: str
    against_limit_secs: float
    seed: int
    slice_kind: SliceKind
    mps: Literal["own", "external"]
    address: str
    tuners: int
    warm_start: Sequence[StrPath]
    store: str
    require_hit: bool
    no_wait: bool
    if_shared: Literal["narrow", "refuse", "ignore"]
    serving: StrPath
    serving_loss: float
    neighbours: Literal["none", "busy", "as-tuned"]
    l2: Literal["model", "cold", "warm"]
    fidelity: int


@dataclass(frozen=True)
class Plan:
    """What a run will do; `print` shows it. The same call of `tunerd.tune` does it."""

    settings: TuneSettings
    planned: RunPlan = field(repr=False)
    graph: Graph | None = field(default=None, repr=False)  # where it was no file

    @property
    def details(self) -> Mapping[str, Any]:
        """What `tunerd tune --dry-run --json` prints."""
        return self.planned.describe()

    @property
    def tasks(self) -> Sequence[Mapping[str, Any]]:
        """The model's tasks: task_id, name, weight (calls of an inference) and flops of a call."""
        found: Sequence[Mapping[str, Any]] = self.details["tasks"]
        return found

    @property
    def estimate_secs(self) -> float | None:
        """How long it will take, about; None where neither trials nor time are limited."""
        return self.planned.estimate_secs

    def __str__(self) -> str:
        from rich.console import Console

        from tunerd.report.table import plan_table

        console = Console(file=io.StringIO(), width=_PLAN_COLUMNS, color_system=None)
        with console.capture() as capture:
            console.print(plan_table(self.details))
        return capture.get().rstrip()

    def execute(
        self, *, on_progress: OnProgress | None = None, on_warning: OnStep | None = None
    ) -> Run:
        """Do it, and return the run; raises as `tunerd.tune` does."""
        settings, planned = self.settings, self.planned
        if self.graph is not None:  # from here on it is a file
            settings = _with_saved(self.graph, settings)
            planned = planned.with_model_at(settings.model)
        run = carry_out(settings, Callbacks(on_progress, on_warning), planned)
        _ = run.verdict
        return run


def plan(
    model: Given,
    *,
    on_warning: OnStep | None = None,
    **options: Unpack[TuneOptions],
) -> Plan:
    """Return what `tunerd.tune` with the same arguments will do: slices, environments, tasks, time.

    Nothing is started or written, but for the cluster of `address`, which is joined and left.
    Raises as `tune` does, and InputError for a share of "auto", which has to be measured.
    """
    given = path_or_graph(model)
    settings = _settings(given, options)
    _require_one_size(settings)
    if isinstance(given, Path):
        return plan_of(settings, on_warning or nothing)
    with tempfile.TemporaryDirectory(prefix="tunerd-") as folder:
        path = save_in(Path(folder), given)
        found = plan_of(settings.model_copy(update={"model": path}), on_warning or nothing)
    return replace(found, settings=settings, graph=given)


def plan_of(settings: TuneSettings, warn: OnStep) -> Plan:
    """Plan what settings say; raises as `plan` does."""
    from tunerd.runs.run import plan as plan_tasks

    if settings.share_from == "auto":
        raise InputError(
            "--dry-run measures nothing, and an automatic share is measured; give a number, or run "
            "`tunerd profile` first"
        )
    if settings.precision_from == "auto":
        raise InputError(
            "--dry-run runs nothing, and an automatic precision is chosen by running the model; "
            "name one"
        )
    settings = _beside_serving(settings, warn)
    planned = plan_tasks(settings)
    if planned.warning:
        warn(planned.warning)
    return Plan(settings, planned)


def _with_saved(graph: Graph, settings: TuneSettings) -> TuneSettings:
    """Return settings whose model is a file in the run's folder."""
    if not settings.sizes:
        prepare(settings.out)
    path = save_in(Paths(settings.out).model, graph)
    return settings.model_copy(update={"model": path})


def tune(
    model: Given,
    *,
    on_progress: OnProgress | None = None,
    on_warning: OnStep | None = None,
    on_step: OnStep | None = None,
    **options: Unpack[TuneOptions],
) -> Run:
    """Tune a model for a share of a device; leave a verified artifact and a report.

    The same call goes on in the same folder where it stopped, after any kill.

    Args:
        model: an ONNX file, or a model that the program holds, which is kept in the run's folder:
            an onnx.ModelProto, or a tvm.IRModule of Relax. Of the latter `main` is tuned, whose
            inputs have fixed sizes, and whose weights are constants, as
            relax.transform.BindParams makes them; outputs are named output, or output_0 and so on.
        on_progress: is given the state of the run as often as it changes.
        on_warning: is told what a person should know; the log "tunerd" has it, too.
        on_step: is told what comes next while a share is chosen or looked at again.
        options: `TuneOptions` says what there is.

    Raises TunerdError: InputError and ModelError for what cannot be used, FolderError for the
    folder of something else, HostError where this machine lacks the slices, WrongResultError where
    the tuned model disagrees with ONNX Runtime, or of Relax with what TVM makes of the module for
    this machine's CPU without schedules, InfrastructureError where Ray or a slice stays down, and
    Interrupted after SIGINT or SIGTERM, with what was measured kept.
    """
    settings, choice = settings_for(model, options), None
    _require_one_size(settings)
    say = on_step or nothing
    if settings.share_from == "auto":
        settings, choice = choose_share(settings, say)
    if settings.precision_from == "auto":
        settings = choose_precision(settings, say)
    run = carry_out(settings, Callbacks(on_progress, on_warning))
    _ = run.verdict
    return run if choice is None else review_share(run, settings, choice, say)


def settings_for(model: Given, options: TuneOptions) -> TuneSettings:
    """Return the settings of a tuning, whose model is a file from here on; raises as `tune`."""
    given = path_or_graph(model)
    settings = _settings(given, options)
    return settings if isinstance(given, Path) else _with_saved(given, settings)


def _require_one_size(settings: TuneSettings) -> None:
    if settings.sizes:
        raise InputError(
            "dims, batch or tenants lists several: give one, or call tunerd.tune_sizes"
        )


def carry_out(
    settings: TuneSettings,
    progress: Progress,
    planned: RunPlan | None = None,
    *,
    private: SharedCluster | None = None,
) -> Run:
    """Tune as settings say, whose share is known, and write the report; raises as `tune` does.

    A model that is wrong is returned, and its `verdict` raises.

    Args:
        planned: for the settings, earlier.
        private: a cluster that further calls may use, too; not for what was planned.
    """
    from tunerd.report.page import write_report
    from tunerd.runs import run as runs

    if private is None or not private.is_up:
        require_no_ray()
    if planned is None:
        settings = _beside_serving(settings, progress.warn)
        outcome = runs.tune(settings, progress, private=private, write_report=write_report)
    else:
        outcome = runs.execute(planned, progress, write_report=write_report)
    if settings.precision_from == "auto":
        from tunerd.studies.precision import fall_back

        if (other := fall_back(settings, outcome, progress.warn)) is not None:
            return carry_out(other, progress, private=private)
    run = open_run(settings.out)
    return replace(run, view=replace(run.view, outcome=outcome))


def _beside_serving(settings: TuneSettings, warn: OnStep) -> TuneSettings:
    if settings.serving is None:
        return settings
    from tunerd.api.serving import beside_serving

    return beside_serving(settings, warn)


def require_no_ray() -> None:
    """Raise InputError where the program uses Ray itself: the end of a run shuts Ray down."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise InputError(
            "this process uses Ray already, and a run starts Ray and ends it; call ray.shutdown() "
            "before, or tune in a process of its own"
        )


def choose_share(settings: TuneSettings, say: OnStep) -> tuple[TuneSettings, Choice]:
    """Return settings with the share that a profile of the default model chooses for them."""
    from tunerd.report.share_page import write_profile
    from tunerd.studies.profile.auto import resolve_share

    resolved, choice, found = resolve_share(settings, say)
    if found is not None:
        write_profile(found, Paths(settings.out).shares / "default")
    return resolved, choice


def choose_precision(settings: TuneSettings, say: OnStep) -> TuneSettings:
    """Return settings with the fastest precision that stays near enough to the reference."""
    from tunerd.studies.precision import resolve_precision

    return resolve_precision(settings, say)


def review_share(run: Run, settings: TuneSettings, choice: Choice, say: OnStep) -> Run:
    """Profile what was tuned, and return the run with what that says of the chosen share."""
    from tunerd.report.share_page import write_profile
    from tunerd.studies.profile.auto import look_again

    after, folder = look_again(settings, choice, run.artifact.path, say)
    write_profile(after.profile, folder)
    return replace(run, share=ReviewedShare(after, folder))


class Callbacks(QuietProgress):
    """Tells a program of a run's progress."""

    def __init__(self, on_progress: OnProgress | None, on_warning: OnStep | None) -> None:
        self._on_progress, self._on_warning = on_progress, on_warning

    def update(self, state: ProgressState) -> None:
        if self._on_progress is not None:
            self._on_progress(state)

    def warn(self, sentence: str) -> None:
        if self._on_warning is not None:
            self._on_warning(sentence)


def require_known(options: Mapping[str, Any], kind: type, what: str) -> None:
    """Raise TypeError for the first option that a kind of options has not."""
    from tunerd.settings.problems import did_you_mean

    allowed = kind.__annotations__.keys()
    for name in options:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise TypeError(f"tunerd has no option {name} for {what}; {hint}")


def _settings(given: Path | Graph, options: TuneOptions) -> TuneSettings:
    from tunerd.cluster.job import cluster_address, require_kept
    from tunerd.settings import TuneSettings
    from tunerd.settings.option import checked

    require_known(options, TuneOptions, "a tuning")
    path = given if isinstance(given, Path) else Path(given.file_name)
    values: dict[str, Any] = {"model": path, **options}
    values["address"] = cluster_address(options.get("address"))
    if "out" in options:
        values["out"] = Path(options["out"])
    values["shapes"] = {name: tuple(of) for name, of in options.get("shapes", {}).items()}
    values["dims"] = dict(options.get("dims", {}))
    values["values"] = dict(options.get("values", {}))
    values["constants"] = dict(options.get("constants", {}))
    if "inputs" in options:
        values["inputs"] = Path(options["inputs"])
    if "serving" in options:
        values["serving"] = Path(options["serving"])
    values["warm_start"] = tuple(Path(run) for run in options.get("warm_start", ()))
    values["libraries"] = tuple(options.get("libraries", ()))
    settings = checked(TuneSettings, values)
    require_kept(settings.out)
    return settings
