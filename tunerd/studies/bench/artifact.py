"""An artifact's speed at a share of this host: what to measure, checked, and what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunerd.artifacts.manifest import (
    LoadError,
    check_files,
    nearest,
    pcts_of,
    read_variants,
    shares_text,
)
from tunerd.errors import InfrastructureError, InputError
from tunerd.runner.load import Load
from tunerd.studies.bench.bandwidth_load import memory_hog
from tunerd.studies.bench.bench import Bench, Round, summarize
from tunerd.studies.bench.replicas import Cast, run_rounds
from tunerd.studies.timing import load_in, slices_of_a_device, started
from tunerd.vocabulary import CapProof, unit_name

COPIES, HOG = "copies", "memory-hog"
DURATION_SECS = 10.0
_LEAST_SECS = 1.0  # of a bench: ten rounds, each longer than a scheduler's turns


@dataclass(frozen=True)
class BenchRequest:
    """What to measure, checked as far as files can tell."""

    artifact: Path
    model: str
    kind: str  # of the slices
    pct: int
    beside: str | None  # COPIES, HOG or the resolved path of an artifact
    replicas: int | None
    duration_secs: float
    is_packed: bool = False  # it holds several shares

    def title(self, proof: CapProof) -> str:
        return (
            f"{self.model} at {self.pct}% of {proof.device} ({proof.sm_count} of "
            f"{proof.device_sm_count} {unit_name(self.kind)}, {proof.mechanism})"
        )


@dataclass(frozen=True)
class BenchResult:
    """What was measured, with every inference. `hog_gbps`: of each memory hog, 10^9 bytes/s."""

    request: BenchRequest
    proofs: tuple[CapProof, ...]
    rounds: tuple[Round, ...]
    bench: Bench
    hog_gbps: tuple[float | None, ...]
    tuned_for_sm_counts: tuple[int, ...]  # of the variant that ran; cores on CPUs


def bench_request(
    artifact: Path,
    *,
    gpu_pct: int | None = None,
    cpu_pct: int | None = None,
    beside: str | Path | None = None,
    replicas: int | None = None,
    duration_secs: float = DURATION_SECS,
) -> BenchRequest:
    """Check what is to be measured, before a slice is started.

    Raises LoadError for an artifact that is not whole, and InputError for what cannot be asked of
    it.
    """
    variants = read_variants(artifact)
    check_files(artifact, variants)  # a slice checks them again
    manifest = variants[0]
    target = manifest["target"]["kind"]
    is_cuda = target == "cuda"
    given, other = (gpu_pct, cpu_pct) if is_cuda else (cpu_pct, gpu_pct)
    flag = "--gpu-pct" if is_cuda else "--cpu-pct"
    if given is None and len(variants) > 1:
        raise InputError(
            f"{artifact} holds several shares, {shares_text(pcts_of(variants))}; name the one to "
            f"measure at with {flag}"
        )
    if other is not None:
        raise InputError(f"{artifact} is compiled for {target}; give its share by {flag}")
    if duration_secs < _LEAST_SECS:
        raise InputError(
            f"--duration {duration_secs:g}s is too short; give {_LEAST_SECS:g}s or more"
        )
    return BenchRequest(
        artifact=artifact.resolve(),
        model=manifest["model"]["name"],
        kind="mps" if is_cuda else "cpu",
        pct=given if given is not None else int(manifest["share"]["pct"]),
        beside=_beside(beside, target),
        replicas=replicas,
        duration_secs=duration_secs,
        is_packed=len(variants) > 1,
    )


def measure_artifact(request: BenchRequest, *, say: Callable[[str], None]) -> BenchResult:
    """Measure an artifact in slices of this host, without Ray.

    Raises HostError where this host has no such slices, InputError where they do not suffice, and
    InfrastructureError where one of them fails.
    """
    plan, specs = slices_of_a_device(request.kind, request.pct)
    count, others = _counts(request, len(specs), plan.bound)
    load, neighbour, bytes_of_hog = Load(artifact=str(request.artifact)), None, 0
    if others and request.beside == HOG:
        say("building the memory hog")
        cores = max(1, len(specs[0].cores))
        neighbour, bytes_of_hog = memory_hog(plan.target, cores=cores, hogs=others)
    elif others:
        neighbour = Load(artifact=str(request.beside))
    say(f"starting {count + others} slice(s) of {request.pct}%")
    with started(specs[: count + others]) as slices:
        proofs = tuple(each.proof for each in slices)
        _require_same_share(proofs)
        cast = Cast(slices[:count], slices[count:])
        once = [load_in(each, load) for each in cast.replicas]
        once += [load_in(each, neighbour) for each in cast.others if neighbour is not None]
        rounds = run_rounds(
            cast,
            duration_secs=request.duration_secs,
            slowest_secs=max(once),
            say=say,
            neighbour_too=(count, others) == (1, 1) and request.beside != HOG,
        )
    result = summarize(rounds)
    gbps: tuple[float | None, ...] = ()
    if bytes_of_hog and result.beside is not None:
        speeds = (o.per_sec for o in result.beside.others)
        gbps = tuple(None if s is None else s * bytes_of_hog / 1e9 for s in speeds)
    ran = nearest(read_variants(request.artifact), proofs[0].sm_count)
    return BenchResult(
        request=request,
        proofs=proofs,
        rounds=tuple(rounds),
        bench=result,
        hog_gbps=gbps,
        tuned_for_sm_counts=tuple(ran["share"]["sm_counts"]),
    )


def _counts(request: BenchRequest, fit: int, bound: str) -> tuple[int, int]:
    """Return how many slices run the artifact, and how many something else."""
    takes_all = request.beside == COPIES and request.replicas is None
    count = fit if takes_all else (request.replicas or 1)
    if count > fit:
        raise InputError(f"--replicas {count} is more than fit: {bound}")
    if request.beside == COPIES and count < 2:
        raise InputError(
            f"--beside copies takes two slices at least, and there is {count}: {bound}; give "
            "--replicas 2 or more, or a smaller share"
        )
    if request.beside in (None, COPIES):
        return count, 0
    if count == fit:
        raise InputError(
            f"{count} slice(s) run the artifact and none is left for --beside: {bound}; give "
            "fewer --replicas or a smaller share"
        )
    return count, fit - count


def _require_same_share(proofs: tuple[CapProof, ...]) -> None:
    if len({p.sm_count for p in proofs}) > 1:
        found = ", ".join(f"{p.slice_id}: {p.sm_count}" for p in proofs)
        raise InfrastructureError(f"the slices obtained different shares: {found}; try again")


def _beside(given: str | Path | None, target: str) -> str | None:
    """Check what the neighbours run; an artifact's files before a slice is started."""
    if given is None or given in (COPIES, HOG):
        return given if given is None else str(given)
    folder = Path(given)
    try:
        variants = read_variants(folder)
        check_files(folder, variants)
    except LoadError as error:
        raise InputError(f"--beside takes {COPIES}, {HOG} or an artifact, but {error}") from None
    kind = variants[0]["target"]["kind"]
    if kind != target:
        raise InputError(
            f"--beside {given} is compiled for {kind}, and the artifact for "
            f"{target}; they cannot share a device"
        )
    return str(folder.resolve())
