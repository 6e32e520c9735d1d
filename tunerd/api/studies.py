"""Measure what was tuned: beside others, over shares, against another."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from tunerd.api.run import Artifact, OnStep, Run, StrPath, keeping_nothing, nothing
from tunerd.api.tuning import SliceKind
from tunerd.artifacts.one_size import size_of
from tunerd.errors import InputError, Interrupted
from tunerd.frontend.given import path_or_graph, save_in
from tunerd.records.paths import Paths
from tunerd.studies.bench.artifact import DURATION_SECS, BenchResult
from tunerd.studies.compare import GateResult
from tunerd.studies.profile.folder import REPORT, ProfileFolder
from tunerd.studies.profile.measuring import Effort
from tunerd.studies.profile.plan import SHARES, plan_shares, slice_kind_for
from tunerd.studies.profile.profile import LOSS, Profile

if TYPE_CHECKING:
    from tunerd.frontend.given import Given

Device = Literal["gpu", "cpu"]
_KEPT_KINDS = ("mps", "whole", "cpu")  # of slices on which a time is worth keeping


@dataclass(frozen=True)
class ProfileResult:
    """A profile, and the folder that keeps its samples."""

    folder: Path
    profile: Profile

    @property
    def report(self) -> Path:
        return self.folder / REPORT


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

    Where exactly two slices run, the artifact's and another's or a copy's, what each loses beside
    the other is kept in the run folders of both, for plans of mixes. The other one is alone in
    turns for that, too.

    Raises LoadError for a folder that is no whole artifact, InputError, HostError where this
    machine has no such slices, InfrastructureError where one of them fails, and Interrupted after
    SIGINT or SIGTERM, with nothing kept.
    """
    from tunerd.studies.bench.artifact import bench_request, measure_artifact

    with size_of(_artifact_folder(artifact)) as folder:
        request = bench_request(
            folder,
            gpu_pct=gpu_pct,
            cpu_pct=cpu_pct,
            beside=None if beside is None else _source(beside),
            replicas=replicas,
            duration_secs=duration_secs,
        )
        say = on_step or nothing
        with keeping_nothing(say):
            found = measure_artifact(request, say=say)
        _keep_bench(folder, found)
        return found


def profile(
    model: Run | Artifact | Given,
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
        model: as `tune` takes it, which gets its default schedules; or what a run has tuned.
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
    from tunerd.settings.texts import sized_name
    from tunerd.studies.profile import profile as study
    from tunerd.studies.profile.subject import subject_of

    _require(rounds >= 1, f"rounds={rounds} is less than 1")
    _require(all(1 <= pct <= 100 for pct in shares), f"shares={shares} are not all 1 to 100")
    _require(loss > 0, f"loss={loss} is not above 0")
    _require(slo_ms is None or slo_ms > 0, f"slo_ms={slo_ms} is not above 0")
    _require(0.05 <= duration_secs <= 600, f"duration_secs={duration_secs} is not 0.05 to 600")
    sizes = {name: tuple(shape) for name, shape in shapes.items()}
    with as_path(model) as path:
        subject = subject_of(path, batches, shapes=sizes, dims=dims)
        name = sized_name(_profiled_name(path), shapes=sizes, dims=dims)
    kind = slice_kind or slice_kind_for(subject, gpu=device == "gpu", cpu=device == "cpu")
    if (device == "gpu" and kind == "cpu") or (device == "cpu" and kind in ("mps", "whole")):
        raise InputError(f"--slice {kind} is of the other device; leave one of the two flags out")
    planned = plan_shares(kind, shares)
    usual = Path("profiles") / f"{name}-{'cpu' if kind == 'cpu' else 'gpu'}"
    root = usual if out is None else Path(out)
    slo_secs = None if slo_ms is None else slo_ms / 1e3
    try:
        found = study.profile(
            subject,
            planned,
            root,
            effort=Effort(rounds, duration_secs, seed),
            say=on_step or nothing,
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
    if subject.artifact is not None and kind in _KEPT_KINDS:
        from tunerd.api.mix_sources import points_of
        from tunerd.colocation.planning.kept import keep

        proof = next(iter(ProfileFolder(root).proofs.values()))
        keep(subject.artifact[1], proof.device, points_of(found, subject.name, str(root)))
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
        base, new: runs, artifacts, one size of an artifact of several, "FOLDER#batch=4", or a team
            store's runs, "ADDRESS#model=NAME,share=gpu40,precision=fp16".
        fail_above: how much slower `new` may be, a fraction.
        measure: measure both now, in turns; artifacts always are.
        gpu_pct, cpu_pct: the share to measure at, in percent; without one, that of the tuning.

    Raises InputError for what is no run and no artifact, FolderError or StoreError for a run that
    has not ended or is damaged, LoadError for an artifact that is not whole, WrongResultError for
    a run whose model is wrong, and HostError or InfrastructureError where it cannot be measured.
    """
    from tunerd.studies.compare.gate import gate
    from tunerd.studies.compare.sides import is_query

    with contextlib.ExitStack() as stack:
        sources = [
            said if is_query(said) else str(stack.enter_context(size_of(Path(said))))
            for said in (_source(base), _source(new))
        ]
        return gate(
            *sources,
            fail_above=fail_above,
            measure=measure,
            gpu_pct=gpu_pct,
            cpu_pct=cpu_pct,
            say=on_step or nothing,
        )


def _require(is_good: bool, problem: str) -> None:
    if not is_good:
        raise InputError(problem)


@contextlib.contextmanager
def as_path(given: Run | Artifact | Given) -> Iterator[Path]:
    """Yield where something is; a model that is no file is in one meanwhile."""
    if isinstance(given, Run | Artifact):
        yield Path(_source(given))
        return
    found = path_or_graph(given)
    if isinstance(found, Path):
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="tunerd-") as folder:
        yield save_in(Path(folder), found)


def _source(given: Run | Artifact | StrPath) -> str:
    if isinstance(given, Run):
        return str(given.folder)
    return str(given.path) if isinstance(given, Artifact) else os.fspath(given)


def _keep_bench(artifact: Path, found: BenchResult) -> None:
    """Keep what was measured for plans of mixes that the artifact will be in."""
    from tunerd.api.mix_pairs import keep_pairs_of_bench
    from tunerd.api.mix_sources import point_of_bench
    from tunerd.colocation.planning.kept import keep

    point = point_of_bench(found) if found.request.kind in _KEPT_KINDS else None
    if point is not None:
        keep(artifact, found.proofs[0].device, [point])
    keep_pairs_of_bench(found)


def _artifact_folder(given: Run | Artifact | StrPath) -> Path:
    if isinstance(given, Run):
        return given.artifact.path
    if isinstance(given, Artifact):
        return given.path
    path = Path(given)
    try:
        return Paths(path).artifact if Paths(path).store.is_file() else path
    except OSError:
        return path  # loading it says why


def _profiled_name(path: Path) -> str:
    resolved = path.resolve()
    if resolved.name == "artifact":
        resolved = resolved.parent
    return resolved.stem if path.is_file() else resolved.name
