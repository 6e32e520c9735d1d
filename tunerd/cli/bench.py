"""`tunerd bench`: an artifact's latency at a share."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunerd.errors import HostError, InfrastructureError, InputError

if TYPE_CHECKING:
    from tunerd.vocabulary import CapProof, Measurement


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
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """Measure an artifact's end-to-end latency in one slice, alone."""
    from tunerd.manifest import check_files, nearest, pcts_of, read_variants, shares_text

    variants = read_variants(artifact)
    check_files(artifact, variants)  # before a slice is started, which checks them again
    manifest = variants[0]
    is_cuda = manifest["target"]["kind"] == "cuda"
    given = gpu_pct if is_cuda else cpu_pct
    other = cpu_pct if is_cuda else gpu_pct
    flag = "--gpu-pct" if is_cuda else "--cpu-pct"
    if given is None and len(variants) > 1:
        raise InputError(
            f"{artifact} holds several shares, {shares_text(pcts_of(variants))}; name the one to "
            f"measure at with {flag}"
        )
    if other is not None:
        raise InputError(
            f"{artifact} is compiled for {manifest['target']['kind']}; give its share by {flag}"
        )
    pct = given if given is not None else int(manifest["share"]["pct"])
    proof, measured = measure_artifact(artifact.resolve(), "mps" if is_cuda else "cpu", pct)
    manifest = nearest(variants, proof.sm_count)
    document = _document(artifact, pct, proof, measured)
    document["tuned_for_sm_counts"] = manifest["share"]["sm_counts"]
    if json:
        print(json_module.dumps(document))
        return 0
    from rich.console import Console

    from tunerd.report.words import secs_text

    unit = "SMs" if is_cuda else "cores"
    console = Console(highlight=False)
    console.print(
        f"{manifest['model']['name']} at {pct}% of {proof.device} ({proof.sm_count} of "
        f"{proof.device_sm_count} {unit}, {proof.mechanism}), alone:"
    )
    if len(variants) > 1:
        tuned = " or ".join(str(count) for count in document["tuned_for_sm_counts"])
        console.print(f"  with the kernels tuned for {tuned} {unit}")
    for name in ("p50_secs", "p95_secs", "p99_secs"):
        console.print(f"  {name.removesuffix('_secs')}  {secs_text(document[name])}")
    console.print(
        f"  over {len(measured.run_secs)} samples of {measured.calls_per_sample} calls each"
    )
    return 0


def measure_artifact(artifact: Path, kind: str, pct: int) -> tuple[CapProof, Measurement]:
    """Measure a whole model in one slice of this host, without Ray."""
    from tunerd.slices import member, plan
    from tunerd.vocabulary import MODEL, Measurement

    usable = member(kind).usability()
    if not usable.ok:
        raise HostError(f"no {kind} slices here: {usable.why}")
    planned = plan(kind, pct, 1)
    if planned.problem:
        raise HostError(planned.problem)
    with member(kind)(planned.slices[0]) as one:
        proof = one.start()
        (result,) = one.compare_models([str(artifact)], MODEL)
    if not isinstance(result, Measurement):
        raise InfrastructureError(f"{artifact} could not be measured: {result.message}")
    return proof, result


def _document(artifact: Path, pct: int, proof: CapProof, measured: Measurement) -> dict[str, Any]:
    import numpy as np

    from tunerd.vocabulary import to_json

    p50, p95, p99 = (float(np.percentile(measured.run_secs, p)) for p in (50, 95, 99))
    return {
        "artifact": str(artifact),
        "pct": pct,
        "p50_secs": p50,
        "p95_secs": p95,
        "p99_secs": p99,
        "inferences_per_sec": 1 / p50,
        "proof": to_json(proof),
        "measurement": to_json(measured),
    }
