#!/usr/bin/env python3
"""Count the trials per second of a search on 1, 2 and more GPUs of this host, equal cores for each.

    scripts/lab/scaling/gpus.py MODEL.onnx --gpu-pct 40 --gpus 1,2,4 --out FOLDER

Every search has the same budget and a fresh process, which sees the first GPUs and as many of the
host's cores as fall to them. The first candidates of a process pay for its caches, so that a search
counts from its tenth second until its budget is spent. Writes FOLDER/scaling.json and prints a
table.

Where most cores are idle, as with the first of several GPUs, those that work are faster: they share
clocks, memory and maybe a physical core with the others. So several GPUs also get as many searches
of one GPU each, all at once ("apart"): what they do together is what one search could do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, search, spread, table, write
from tunerd.records import Store
from tunerd.settings import TuneSettings, parse_duration
from tunerd.system import host
from tunerd.telemetry.time_use import time_use
from tunerd.vocabulary import Phase

SETTLED_SECS = 10.0


def search_inside(options: argparse.Namespace) -> None:
    """Be one search, in a process of its own."""
    settings = TuneSettings(
        model=options.model,
        out=options.out,
        gpu_pct=options.gpu_pct,
        cpu_pct=options.cpu_pct,
        slice_kind="mps" if options.gpu_pct else "cpu",
        budget_secs=options.budget,
    )
    search(settings)


def together(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Be one search of so many GPUs."""
    cores = sorted(host.facts().cores)[: gpus * options.cores_per_gpu]
    folder = options.out / f"gpus-{gpus}"
    process = started(options, folder, range(gpus), cores)
    return {"gpus": gpus, "cores": len(cores), **ended(options, process, folder)}


def apart(options: argparse.Namespace, gpus: int) -> list[dict[str, Any]]:
    """Be so many searches of one GPU each, at once."""
    cores, each = sorted(host.facts().cores), options.cores_per_gpu
    folders = [options.out / f"apart-{gpus}-{gpu}" for gpu in range(gpus)]
    processes = [
        started(options, folder, [gpu], cores[gpu * each : (gpu + 1) * each])
        for gpu, folder in enumerate(folders)
    ]
    return [ended(options, p, f) for p, f in zip(processes, folders, strict=True)]


def started(
    options: argparse.Namespace, folder: Path, gpus: Iterable[int], cores: Sequence[int]
) -> subprocess.Popen[bytes]:
    shutil.rmtree(folder, ignore_errors=True)
    known = host.facts().gpus
    visible = ",".join(str(known[gpu].index) for gpu in gpus) if options.gpu_pct else ""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
    command += ["--out", str(folder)]
    return subprocess.Popen(
        ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
        env=os.environ | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}),
    )


def ended(
    options: argparse.Namespace, process: subprocess.Popen[bytes], folder: Path
) -> dict[str, Any]:
    if status := process.wait():
        sys.exit(f"a search ended with {status}; {folder} has its logs")
    return figures(folder, options.budget)


def figures(folder: Path, budget_secs: float) -> dict[str, Any]:
    with Store.read(folder) as store:
        phases = {p.phase: p for p in store.phases()}
        ends = [
            r.ended_at
            for r in store.records()
            if not r.candidate.is_default and r.ended_at is not None
        ]
        use = time_use(store.spans(), store.phases())
        proofs = store.proofs()
    assert use is not None
    start, search = phases[Phase.START].start, phases[Phase.SEARCH]
    settled = sum(SETTLED_SECS <= at - search.start <= budget_secs for at in ends)
    return {
        "slices": len(proofs),
        "sms": sorted({p.sm_count for p in proofs}),
        "tuners": len(use.roles["tuner"]),
        "trials": len(ends),
        "start_up_secs": search.start - start,
        "search_secs": search.end - search.start,
        "trials_per_sec": settled / (budget_secs - SETTLED_SECS),
        "trials_per_sec_with_start_up": len(ends) / (max(ends) - start),
        "tuners_busy": use.busy("tuner"),
        "slices_busy": use.busy("slice"),
        "cores_busy": sum(use.cores.values()) / len(use.cores),
    }


def shown(runs: list[dict[str, Any]]) -> str:
    """Return medians and ranges over the rounds; ratios are of one round each."""
    of: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        of.setdefault(run["gpus"], []).append(run)
    first = [run["trials_per_sec"] for run in next(iter(of.values()))]
    heads = ["GPUs", "cores", "slices", "tuners", "trials/s", "of one GPU's"]
    heads += ["of as many searches apart", "start-up", "cores busy", "slices busy"]
    lines = []
    for gpus, rounds in of.items():
        rates = [r["trials_per_sec"] for r in rounds]
        alone = [sum(a["trials_per_sec"] for a in r["apart"]) for r in rounds]
        ratios = [rate / one for rate, one in zip(rates, first, strict=False)]
        beside = [rate / each for rate, each in zip(rates, alone, strict=True) if each]
        cells = [
            str(gpus),
            *(str(rounds[0][key]) for key in ("cores", "slices", "tuners")),
            spread(rates, "{:.1f}"),
            f"{spread(ratios, '{:.2f}')} times",
            f"{spread(beside, '{:.0%}')} of {spread(alone, '{:.1f}')}" if beside else "",
            spread([r["start_up_secs"] for r in rounds], "{:.0f}") + " s",
            spread([r["cores_busy"] for r in rounds], "{:.0%}"),
            spread([r["slices_busy"] for r in rounds], "{:.0%}"),
        ]
        lines.append(cells)
    return table(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    shares = parser.add_mutually_exclusive_group(required=True)
    shares.add_argument("--cpu-pct", type=int)
    shares.add_argument("--gpu-pct", type=int)
    parser.add_argument("--gpus", default="1,2,4", help="how many, one search for each")
    parser.add_argument("--cores-per-gpu", type=int, default=16)
    parser.add_argument("--budget", type=parse_duration, default=45.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--skip-apart", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        search_inside(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.budget <= SETTLED_SECS:
        parser.error(f"a search counts from its second {SETTLED_SECS:.0f}; give a longer --budget")
    runs: list[dict[str, Any]] = []
    counts = [int(gpus) for gpus in options.gpus.split(",")]
    for gpus in counts * options.rounds:
        run = together(options, gpus)
        has_beside = gpus > 1 and not options.skip_apart
        runs.append({**run, "apart": apart(options, gpus) if has_beside else []})
        document = {
            **made_by(),
            "runs": runs,
        }
        write(options.out / "scaling.json", document)
    print(shown(runs))


if __name__ == "__main__":
    main()
