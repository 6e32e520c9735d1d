#!/usr/bin/env python3
"""How long it takes to plan, tune and prove a mix of four models, and whether the plan is kept.

    PYTHONPATH=.:scripts python3 -m lab.colocation.mix_of_four --out FOLDER

Exports four models, or takes those that are named, writes mix.yaml and does what `tunerd colocate
mix.yaml` does: tunes each at each of --shares, measures curves and pairs, searches, and runs the
plan at the rates of the mix. One that is not over by --until is stopped, and the same command goes
on: what each step took is added up over all of its calls, in steps.jsonl. Exports are not counted;
--prepare-only makes no more than these. Written at the end: mix.json, with the answer, what each
member was expected to get and what came, the seconds of each kind of step and the facts of the
host, and mix.txt. Runs where PyTorch, torchvision and one NVIDIA GPU are, or with --device cpu and
NAME=FILE.onnx anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lab.colocation import tenants
from lab.colocation.steps import Steps, say, since_start
from lab.colocation.tenants import RUNS
from lab.colocation.workers import found_by
from lab.lab import made_by, write
from tunerd.report.markdown_text import table

AIM_SECS = 600.0
MODELS = ("resnet50", "mobilenet_v2", "efficientnet_b0", "encoder")
# What a step is of, by how its message begins; others are those of the plan's proof.
_KINDS = {
    "tuning": "tuning",
    "making": "tuning",
    "measuring": "curves",
    "the engine": "the engine's cost",
    "searching": "search",
    "starting": "start",
}
_HEADS = ("member", "answered", "p50 expected", "p50", "tail expected", "tail", "within the SLO")
_PAIR = re.compile(r"\S+ at \d+% beside ")


def kind_of(message: str) -> str:
    """Return which part of the work a message belongs to.

    >>> kind_of("resnet50 at 25% beside encoder at 25%: loading one")
    'pairs'
    """
    if _PAIR.match(message):
        return "pairs"
    return next((kind for word, kind in _KINDS.items() if message.startswith(word)), "proof")


def secs_by_kind(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return how long each kind of step took, over all calls.

    lines: of each step its call, its message and the second of the call at which it began; the
    last of a call has no message, and says when it ended.
    """
    took: dict[str, float] = {}
    last: Mapping[str, Any] | None = None
    for line in lines:
        if last is not None and last["call"] == line["call"]:
            kind = kind_of(last["message"])
            took[kind] = took.get(kind, 0.0) + line["at"] - last["at"]
        last = line
    return took


