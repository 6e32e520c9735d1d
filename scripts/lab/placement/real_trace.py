#!/usr/bin/env python3
"""Place the jobs of one trace on the devices of this machine under each policy, and time it.

    PYTHONPATH=.:scripts python3 -m lab.placement.real_trace --out FOLDER \
        resnet50=runs/colocation/resnet50-fp16-100/artifact encoder=... [--pairs pairs.jsonl]

A job runs an artifact so many times that it takes its time alone (lab/placement/work.py), and holds
memory, in --wrong of the jobs more than it said. Arrivals come in bursts and durations over orders
of magnitude, as in lab/placement/jobs.py, with seconds in place of minutes: 60 jobs within some two
minutes. Devices are all GPUs that are visible, or with --cores N so many parts of the cores. Each
policy has the same trace; one that --until would cut off is not begun, and one that is in the
folder is not run again. Jobs of one GPU take turns of some milliseconds there, or with --mps run
side by side, by a daemon of MPS for the time of the trace. Written after each: real-trace.json,
with every try and the joules of the GPUs, idle ones included, and real-trace.txt. The start of each
job's process is part of its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.colocation.steps import Steps, since_start
from lab.colocation.workers import mps_for_all
from lab.lab import made_by, table, write
from tunerd import api
from tunerd.colocation.load.energy import EnergyMeter
from tunerd.colocation.placement.job_file import JobFile
from tunerd.colocation.placement.policies import POLICIES
from tunerd.system import host
from tunerd.vocabulary import to_json

EXCLUSIVE = "exclusive"
LESS_MAKESPAN, LESS_ENERGY = 0.35, 0.15  # that CARMA found, with training jobs on four A100s
_SIGMA, _LEAST_SECS, _MOST_SECS = 1.2, 0.5, 60.0  # of durations
_BURST, _WITHIN_SECS = 4, 0.2  # jobs of a burst, in the mean, and the seconds between them
_WRONG_LOW, _WRONG_HIGH = 1.2, 1.8
_RATE_SECS = 60.0  # that an artifact may take to be timed
_HEADS = ("policy", "makespan, s", "less", "energy, kJ", "less", "mean wait, s", "p95 wait, s",
          "out of memory, recovered", "failed")  # fmt: skip


def trace(
    options: argparse.Namespace, artifacts: Mapping[str, Path], rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return jobs as a file of jobs has them; the same for the same seed."""
    draw = random.Random(options.seed)
    jobs: list[dict[str, Any]] = []
    at = 0.0
    while len(jobs) < options.jobs:
        name = draw.choice(list(artifacts))
        secs = draw.lognormvariate(math.log(options.median_secs), _SIGMA)
        secs = min(max(secs, _LEAST_SECS), _MOST_SECS)
        said = round(draw.uniform(*options.gib), 1)
        is_wrong = draw.random() < options.wrong
        held = said * (draw.uniform(_WRONG_LOW, _WRONG_HIGH) if is_wrong else 0.8)
        command = [sys.executable, "-m", "lab.placement.work", str(artifacts[name])]
        command += ["--calls", str(max(1, round(secs * rates[name])))]
        command += [] if options.cores else ["--hold-gib", f"{held:.1f}"]
        jobs.append({
            "name": f"{len(jobs):02d}-{name}", "command": command, "artifact": str(artifacts[name]),
            "memory_gib": said, "after": round(at, 2),
        })  # fmt: skip
        is_last = draw.random() < 1 / _BURST
        at += draw.expovariate(1 / (options.between_secs if is_last else _WITHIN_SECS))
    return jobs


