#!/usr/bin/env python3
"""Tune a model on a device that serves others, and see what that costs those who serve.

    PYTHONPATH=.:scripts python3 -m lab.colocation.tuning_beside PLAN --out FOLDER -- \
        model.onnx --gpu-pct 40 --precision fp16 --budget 30s [--warm-start RUN]

PLAN is a plan as `tunerd colocate bench` takes it, with the rates of its members; an engine serves
it in a process of its own, before, while and after `tunerd tune` runs with what follows the two
dashes. It gets --serving PLAN, so that it has as many slices as the members bear by the pairs in
pairs.jsonl beside the plan; what it says of that is kept. Of each member and each of the three
times: requests and answers a second, and the median and 99% of the latencies, from the moment at
which a request was meant to come. The start of the run, without which there is no search, counts as
the run. Writes beside.json, with every latency, and beside.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.colocation.steps import say, since_start
from lab.lab import made_by, table, write

ALONE_SECS = 10.0  # before, and after
_PIECE_SECS = 5.0  # of load at a time, after which is looked whether there is to be more
_TIMES = ("before", "beside", "after")


def serve(path: Path, result: Path) -> None:
    """Serve a plan under its load until standard input ends; note when each request was meant."""
    from tunerd.colocation import Engine, Plan, artifacts
    from tunerd.colocation.load.generator import run_load

    plan = Plan.read(path)
    load = plan.load.model_copy(update={"duration": _PIECE_SECS})
    inputs = {member.name: artifacts.sample_inputs(member.artifact) for member in plan.members}
    found: list[tuple[str, float, float, str]] = []
    with Engine(plan) as engine:
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            began = time.time()
            observed = run_load(engine, load.model_copy(update={"seed": len(found)}), inputs)
            found += [
                (each.member, began + each.meant_at, each.latency_secs, each.end)
                for each in observed.counted
            ]
    result.write_text(json.dumps(found))


def latencies(
    samples: Sequence[Sequence[Any]], moments: Sequence[float]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what came of each member's requests in each of the times, which the moments part."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, first, last in zip(_TIMES, moments[:-1], moments[1:], strict=True):
        for member in dict.fromkeys(sample[0] for sample in samples):
            own = [s for s in samples if s[0] == member and first <= s[1] < last]
            done = [round(s[2] * 1e6) for s in own if s[3] == "done"]
            found.setdefault(member, {})[name] = {"asked": len(own), "latencies_us": done}
    return found


def tables(document: Mapping[str, Any]) -> str:
    rows = []
    for member, times in document["found"].items():
        for name, of in times.items():
            own = of["latencies_us"] or [float("nan")]
            rows.append([
                member, name, f"{of['asked']:,}", f"{len(of['latencies_us']):,}",
                f"{statistics.median(own) / 1e3:.3g}", f"{np.percentile(own, 99) / 1e3:.3g}",
            ])  # fmt: skip
    heads = ("member", "the run", "asked", "answered", "median, ms", "p99, ms")
    lines = [table(heads, rows, numbers=range(2, len(heads))), ""]
    lines.append(f"the run took {document['tune_secs']:.0f} s, exit code {document['exit_code']}")
    lines += [f"it said: {line}" for line in document["said"]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given[:cut])
    if options.result is not None:
        serve(options.plan, options.result)
        return
    if options.out is None or cut == len(given):
        parser.error("--out and, behind two dashes, what `tunerd tune` takes are needed")
    since_start()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    result = out / "served.json"
    command = [sys.executable, "-m", "lab.colocation.tuning_beside", options.plan]
    with (out / "served.txt").open("w") as errors:
        serving = subprocess.Popen(
            [*map(str, command), "--result", str(result)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert serving.stdin is not None
        assert serving.stdout is not None
        if serving.stdout.readline().strip() != "ready":
            raise SystemExit(f"nothing serves: {(out / 'served.txt').read_text()[-400:]}")
        moments = [time.time()]
        time.sleep(ALONE_SECS)
        moments.append(time.time())
        say("it serves; tuning beside it")
        tune = [sys.executable, "-m", "tunerd", "tune", *given[cut + 1 :]]
        tune += ["--serving", str(options.plan), "--out", str(out / "run")]
        ended = subprocess.run(tune, capture_output=True, text=True, check=False)
        moments.append(time.time())
        time.sleep(ALONE_SECS)
        moments.append(time.time())
        serving.stdin.close()
        serving.wait()
    (out / "tune.txt").write_text(ended.stdout + ended.stderr)
    words = ("slower beside", "not estimated", "--serving")
    said = [line for line in ended.stderr.splitlines() if any(word in line for word in words)]
    document = made_by() | {
        "tune": tune[3:],
        "tune_secs": moments[2] - moments[1],
        "exit_code": ended.returncode,
        "said": said,
        "found": latencies(json.loads(result.read_text()), moments),
    }
    write(out / "beside.json", document, indent=None)
    result.unlink()
    (out / "beside.txt").write_text(tables(document))
    print(tables(document), end="")


if __name__ == "__main__":
    main()