def mix_of(models: Mapping[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Return the mix as its file has it."""
    precision = {"precision": options.precision} if options.precision else {}
    members = [
        {"name": name, "model": str(path), "rate": options.rate, "slo_ms": options.slo_ms}
        | {"percentile": options.percentile}
        | precision
        for name, path in models.items()
    ]
    search = {
        "shares": list(options.shares),
        "budget": options.budget,
        "rounds": options.rounds,
        "visit": options.visit,
    }
    made = {"version": 1, "device": options.device, "members": members, "search": search}
    return made | {"load": {"duration": options.proof}}


def inside(options: argparse.Namespace) -> None:
    """Plan in this process; what each step is, and when it begins, is on the disk at once."""
    from tunerd import api
    from tunerd.report.mix import mix_json

    def step(message: str) -> None:
        say(message)
        _append(options.out, options.inside, message)

    found = api.colocate_plan(options.out / "mix.yaml", out=options.out / "mix", on_step=step)
    options.result.write_text(json.dumps(mix_json(found)))


def planned(options: argparse.Namespace, secs: float) -> dict[str, Any]:
    """Plan in a process of its own, which is stopped after so many seconds."""
    call = time.monotonic()  # which all processes of a machine share
    _append(options.out, call, "starting")
    try:
        return found_by(
            "mix_of_four", "--inside", repr(call), "--out", options.out, secs=secs,
            log=options.out / "logs" / "mix.txt",
        )  # fmt: skip
    finally:
        _append(options.out, call, "")


def _append(out: Path, call: float, message: str) -> None:
    line = {"call": call, "at": time.monotonic() - call, "message": message}
    with (out / "steps.jsonl").open("a") as steps:
        steps.write(json.dumps(line) + "\n")


def tables(document: Mapping[str, Any]) -> str:
    """Return Markdown: how long it took, and what came of what was expected."""
    took, planned = document["by_kind"], document.get("planned")
    total = math.fsum(took.values())
    parts = ", ".join(f"{kind} {secs:.0f} s" for kind, secs in took.items())
    calls = f", in {document['calls']} calls" if document["calls"] > 1 else ""
    lines = [f"{total:.0f} s{calls} ({parts or 'nothing was done'})"]
    if planned is None:
        lines.append("it did not come to its end; the same command goes on")
    else:
        within = "yes" if total <= AIM_SECS else "no"
        lines += [f"{planned['text']}; within {AIM_SECS:.0f} s: {within}", ""]
    proof = (planned or {}).get("proof")
    if proof is not None:
        rows = [
            [
                each["member"], f"{each['answered']:,} of {each['asked']:,}",
                *(_ms(each[of][what]) for what in ("p50_secs", "tail_secs")
                  for of in ("expected", "measured")),
                "-" if each["within"] is None else f"{each['within']:.2%}",
            ]
            for each in proof["members"]
        ]  # fmt: skip
        lines.append(table(_HEADS, rows, numbers=range(1, len(_HEADS))))
    problems = [f"- {what}: {said}" for what, said in document["problems"].items()]
    return "\n".join([*lines, *problems]) + "\n"


def _ms(secs: float | None) -> str:
    return "-" if secs is None else f"{secs * 1e3:.3g} ms"


def _models(options: argparse.Namespace, steps: Steps) -> dict[str, Path]:
    found = {}
    for given in options.models or MODELS:
        name, _, path = given.partition("=")
        if path:
            found[name] = Path(path).resolve()
            continue
        with steps.step(f"exporting {name}"):
            (found[name],) = tenants.exported(name, 1, options.runs)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="NAME[=FILE]", help=", ".join(MODELS))
    parser.add_argument("--precision", default="fp16", help="'' for that of the export")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second of each")
    parser.add_argument("--slo-ms", type=float, default=10.0)
    parser.add_argument("--percentile", type=float, default=99.0, help="of the requests, in time")
    parser.add_argument("--shares", default="25", help="in percent, the whole device besides")
    parser.add_argument("--budget", default="15s", help="of each search")
    parser.add_argument("--rounds", type=int, default=3, help="in which a share is visited")
    parser.add_argument("--visit", default="0.5s", help="of a share in a round")
    parser.add_argument("--proof", default="15s", help="how long the plan is run")
    parser.add_argument("--prepare-only", action="store_true", help="export the models")
    parser.add_argument(
        "--until", type=float, default=580.0, help="seconds, after which it is stopped"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="for models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="or cpu")
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.shares = [int(pct) for pct in options.shares.split(",")]
    options.out, options.runs = options.out.resolve(), options.runs.resolve()
    if options.inside is not None:
        inside(options)
        return
    since_start()
    options.out.mkdir(parents=True, exist_ok=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {**made_by(), "by_kind": {}, "calls": 0}
    path = options.out / "mix.json"
    steps = Steps(document, lambda: write(path, document), options.until)
    models = _models(options, steps)
    if not options.prepare_only:
        (options.out / "mix.yaml").write_text(yaml.safe_dump(mix_of(models, options)))
        with steps.step("planning"):
            document["planned"] = planned(options, steps.left_secs(math.inf))
        lines = [json.loads(x) for x in (options.out / "steps.jsonl").read_text().splitlines()]
        document["by_kind"] = secs_by_kind(lines)
        document["calls"] = len({line["call"] for line in lines})
        write(path, document)
    shown = tables(document)
    (options.out / "mix.txt").write_text(shown)
    print(shown, end="")


if __name__ == "__main__":
    main()