def rate_of(artifact: Path, secs: float) -> float:
    """Return how often a second an artifact runs alone. Raises RuntimeError where it does not."""
    command = [sys.executable, "-m", "lab.placement.work", str(artifact), "--secs", str(secs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RATE_SECS, check=False)
    if done.returncode:
        raise RuntimeError(f"{artifact}: {done.stderr[-400:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["calls_per_sec"])


def placed(file: Path, policy: str, out: Path, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Carry a trace out under a policy; return what came of it."""
    meters = [EnergyMeter(gpu.uuid) for gpu in host.facts().gpus]
    for meter in meters:
        meter.start()
    found = api.colocate_place(file, policy=policy, out=out)
    for meter in meters:
        meter.stop()
    known = [meter.joules for meter in meters if meter.joules is not None]
    arrived = {job["name"]: job["after"] for job in jobs}
    ended = [each for each in found.tries if each.what == "ended"]
    lost = {each.job for each in found.tries if each.what == "out of memory"}
    return {
        "makespan_secs": max((each.end for each in found.tries), default=0.0),
        "joules": math.fsum(known) if known else None,
        "wait_secs": [each.start - arrived[each.job] for each in ended],
        "recovered": len(lost & {each.job for each in ended}),
        "failed": dict(found.failed),
        "tries": to_json(found.tries),
    }


def job_file(options: argparse.Namespace) -> dict[str, Any]:
    """Return a file of jobs, whose artifacts were timed alone."""
    artifacts = {
        name: Path(of).resolve()
        for name, _, of in (each.partition("=") for each in options.artifacts)
    }
    rates = {name: rate_of(artifact, options.alone_secs) for name, artifact in artifacts.items()}
    devices = {"cores": options.cores} if options.cores else "gpus"
    made = {"version": 1, "devices": devices, "grace": options.grace}
    made |= {"pairs": [str(options.pairs.resolve())]} if options.pairs else {}
    return made | {"jobs": trace(options, artifacts, rates)}


def carry_out(policies: Sequence[str], file: Path, document: dict[str, Any], steps: Steps) -> None:
    """Place the jobs under each policy that the document has not yet."""
    jobs = json.loads(file.read_text())["jobs"]
    for policy in policies:
        if policy in document["found"]:
            continue
        needed = _makespan(document["found"])
        with steps.step(f"the trace under {policy}", policy):
            steps.left_secs(needed, keep=needed)
            found = placed(file, policy, file.parent / policy, jobs)
            document["found"][policy] = found
            document["problems"].pop(policy, None)


def _makespan(found: Mapping[str, Any]) -> float:
    """Return the seconds that the next policy may take: of those that share, the most so far."""
    secs = {policy: float(each["makespan_secs"]) for policy, each in found.items()}
    alone = secs.pop(EXCLUSIVE, 0.0)
    return max(secs.values(), default=alone / 2)  # jobs share a device by two at least


def tables(document: Mapping[str, Any]) -> str:
    """Return Markdown: each policy, and what it takes less than exclusive."""
    found = document["found"]
    base = found.get(EXCLUSIVE, {})
    rows = []
    for policy, each in found.items():
        waits, joules = each["wait_secs"] or [0.0], each["joules"]
        rows.append([
            policy, f"{each['makespan_secs']:.1f}",
            _less(each["makespan_secs"], base.get("makespan_secs"), LESS_MAKESPAN),
            "-" if joules is None else f"{joules / 1e3:.1f}",
            _less(joules, base.get("joules"), LESS_ENERGY),
            f"{np.mean(waits):.1f}", f"{np.percentile(waits, 95):.1f}",
            str(each["recovered"]), str(len(each["failed"])),
        ])  # fmt: skip
    problems = [f"- {what}: {said}" for what, said in document["problems"].items()]
    shown = table(_HEADS, rows, numbers=range(1, len(_HEADS)))
    return "\n".join([shown, *([""] if problems else []), *problems]) + "\n"


def _less(value: float | None, base: float | None, aim: float) -> str:
    if value is None or not base:
        return "-"
    less = 1 - value / base
    return f"{less:.1%} ({'yes' if less >= aim else 'no'}: {aim:.0%})" if less else "-"


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", nargs="+", metavar="NAME=ARTIFACT")
    parser.add_argument("--policies", default=",".join(POLICIES), help="several with commas")
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--median-secs", type=float, default=3.0, help="of a job alone")
    parser.add_argument("--alone-secs", type=float, default=2.0, help="an artifact is timed alone")
    parser.add_argument("--between-secs", type=float, default=6.0, help="of bursts, in the mean")
    parser.add_argument("--gib", type=float, nargs=2, default=(5.0, 35.0), help="that a job says")
    parser.add_argument("--wrong", type=float, default=0.15, help="part of jobs that hold more")
    parser.add_argument("--grace", default="3s", help="after a placement")
    parser.add_argument("--cores", type=int, help="parts of the cores, in place of GPUs")
    parser.add_argument("--mps", action="store_true", help="jobs of one GPU run side by side")
    parser.add_argument("--pairs", type=Path, help="measured pairs, for `estimated`")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="seconds, after which none is begun"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    since_start()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path, file = out / "real-trace.json", out / "jobs.json"
    document: dict[str, Any] = {**made_by(), "found": {}}
    if path.exists():
        before = json.loads(path.read_text())
        document |= {key: before[key] for key in ("found", "took_secs", "problems")}

    def save() -> None:
        write(path, document)
        (out / "real-trace.txt").write_text(tables(document))

    steps = Steps(document, save, options.until)
    daemon = mps_for_all(out / "mps") if options.mps else contextlib.nullcontext()
    with daemon:
        if not file.exists():  # the trace is that of the folder's first call
            with steps.step("timing each artifact alone"):
                write(file, job_file(options))
                JobFile.read(file)
        if file.exists():
            carry_out(options.policies.split(","), file, document, steps)
    print(tables(document), end="")


if __name__ == "__main__":
    main()
