#!/usr/bin/env python3
"""Say how much a model's latency differs from one process to another, beyond what samples tell.

    scripts/lab/cpu/models_in_processes.py runs/light_squeezenet-cpu50/artifact --cpu-pct 50 \
        --out FOLDER

Several fresh processes, each a slice of the same cores or of the same share of a GPU, have the
artifact loaded; one at a time measures it, in turns, so that a clock or a neighbour meets them all.
Of each process the median of its rounds counts. Prints a table and writes FOLDER/processes.json
and processes.txt: how far the processes are apart, and how far the rounds of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, table, write
from tunerd.errors import HostError, InfrastructureError, TunerdError
from tunerd.slices import member, plan
from tunerd.vocabulary import MODEL, Measurement, SliceRequest, to_json

ROUND = replace(MODEL, name="processes-v1", min_samples=10, max_samples=10, max_total_secs=2.0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the samples of every round of each process, in the order in which they were taken."""
    kind, pct = ("cpu", options.cpu_pct) if options.gpu_pct is None else ("mps", options.gpu_pct)
    planned = plan(SliceRequest(kind, pct, per_device=1))
    if planned.problem:
        raise HostError(planned.problem)
    (spec,) = planned.slices[:1]
    names = [f"{spec.slice_id}-{number}" for number in range(options.processes)]
    rounds: list[list[list[float]]] = [[] for _ in names]
    with contextlib.ExitStack() as stack:
        slices = [stack.enter_context(member(kind)(replace(spec, slice_id=n))) for n in names]
        proofs = [one.prove() for one in slices]
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for one, samples in zip(slices, rounds, strict=True):
                (result,) = one.launch().compare_models([str(options.artifact.resolve())], ROUND)
                if not isinstance(result, Measurement):
                    raise InfrastructureError(f"the artifact does not run: {result.message}")
                samples.append(list(result.run_secs))
    return {
        **made_by(),
        "proof": to_json(proofs[0]),
        "profile": to_json(ROUND),
        "rounds": rounds,
    }


def shown(rounds: Sequence[Sequence[Sequence[float]]]) -> str:
    """Return a table: medians of each process and of its rounds, and how far they are apart."""
    lines = []
    middles = []
    for number, process in enumerate(rounds, 1):
        own = [1e3 * median(samples) for samples in process]
        middles.append(median(own))
        lines.append([str(number), f"{middles[-1]:.4g}", f"{min(own):.4g} to {max(own):.4g}"])
    within = [apart([median(samples) for samples in process]) for process in rounds]
    return table(["process", "ms", "its rounds, ms"], lines, numbers=range(1, 2)) + (
        f"\n\nProcesses are {100 * apart(middles):.2f}% apart, the least and the largest of them; "
        f"rounds of one process {100 * median(within):.2f}%, the median of them."
    )


def apart(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    share = parser.add_mutually_exclusive_group(required=True)
    share.add_argument("--cpu-pct", type=int)
    share.add_argument("--gpu-pct", type=int)
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = measure(options)
    except TunerdError as error:
        print(f"models_in_processes: {error}", file=sys.stderr)
        return int(error.exit_code)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "processes.json", found)
    table = shown(found["rounds"])
    (options.out / "processes.txt").write_text(table + "\n")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
