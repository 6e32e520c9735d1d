"""`tunerd bench`: an artifact's speed at a share, alone and beside neighbours."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import FolderError, InfrastructureError, InputError

if TYPE_CHECKING:
    from tunerd.artifacts.manifest import Manifest
    from tunerd.studies.bench.bench import Bench, Round
    from tunerd.vocabulary import CapProof

COPIES, HOG = "copies", "memory-hog"
_LEAST_SECS = 1.0  # of a bench: ten rounds, each longer than a scheduler's turns


def bench(
    artifact: Annotated[Path, typer.Argument(help="An artifact folder.", show_default=False)],
    gpu_pct: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Share of a GPU. [default: as tuned]"),
    ] = None,
    cpu_pct: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Share of this machine's cores. [default: as tuned]"),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            help="What the device's other slices run: copies, memory-hog, or another artifact's "
            "folder. [default: nothing]"
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Slices that run the artifact. [default: 1, or all with copies]"),
    ] = None,
    duration: Annotated[
        str, typer.Option(help="Measure this long, alone and again beside neighbours.")
    ] = "10s",
    to: Annotated[
        Path | None, typer.Option(help="Write every inference's start and latency to this file.")
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Measure an artifact's latency and throughput in its slice, alone and beside neighbours."""
    from rich.console import Console

    from tunerd.artifacts.manifest import (
        check_files,
        obtained_text,
        pcts_of,
        read_variants,
        shares_text,
    )

    variants = read_variants(artifact)
    check_files(artifact, variants)  # before a slice is started, which checks them again
    manifest = variants[0]
    is_cuda = manifest["target"]["kind"] == "cuda"
    given = gpu_pct if is_cuda else cpu_pct
    flag = "--gpu-pct" if is_cuda else "--cpu-pct"
    if given is None and len(variants) > 1:
        raise InputError(
            f"{artifact} holds several shares, {shares_text(pcts_of(variants))}; name the one to "
            f"measure at with {flag}"
        )
    if (cpu_pct if is_cuda else gpu_pct) is not None:
        raise InputError(
            f"{artifact} is compiled for {manifest['target']['kind']}; give its share by {flag}"
        )
    asked = Asked(
        artifact=artifact.resolve(),
        model=manifest["model"]["name"],
        kind="mps" if is_cuda else "cpu",
        pct=given if given is not None else int(manifest["share"]["pct"]),
        beside=_beside(beside, manifest["target"]["kind"]),
        replicas=replicas,
        duration_secs=_duration(duration),
    )
    with Console(stderr=True, quiet=json).status("starting") as status:
        done = measure_artifact(asked, say=status.update)
    document = _document(asked, done) | {"tuned_for_sm_counts": _tuned_for(variants, done)}
    raw = {"rounds": [_round_json(r, done.rounds[0]) for r in done.rounds]}
    if to is not None:
        try:
            to.write_text(json_module.dumps(document | raw) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FolderError(f"--to {to} cannot be written: {reason}; name another file") from None
    if json:
        print(json_module.dumps(document | ({"raw": str(to)} if to else raw)))
        return 0
    from tunerd.report.bench_table import bench_table

    console = Console(highlight=False)
    console.print(bench_table(asked.title(done.proofs[0]), done.result, done.gbps))
    if len(variants) > 1:
        tuned = obtained_text(document["tuned_for_sm_counts"], is_cuda=is_cuda)
        console.print(f"with the kernels tuned for {tuned}")
    return 0


def _tuned_for(variants: Sequence[Manifest], done: Done) -> list[int]:
    """Return the SMs or cores that the variant was tuned for that ran."""
    from tunerd.artifacts.manifest import nearest

    counts: list[int] = nearest(variants, done.proofs[0].sm_count)["share"]["sm_counts"]
    return counts


@dataclass(frozen=True)
class Asked:
    """What to measure, checked as far as files can tell."""

    artifact: Path
    model: str
    kind: str
    pct: int
    beside: str | None  # COPIES, HOG or the resolved path of an artifact
    replicas: int | None
    duration_secs: float

    def title(self, proof: CapProof) -> str:
        unit = "SMs" if self.kind == "mps" else "cores"
        return (
            f"{self.model} at {self.pct}% of {proof.device} ({proof.sm_count} of "
            f"{proof.device_sm_count} {unit}, {proof.mechanism})"
        )


@dataclass(frozen=True)
class Done:
    """What was measured. `gbps`: of each memory hog, in 10^9 bytes per second."""

    proofs: tuple[CapProof, ...]
    rounds: list[Round]
    result: Bench
    gbps: tuple[float | None, ...] = ()


def measure_artifact(asked: Asked, *, say: Callable[[str], None]) -> Done:
    """Measure an artifact in slices of this host, without Ray."""
    from tunerd.runner.work import Work
    from tunerd.studies.bench.bandwidth_load import memory_hog
    from tunerd.studies.bench.bench import summarize
    from tunerd.studies.bench.replicas import (
        Cast,
        make_ready,
        run_rounds,
        slices_of_a_device,
        started,
    )

    planned, specs = slices_of_a_device(asked.kind, asked.pct)
    count, others = _counts(asked, len(specs), planned.bound)
    work, neighbour, bytes_of_hog = Work(artifact=str(asked.artifact)), None, 0
    if others and asked.beside == HOG:
        say("building the memory hog")
        cores = max(1, len(specs[0].cores))
        neighbour, bytes_of_hog = memory_hog(planned.target, cores=cores, hogs=others)
    elif others:
        neighbour = Work(artifact=str(asked.beside))
    say(f"starting {count + others} slice(s) of {asked.pct}%")
    with started(specs[: count + others]) as (slices, proofs):
        _require_same_share(proofs)
        cast = Cast(slices[:count], slices[count:])
        once = [make_ready(each, work) for each in cast.replicas]
        once += [make_ready(each, neighbour) for each in cast.others if neighbour is not None]
        rounds = run_rounds(
            cast, duration_secs=asked.duration_secs, slowest_secs=max(once), say=say
        )
    result = summarize(rounds)
    gbps: tuple[float | None, ...] = ()
    if bytes_of_hog and result.beside is not None:
        speeds = (o.per_sec for o in result.beside.others)
        gbps = tuple(None if s is None else s * bytes_of_hog / 1e9 for s in speeds)
    return Done(proofs, rounds, result, gbps)


def _counts(asked: Asked, fit: int, bound: str) -> tuple[int, int]:
    """Return how many slices run the artifact, and how many something else."""
    takes_all = asked.beside == COPIES and asked.replicas is None
    count = fit if takes_all else (asked.replicas or 1)
    if count > fit:
        raise InputError(f"--replicas {count} is more than fit: {bound}")
    if asked.beside == COPIES and count < 2:
        raise InputError(
            f"--beside copies takes two slices at least, and there is {count}: {bound}; give "
            "--replicas 2 or more, or a smaller share"
        )
    if asked.beside in (None, COPIES):
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


def _beside(text: str | None, target: str) -> str | None:
    """Check what the neighbours run; an artifact's files before a slice is started."""
    if text is None or text in (COPIES, HOG):
        return text
    from tunerd.artifacts.manifest import LoadError, check_files, read_variants

    folder = Path(text)
    try:
        variants = read_variants(folder)
        check_files(folder, variants)
    except LoadError as error:
        raise InputError(f"--beside takes {COPIES}, {HOG} or an artifact, but {error}") from None
    kind = variants[0]["target"]["kind"]
    if kind != target:
        raise InputError(
            f"--beside {text} is compiled for {kind}, and the artifact for "
            f"{target}; they cannot share a device"
        )
    return str(folder.resolve())


def _duration(text: str) -> float:
    from tunerd.settings import parse_duration

    try:
        secs = parse_duration(text)
    except ValueError as error:
        raise InputError(f"--duration: {error}") from None
    if secs < _LEAST_SECS:
        raise InputError(f"--duration {text} is too short; give {_LEAST_SECS:g}s or more")
    return secs


def _document(asked: Asked, done: Done) -> dict[str, Any]:
    from tunerd.studies.bench.bench import PERCENTILES, samples_needed
    from tunerd.vocabulary import to_json

    alone, beside = done.result.alone, done.result.beside
    first = alone.replicas[0]
    sides = {str(s.condition): s for s in (alone, beside) if s is not None}
    return {
        "artifact": str(asked.artifact),
        "model": asked.model,
        "pct": asked.pct,
        "beside": asked.beside,
        "duration_secs": asked.duration_secs,
        "samples": first.samples,
        "samples_needed": {f"p{p}": samples_needed(p) for p in PERCENTILES},
        "p50_secs": first.p50_secs,
        "p95_secs": first.p95_secs,
        "p99_secs": first.p99_secs,
        "inferences_per_sec": first.per_sec,
        "slowdown": to_json(done.result.slowdown),
        "conditions": {
            name: to_json(side) | {"per_sec": side.per_sec, "spread": side.spread}
            for name, side in sides.items()
        },
        "hog_gbps": list(done.gbps),
        "proofs": to_json(done.proofs),
    }


def _round_json(each: Round, first: Round) -> dict[str, Any]:
    """Return all repeats of a round, trimmed ones too; times from the first round's window."""
    zero = first.window[0]

    def times(rans: Any) -> list[dict[str, Any]]:
        return [
            {
                "slice_id": ran.slice_id,
                "calls": ran.calls,
                "start_secs": [round(s - zero, 7) for s in ran.starts],
                "latency_secs": [round(s, 9) for s in ran.secs],
            }
            for ran in rans
        ]

    return {
        "condition": str(each.condition),
        "window_secs": [round(t - zero, 7) for t in each.window],
        "replicas": times(each.replicas),
        "others": times(each.others),
    }
